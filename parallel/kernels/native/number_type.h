// The type of numbers; what there is for it is in number.h.

#pragma once

#include "shuffles.h"
#include "wide.h"

namespace weft {

#if WEFT_IS_FLOAT32
using Number = float;
#else
struct Number {
    uint16_t bits;
};
#ifdef WEFT_HAS_PAIRS
#define WEFT_HAS_PAIRS_IN_LINES
#endif
#endif

constexpr int PER_LANE = int(sizeof(float) / sizeof(Number));

inline float to_float(float x) { return x; }
inline void put(float* place, float x) { *place = x; }

}  // namespace weft
