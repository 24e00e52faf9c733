// `Number` as float32, of which a lane has one.

#pragma once

#include "number_type.h"

namespace weft {

inline Ints to_line(const Ints& numbers) { return numbers; }
inline void put_lane(float* line, int lane, const float* number) { line[lane] = *number; }
inline void take_lane(float* number, const float* line, int lane) { *number = line[lane]; }

}  // namespace weft
