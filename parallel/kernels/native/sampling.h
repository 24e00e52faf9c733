// The largest logit of each row.

#pragma once

#include <algorithm>
#include <cmath>

#include "threads.h"
#include "vector.h"

namespace weft {

// Where the first of the largest is, in [0, size); -1 where a NaN is in the row or the largest is infinite.
template <class T>
int64_t first_largest(const T* row, int64_t size) {
    constexpr int64_t PART = 64 * LANES;
    float largest = -INFINITY;
    int64_t first = 0;  // of the part that has it
    Ints is_nan{};
    for (int64_t begin = 0; begin < size; begin += PART) {
        const int64_t end = std::min(begin + PART, size);
        Floats lanes[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
        int64_t i = begin;
        for (; i + 4 * LANES <= end; i += 4 * LANES) {
            for (int k = 0; k < 4; k++) {
                const Floats x = load(row + i + k * LANES);
                is_nan |= x != x;
                lanes[k] = x > lanes[k] ? x : lanes[k];
            }
        }
        float most = -INFINITY;
        for (const Floats& lane : lanes)
            for (int k = 0; k < LANES; k++) most = std::max(most, lane[k]);
        for (; i < end; i++) {
            const float x = to_float(row[i]);
            is_nan[0] |= x != x;
            most = std::max(most, x);
        }
        if (most > largest) largest = most, first = begin;
    }
    for (int k = 0; k < LANES; k++)
        if (is_nan[k]) return -1;
    if (std::isinf(largest)) return -1;
    while (to_float(row[first]) != largest) first++;
    return first;
}

template <class T>
void choose_largest(int64_t* token_ids, const T* logits, int64_t row_stride, int64_t num_rows, int64_t size, Team& team) {
    team.for_each(num_rows, [=](int64_t row) { token_ids[row] = first_largest(logits + row * row_stride, size); });
}

}  // namespace weft
