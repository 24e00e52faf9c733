// The largest outputs in float32 of a product with a table, as a part of what a team does.

#pragma once

#include <memory>

#include "matrix.h"
#include "screened.h"

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

// What is searched, and where what is found goes; mirrored by ctypes in library.py.
struct Table {
    const BFloat16* values;  // packed
    void* screen;            // a copy of it in 8 bits; null where there is none
    int64_t num_out;
    int32_t num_in;
    float* largest;      // [rows]
    int64_t* indices;    // [rows]
    RowNoise noise;      // added to the outputs
    Edits edits;         // made before that; only where rows are screened
};

// One at a time in the thread that makes it.
class TableSearch {
  public:
    static constexpr int SECTIONS = 3;  // of a team, at most

    TableSearch(const Table& table, const LeftRows& left)
        : table_(table), left_(left), packed_{table.values, nullptr, table.num_out, table.num_in}, found_(left.count, table.num_out) {
#ifdef WEFT_HAS_SCREEN
        static_assert(SCREEN_SECTIONS <= SECTIONS);
        if (table.screen && left.count <= most_screened_rows()) {
            screened_ = std::make_unique<ScreenedSearch>(left, packed_, Screen(table.screen, table.num_out, table.num_in), table.noise, table.edits);
            return;
        }
#endif
        static_assert(MULTIPLY_SECTIONS <= SECTIONS);
        static thread_local Buffer<BFloat16> scratch;
        scratch_ = scratch.room(scratch_size(left.count, table.num_in));
    }

    void run(Team& team) {
#ifdef WEFT_HAS_SCREEN
        if (screened_) return screened_->run(found_.searched(table_.noise), team);
#endif
        multiply(found_.searched(table_.noise), left_, packed_, scratch_, team);
    }

    // When the team is done.
    void write() const { found_.write(table_.largest, table_.indices); }

  private:
    const Table table_;
    const LeftRows left_;
    const PackedMatrix packed_;
    Largest<float> found_;
    BFloat16* scratch_ = nullptr;
#ifdef WEFT_HAS_SCREEN
    std::unique_ptr<ScreenedSearch> screened_;
#endif
};

}  // namespace weft

#endif
