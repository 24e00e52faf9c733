// The largest outputs in float32 of a product with a table, as a part of what a team does.

#pragma once

#include <memory>

#include "draws.h"
#include "matrix.h"
#include "screened.h"

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

// What is searched, and where what is found goes; mirrored by ctypes in structures.py.
struct Table {
    const Number* values;  // packed
    void* screen;            // a copy of it in 8 bits; null where there is none
    int64_t num_out;
    int32_t num_in;
    float* largest;      // [rows]
    int64_t* indices;    // [rows]
    RowNoise noise;      // added to the outputs
    Edits edits;         // made before that; only where rows are screened
    // Null, or only where rows are screened: of how many outputs of a row, those of its noise, tokens are drawn, and how.
    const int32_t* numbers;
    const Draw* draws;
};

// One at a time in the thread that makes it.
class TableSearch {
  public:
    static constexpr int SECTIONS = 11;  // of a team, at most

    TableSearch(const Table& table, const LeftRows& left, int num_threads)
        : table_(table), left_(left), packed_{table.values, nullptr, table.num_out, table.num_in}, found_(left.count, table.num_out) {
#ifdef WEFT_HAS_SCREEN
        static_assert(SIFT_SECTIONS + Drawing::SECTIONS <= SECTIONS && SCREEN_SECTIONS <= SIFT_SECTIONS);
        if (table.draws) {
            static thread_local Buffer<float> room;
            sifted_ = {room.room(size_t(left.count * table.num_out)), table.num_out};
            drawing_ = std::make_unique<Drawing>(table.indices, table.largest, sifted_.values, table.num_out, left.count, table.num_out,
                                                 table.draws, table.noise.first_token, num_threads);
        }
        if (table.screen && left.count <= most_screened_rows()) {
            const Screen screen(table.screen, table.num_out, table.num_in);
            screened_ = std::make_unique<ScreenedSearch>(left, packed_, screen, table.noise, table.edits, table.numbers);
            return;
        }
#endif
        static_assert(MULTIPLY_SECTIONS <= SECTIONS);
        static thread_local Buffer<Number> scratch;
        scratch_ = scratch.room(scratch_size(left.count, table.num_in));
    }

    void run(Team& team) {
#ifdef WEFT_HAS_SCREEN
        if (drawing_) {
            screened_->run(sifted_, team);
            return drawing_->run(team);
        }
        if (screened_) return screened_->run(found_.searched(table_.noise), team);
#endif
        multiply(found_.searched(table_.noise), left_, packed_, scratch_, team);
    }

    // When the team is done.
    void write() const {
#ifdef WEFT_HAS_SCREEN
        if (drawing_) return;
#endif
        found_.write(table_.largest, table_.indices);
    }

  private:
    const Table table_;
    const LeftRows left_;
    const PackedMatrix packed_;
    Largest<float> found_;
    Number* scratch_ = nullptr;
#ifdef WEFT_HAS_SCREEN
    std::unique_ptr<ScreenedSearch> screened_;
    Sifted sifted_{};
    std::unique_ptr<Drawing> drawing_;  // from these
#endif
};

}  // namespace weft

#endif
