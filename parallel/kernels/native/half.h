// Numbers of 16 bits: float16 or bfloat16, as the library is compiled.
//
// A line of pairs is 64 bytes, with a pair of numbers for each of 16 lanes:
//
//     to_line(pairs)                                  of lanes that have a pair each
//     put_pair(line, lane, pair), take_pair(...)      one of them in memory
//     join_lines(a, b)                                of 32 numbers each of a and b, the pairs of the first 16 and of the others
//     first_half(line), second_half(line)             the first and the second numbers, in float32
//     load_first_half(at), load_second_half(at)       the same of a line in memory
//     add_products(sums, a, b)                        adds both products of each pair, which are exact, in float32, rounding twice:
//                                                     the second one's first

#pragma once

#if WEFT_IS_FLOAT16
#include "float16.h"
#else
#include "bfloat16.h"
#endif
