// The type of numbers of 16 bits; what there is for it is in half.h.

#pragma once

#include "shuffles.h"
#include "wide.h"

namespace weft {

struct Half {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline void put(float* place, float x) { *place = x; }

}  // namespace weft
