// What is done to some outputs of rows before tokens are chosen; sampling.py says what it means.

#pragma once

#include "threads.h"

namespace weft {

// Mirrored by structures.py.
struct Edits {
    const int64_t* starts = nullptr;  // null: nothing
    const int64_t* tokens;
    const float *factors, *offsets;

    bool has(int64_t row) const { return starts && starts[row] < starts[row + 1]; }
};

// No less for a larger x, and to the bit as sampling.py has it: no compiler joins the product and the difference (-ffp-contract=off).
inline float edited(float x, float factor, float offset) { return (x > 0 ? x / factor : x * factor) - offset; }

// Of logits of the tokens from the first one on.
inline void edit_logits(float* logits, int64_t row_stride, int64_t num_rows, int64_t num_columns, const Edits& edits,
                        int64_t first_token, Team& team) {
    team.for_each(num_rows, [=](int64_t row) {
        for (int64_t i = edits.starts[row]; i < edits.starts[row + 1]; i++) {
            const int64_t column = edits.tokens[i] - first_token;
            if (column < 0 || column >= num_columns) continue;
            float& x = logits[row * row_stride + column];
            x = edited(x, edits.factors[row], edits.offsets[i]);
        }
    });
}

}  // namespace weft
