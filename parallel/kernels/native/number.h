// The numbers of a model: bfloat16, float16 or float32, as the library is compiled.
//
// Of the inputs of a product each lane takes as many as it has room for, one of float32 or a pair of 16 bits, from a line of 64 bytes:
//
//     PER_LANE                                        numbers of one output
//     put_lane(line, lane, numbers), take_lane(...)   those of a lane, in memory
//
// In 16 bits (WEFT_HAS_PAIRS_IN_LINES) a line is one of pairs, with a pair of numbers for each of 16 lanes:
//
//     to_line(pairs)                                  of lanes that have a pair each
//     join_lines(a, b)                                of 32 numbers each of a and b, the pairs of the first 16 and of the others
//     first_half(line), second_half(line)             the first and the second numbers, in float32
//     load_first_half(at), load_second_half(at)       the same of a line in memory
//     add_products(sums, a, b)                        adds both products of each pair, which are exact, in float32, rounding twice:
//                                                     the second one's first

#pragma once

#if WEFT_IS_FLOAT32
#include "float32.h"
#elif WEFT_IS_FLOAT16
#include "float16.h"
#else
#include "bfloat16.h"
#endif
