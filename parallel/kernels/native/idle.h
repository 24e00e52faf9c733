// Memory that is taken before it is written, on cores that nobody else wants.

#pragma once

#ifdef __linux__

#include <cstddef>
#include <pthread.h>
#include <sched.h>

namespace weft {

// Writes pages as they are, so that the system gives them out, in a thread of the lowest priority; the caller waits.
// Such a thread may be put aside anywhere, for seconds, where others want its core: one of Python's would keep Python's
// lock meanwhile, and one within madvise that of the process's addresses, which whoever maps or frees memory needs.
inline void take_when_idle(char* first, size_t size, size_t page) {
    struct Pages {
        char* first;
        size_t size, page;
    };
    const auto run = [](void* data) -> void* {
        const auto& pages = *static_cast<const Pages*>(data);
        const sched_param lowest{};
        sched_setscheduler(0, SCHED_IDLE, &lowest);  // of this thread; a container may forbid it
        for (size_t at = 0; at < pages.size; at += pages.page) {
            char* const byte = pages.first + at;
            char value = __atomic_load_n(byte, __ATOMIC_RELAXED);
            __atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        }
        return nullptr;
    };
    Pages pages{first, size, page};
    pthread_t thread;
    if (pthread_create(&thread, nullptr, run, &pages) == 0) pthread_join(thread, nullptr);
}

}  // namespace weft

#endif
