// The largest logit of each row.

#pragma once

#include <algorithm>
#include <cmath>

#include "threads.h"
#include "vector.h"

namespace weft {

// The largest of `size` numbers; NaN where one of them is.
template <class T>
float largest(const T* row, int64_t size) {
    Floats lanes[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    Ints is_nan{};
    int64_t i = 0;
    const auto add = [&](int k, Floats x) {
        is_nan |= x != x;
        lanes[k] = larger(x, lanes[k]);
    };
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int k = 0; k < 4; k++) add(k, load(row + i + k * LANES));
    for (; i + LANES <= size; i += LANES) add(0, load(row + i));
    float most = largest(larger(larger(lanes[0], lanes[1]), larger(lanes[2], lanes[3])));
    for (; i < size; i++) {
        const float x = to_float(row[i]);
        if (x != x) return NAN;
        most = std::max(most, x);
    }
    return has_any(is_nan) ? NAN : most;
}

// Where `value` is first, which is in the row.
template <class T>
int64_t first_of(const T* row, float value) {
    int64_t first = 0;
    while (to_float(row[first]) != value) first++;
    return first;
}

struct Found {
    float value;    // NaN where one is in the row
    int64_t place;  // the first of the largest
};

template <class T>
Found first_largest(const T* row, int64_t size) {
    constexpr int64_t PART = 64 * LANES;
    Found found{-INFINITY, 0};
    int64_t begin_of_found = 0;
    for (int64_t begin = 0; begin < size; begin += PART) {
        const float of_part = largest(row + begin, std::min(PART, size - begin));
        if (of_part != of_part) return {of_part, begin};
        if (of_part > found.value) found.value = of_part, begin_of_found = begin;
    }
    found.place = begin_of_found + first_of(row + begin_of_found, found.value);
    return found;
}

// The token that a row gives where it takes the largest: -1 where that is not finite.
inline int64_t token_of(const Found& found) { return std::isfinite(found.value) ? found.place : -1; }

template <class T>
void choose_largest(int64_t* token_ids, const T* logits, int64_t row_stride, int64_t num_rows, int64_t size, Team& team) {
    team.for_each(num_rows, [=](int64_t row) { token_ids[row] = token_of(first_largest(logits + row * row_stride, size)); });
}

}  // namespace weft
