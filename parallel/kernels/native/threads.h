// Work on the threads of the OpenMP runtime that torch has loaded, so that there is one pool and no second one beside it.
// The runtime is not linked: its names are weak and resolve to torch's copy; without one, everything runs on the caller.

#pragma once

#include <atomic>

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*run)(void*), void* data, unsigned num_threads, unsigned flags);
__attribute__((weak)) int omp_in_parallel(void);
}

namespace weft {

// Calls work(item) for every item below num_items, in any order, on at most num_threads threads including this one.
template <class Work>
void for_each_item(int64_t num_items, int num_threads, Work work) {
    if (num_threads > num_items) num_threads = int(num_items);
    if (num_threads <= 1 || !GOMP_parallel || omp_in_parallel()) {
        for (int64_t item = 0; item < num_items; item++) work(item);
        return;
    }
    struct Shared {
        Work& work;
        int64_t num_items;
        std::atomic<int64_t> next{0};
    } shared{work, num_items};
    const auto run = [](void* data) {
        Shared& shared = *static_cast<Shared*>(data);
        while (true) {
            const int64_t item = shared.next.fetch_add(1, std::memory_order_relaxed);
            if (item >= shared.num_items) return;
            shared.work(item);
        }
    };
    GOMP_parallel(run, &shared, unsigned(num_threads), 0);
}

}  // namespace weft
