// Work on the threads of the OpenMP runtime that torch has loaded, so that there is one pool and no second one beside it.
// The runtime is not linked: its names are weak and resolve to torch's copy; without one, everything runs on the caller.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#ifdef __linux__
#include <sched.h>
#endif

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*run)(void*), void* data, unsigned num_threads, unsigned flags);
__attribute__((weak)) int omp_in_parallel(void);
}

namespace weft {

// One thread's view of the threads that run the same program, section by section: the items of a section are taken by
// whichever thread is free, and the next section begins when all of them are done. No thread waits for another that
// has nothing under way: one that the kernel has put aside between two items holds nobody up.
class Team {
  public:
    struct Section {
        alignas(64) std::atomic<int64_t> next{0};
        alignas(64) std::atomic<int64_t> done{0};
    };

    Team(Section* sections, int size) : section_(sections), size_(size) {}

    int size() const { return size_; }

    // Calls work(item) for every item below num_items, in any order. All threads of the team call it.
    template <class Work>
    void for_each(int64_t num_items, const Work& work) {
        if (size_ == 1) {
            for (int64_t item = 0; item < num_items; item++) work(item);
            return;
        }
        Section& section = *section_++;
        int64_t num_done = 0;
        for (int64_t item; (item = section.next.fetch_add(1, std::memory_order_relaxed)) < num_items; num_done++) work(item);
        if (num_done) section.done.fetch_add(num_done, std::memory_order_acq_rel);
        for (int turn = 0; section.done.load(std::memory_order_acquire) < num_items; turn++) pause(turn);
    }

    // Within for_each, the item that this thread is likely to get after this one; may be past the last.
    int64_t likely_after(int64_t item) const {
        return size_ == 1 ? item + 1 : section_[-1].next.load(std::memory_order_relaxed);
    }

  private:
    static void pause(int turn) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
#ifdef __linux__
        if (turn % SPINS == SPINS - 1) sched_yield();  // whoever we wait for may want this core
#endif
    }

    static constexpr int SPINS = 4096;
    Section* section_;
    int size_;
};

// Calls run(team) on num_threads threads including this one; `run` has at most num_sections calls of for_each.
template <class Run>
void on_team(int num_threads, int num_sections, const Run& run) {
    if (num_threads <= 1 || !GOMP_parallel || omp_in_parallel()) {
        Team team(nullptr, 1);
        run(team);
        return;
    }
    struct Shared {
        const Run& run;
        Team::Section* sections;
        int num_threads;
    };
    const std::unique_ptr<Team::Section[]> sections(new Team::Section[num_sections]);
    Shared shared{run, sections.get(), num_threads};
    const auto enter = [](void* data) {
        const Shared& shared = *static_cast<const Shared*>(data);
        Team team(shared.sections, shared.num_threads);
        shared.run(team);
    };
    GOMP_parallel(enter, &shared, unsigned(num_threads), 0);
}

}  // namespace weft
