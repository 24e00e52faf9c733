// Sums over ranks that share memory: the processes of one machine that split a model's layers. Each puts its numbers where all can
// read them, waits until all have, and adds up everybody's: "one-shot", in the order of the ranks, so that all get the same bits.
//
// What does not fit into a slot goes in chunks. A rank has two slots, taken in turns: a slot is written anew only when every rank has
// put the chunk after it, and so has added this one up.

#pragma once

#include <atomic>
#include <chrono>

#include "elementwise.h"
#include "threads.h"
#include "vector.h"

#ifdef __linux__
#define WEFT_HAS_ALL_REDUCE
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace weft {

constexpr int64_t SLOT_BYTES = 512 << 10, MAILBOX_BYTES = 4096;
constexpr int64_t RANK_BYTES = MAILBOX_BYTES + 2 * SLOT_BYTES;

// At the beginning of each rank's memory, which is zero at first.
struct alignas(64) Mailbox {
    std::atomic<uint32_t> num_put;       // chunks, modulo 2^32; waited for as a futex
    std::atomic<uint32_t> num_sleeping;  // of the other ranks
    int64_t num_bytes[2];                // in each slot
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Mailbox) <= MAILBOX_BYTES, "processes share it");

enum class Meeting : int32_t { DONE, GONE, LATE, UNEQUAL };  // of all ranks, or why there is none

// One rank's view of the memory; mirrored by ctypes in structures.py.
struct SharedRanks {
    char* memory;            // RANK_BYTES for each rank
    const int32_t* sockets;  // to each rank, closed by the system when that is gone; not to this one
    int32_t rank, num_ranks;
    int64_t timeout_us;
    uint32_t num_put;   // by this rank
    int64_t waited_ns;  // for others, so far

    Mailbox& mailbox(int of) const { return *reinterpret_cast<Mailbox*>(memory + of * RANK_BYTES); }
    char* slot(int of, uint32_t chunk) const { return memory + of * RANK_BYTES + MAILBOX_BYTES + chunk % 2 * SLOT_BYTES; }

    // Tells all that a chunk of this rank lies in its slot, and waits for that of everybody else.
    Meeting meet(uint32_t chunk, int64_t num_bytes) {
        Mailbox& mine = mailbox(rank);
        mine.num_bytes[chunk % 2] = num_bytes;
        mine.num_put.store(chunk + 1);
        num_put = chunk + 1;
        if (mine.num_sleeping.load()) syscall(SYS_futex, &mine.num_put, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
        const auto begin = Clock::now();
        Meeting meeting = Meeting::DONE;
        for (int other = 0; other < num_ranks && meeting == Meeting::DONE; other++)
            if (other != rank) meeting = wait_for(other, chunk, num_bytes, begin);
        waited_ns += nanoseconds_since(begin);
        return meeting;
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr int SPINS = 256, YIELDS = 1024;
    static constexpr int64_t SLEEP_NS = 20'000'000;  // until it is asked whether the other one lives

    static int64_t nanoseconds_since(Clock::time_point begin) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
    }

    Meeting wait_for(int other, uint32_t chunk, int64_t num_bytes, Clock::time_point begin) const {
        Mailbox& theirs = mailbox(other);
        const auto has_put = [&] { return int32_t(theirs.num_put.load(std::memory_order_acquire) - chunk) > 0; };
        for (int turn = 0; !has_put(); turn++) {
            if (turn < SPINS) {
#ifdef __x86_64__
                __builtin_ia32_pause();
#endif
            } else if (turn < SPINS + YIELDS) {
                sched_yield();  // it may want this core
            } else {
                sleep(theirs, chunk);
                if (has_put()) break;
                if (is_gone(other)) return has_put() ? Meeting::DONE : Meeting::GONE;
                if (nanoseconds_since(begin) / 1000 > timeout_us) return Meeting::LATE;
            }
        }
        return theirs.num_bytes[chunk % 2] == num_bytes ? Meeting::DONE : Meeting::UNEQUAL;
    }

    // Until a rank has put its chunk, or some time has passed.
    static void sleep(Mailbox& theirs, uint32_t chunk) {
        const timespec most{0, SLEEP_NS};
        theirs.num_sleeping.fetch_add(1);
        const uint32_t num_put = theirs.num_put.load();
        if (int32_t(num_put - chunk) <= 0) syscall(SYS_futex, &theirs.num_put, FUTEX_WAIT, num_put, &most, nullptr, 0);
        theirs.num_sleeping.fetch_sub(1);
    }

    bool is_gone(int other) const {
        pollfd peer{sockets[other], POLLRDHUP, 0};
        return poll(&peer, 1, 0) > 0;
    }
};

// The sum over all ranks of `count` numbers, in place; float32 inside, rounded once.
class AllReduce {
  public:
    static constexpr int SECTIONS = 3;  // for each chunk

    static int64_t num_chunks(int64_t num_bytes) { return (num_bytes + SLOT_BYTES - 1) / SLOT_BYTES; }

    explicit AllReduce(SharedRanks& ranks) : ranks_(ranks), chunk_(ranks.num_put) {}

    // All threads of the team call it, each with its own count of `num_done` chunks, which begins with 0. Not done: no thread is.
    template <class T>
    bool run(T* x, int64_t count, int64_t& num_done, Team& team) {
        constexpr int64_t MOST = SLOT_BYTES / int64_t(sizeof(T));
        for (int64_t first = 0; first < count; first += MOST) {
            const uint32_t chunk = chunk_ + uint32_t(num_done++);
            const int64_t size = std::min(MOST, count - first);
            if (!add_up(x + first, size, chunk, team)) return false;
        }
        return true;
    }

    Meeting meeting() const { return meeting_.load(std::memory_order_relaxed); }

  private:
    static constexpr int64_t PIECE = 4096, BLOCK = 256;  // numbers: of an item, and that are added up at once

    template <class T>
    bool add_up(T* x, int64_t size, uint32_t chunk, Team& team) {
        const auto slot = [&](int rank) { return reinterpret_cast<T*>(ranks_.slot(rank, chunk)); };
        T* const mine = slot(ranks_.rank);
        const int64_t num_pieces = (size + PIECE - 1) / PIECE;
        team.for_each(num_pieces, [&](int64_t piece) {
            std::copy_n(x + piece * PIECE, std::min(PIECE, size - piece * PIECE), mine + piece * PIECE);
        });
        team.for_each(1, [&](int64_t) { meeting_.store(ranks_.meet(chunk, size * int64_t(sizeof(T))), std::memory_order_relaxed); });
        if (meeting() != Meeting::DONE) return false;
        team.for_each(num_pieces, [&](int64_t piece) {
            const int64_t end = std::min(size, (piece + 1) * PIECE);
            for (int64_t begin = piece * PIECE; begin < end; begin += BLOCK) {
                const int64_t count = std::min(BLOCK, end - begin);
                float sums[BLOCK];
                const T* first = slot(0) + begin;
#pragma omp simd
                for (int64_t i = 0; i < count; i++) sums[i] = to_float(first[i]);
                for (int rank = 1; rank < ranks_.num_ranks; rank++) {
                    const T* next = slot(rank) + begin;
#pragma omp simd
                    for (int64_t i = 0; i < count; i++) sums[i] += to_float(next[i]);
                }
                T* const to = x + begin;
#pragma omp simd
                for (int64_t i = 0; i < count; i++) put(to + i, sums[i]);
            }
        });
        return true;
    }

    SharedRanks& ranks_;
    const uint32_t chunk_;  // the first one
    std::atomic<Meeting> meeting_{Meeting::DONE};
};

}  // namespace weft

#endif
