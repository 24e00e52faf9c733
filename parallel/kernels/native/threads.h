// Work on the threads of the OpenMP runtime that torch has loaded, so that there is one pool and no second one beside it.
// The runtime is not linked: its names are weak and resolve to torch's copy; without one, everything runs on the caller.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#ifdef __linux__
#include <sched.h>
#endif

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*run)(void*), void* data, unsigned num_threads, unsigned flags);
__attribute__((weak)) void GOMP_parallel_start(void (*run)(void*), void* data, unsigned num_threads);
__attribute__((weak)) void GOMP_parallel_end(void);
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

    // `num_over`: how many sections are done, for a thread that comes when some may be.
    Team(Section* sections, int size, std::atomic<int64_t>* num_over = nullptr, bool is_late = false)
        : sections_(sections), section_(sections), size_(size), num_over_(num_over), is_late_(is_late) {}

    int size() const { return size_; }

    // Calls work(item) for every item below num_items, in any order. All threads of the team call it.
    template <class Work>
    void for_each(int64_t num_items, const Work& work) {
        if (size_ == 1) {
            for (int64_t item = 0; item < num_items; item++) work(item);
            return;
        }
        const int64_t index = section_ - sections_;
        Section& section = *section_++;
        if (is_late_) {
            is_late_ = index < num_over_->load(std::memory_order_acquire);
            if (is_late_) return;
        }
        int64_t num_done = 0;
        for (int64_t item; (item = section.next.fetch_add(1, std::memory_order_relaxed)) < num_items; num_done++) work(item);
        if (num_done && section.done.fetch_add(num_done, std::memory_order_acq_rel) + num_done == num_items && num_over_)
            num_over_->store(index + 1, std::memory_order_release);
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
    Section *const sections_, *section_;
    int size_;
    std::atomic<int64_t>* num_over_;
    bool is_late_;
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

// A team that begins without the thread that starts it, which joins in finish(), or before it starts another. Who else
// finishes it has all done, and leaves the team to that thread.
class StartedTeam {
  public:
    // Finishes the one that this thread has under way.
    static void finish_last() {
        if (last_) last_->finish();
    }

    // Whether another thread would begin.
    static bool can_start(int num_threads) {
        finish_last();
        return num_threads > 1 && GOMP_parallel_start && GOMP_parallel_end && !omp_in_parallel();
    }

    // `end` is called once, when all is done.
    StartedTeam(int num_threads, int num_sections, std::function<void(Team&)> run, std::function<void()> end)
        : run_(std::move(run)), end_(std::move(end)), sections_(new Team::Section[num_sections]), num_threads_(num_threads), is_started_(can_start(num_threads)) {
        const auto enter = [](void* data) { static_cast<StartedTeam*>(data)->enter(false); };
        if (!is_started_) return;
        last_ = this;
        GOMP_parallel_start(enter, this, unsigned(num_threads));
    }

    // Again for nothing.
    void finish() {
        if (!is_done_) {
            enter(true);
            end_();
            is_done_ = true;
        }
        if (last_ == this) {
            last_ = nullptr;
            GOMP_parallel_end();
            has_ended_ = true;
        }
    }

    // Whether no thread will look at it any more.
    bool has_ended() const { return has_ended_ || !is_started_; }

  private:
    void enter(bool is_late) {
        Team team(sections_.get(), is_started_ ? num_threads_ : 1, &num_over_, is_late);
        run_(team);
    }

    static inline thread_local StartedTeam* last_ = nullptr;
    const std::function<void(Team&)> run_;
    const std::function<void()> end_;
    const std::unique_ptr<Team::Section[]> sections_;
    const int num_threads_;
    const bool is_started_;
    bool is_done_ = false, has_ended_ = false;
    alignas(64) std::atomic<int64_t> num_over_{0};  // sections
};

}  // namespace weft
