// The operations of `Kernels` that plain torch does slowly on a CPU, behind a C interface: compiled once per machine by
// build.py, called through ctypes by library.py. reference.py defines what each one means.
//
// Pointers are to dense rows unless a stride (in elements) says otherwise. Nothing here checks its arguments.

#pragma once

#define EXPORT extern "C" __attribute__((visibility("default")))

#if WEFT_IS_FLOAT32
#define FOR_EACH_TYPE(DEFINE) DEFINE(number, Number)
#else
#define FOR_EACH_TYPE(DEFINE) \
    DEFINE(float32, float)    \
    DEFINE(number, Number)
#endif
