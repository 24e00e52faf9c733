// Tokens drawn from rows of logits; what that means is said in sampling.py.
//
// A row that draws takes the first of its tokens for which logit + temperature * noise is largest, as far as there are tokens that it
// keeps. The largest logit of a row has distance 0, any other one (largest - logit) / temperature: top-k, top-p and min-p say up to which
// distance tokens are kept. For top-p, weights are summed by buckets of distances, and only the bucket in which the last one kept lies is
// looked through. Weights are e^-distance in units of 2^-42, and integers: no order of summation, and so no number of threads or rows, can
// change a token. For top-k, the k-th largest of what runs of tokens have at most is reached by k tokens, and by few more: among these is the
// last one kept. Where k is large, numbers are summed as weights are. Runs that have nothing to be kept are not looked at again.

#pragma once

#include <functional>
#include <numeric>
#include <vector>

#include "noise.h"
#include "sampling.h"

namespace weft {

// How a row draws; mirrored by cpu_sampling.py.
struct Draw {
    Noise noise;
    float limit;  // of the distance, by min-p
    double top_k, top_p;

    bool is_one() const { return noise.temperature > 0; }
    bool limits_number(int64_t size) const { return top_k > 0 && top_k < double(size); }
    bool is_ranked(int64_t size) const { return is_one() && (limits_number(size) || top_p < 1); }
    bool is_limited(int64_t size) const { return is_one() && (is_ranked(size) || limit < INFINITY); }
};

constexpr float UNITS = 0x1p42f;     // of the largest weight; sums over 2^21 tokens fit in 64 bits
constexpr float WEIGHTLESS = 30;     // a distance of less than a unit

// Of `count` logits. One copy of the code, so that a logit always has the same bits.
__attribute__((noinline)) inline void find_distances(float* distances, const float* logits, int64_t count, float most, float temperature) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(distances + i, (broadcast(most) - load(logits + i)) / broadcast(temperature));
    for (; i < count; i++) distances[i] = (most - logits[i]) / temperature;
}

// Of `count` distances, in units. What is past `count`, up to a whole vector, is overwritten.
__attribute__((noinline)) inline void weigh(float* weights, const float* distances, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats distance = load(distances + i);
        store(weights + i, has_any(distance <= WEIGHTLESS) ? exponential(-distance) * UNITS : Floats{});
    }
}

// Distances by their bits, whose order is that of the distances: 32 buckets for each power of two. The first one has all that are
// below 2^-12, the last one all past 128, which weigh nothing.
using Key = int32_t;
constexpr int BUCKET_SHIFT = 18, FIRST_BUCKET = (127 - 12) << 5, NUM_BUCKETS = ((12 + 7) << 5) + 1;

inline Key key_of(float distance) { return bit_cast<Key>(distance); }

// The least distance of a bucket; infinite past the last.
inline float begin_of(int bucket) {
    if (bucket == 0) return 0;
    return bucket < NUM_BUCKETS ? bit_cast<float>(Key(FIRST_BUCKET + bucket) << BUCKET_SHIFT) : INFINITY;
}

// Of a run's distances.
inline void find_buckets(int32_t* buckets, const float* distances) {
    for (int i = 0; i < RUN; i += LANES) {
        const Ints bucket = (bit_cast<Ints>(load(distances + i)) >> BUCKET_SHIFT) - FIRST_BUCKET;
        const Ints is_before = bucket < 0, is_past = bucket > NUM_BUCKETS - 1;
        store(buckets + i, (bucket & ~(is_before | is_past)) | ((Ints{} + (NUM_BUCKETS - 1)) & is_past));
    }
}

// As find_noise, but only for vectors that have a token within the limit; whether there is one.
inline bool find_noise_of_kept(float* to, const Noise& noise, int64_t first, const float* distances, int64_t count, float limit) {
    bool is_any_kept = false;
    for (int64_t i = 0; i < count; i += LANES) {
        if (!has_any(load(distances + i) <= limit)) continue;
        find_noise(to + i, noise, first + i, LANES);
        is_any_kept = true;
    }
    return is_any_kept;
}

// Of `count` logits, with what is added to them; -inf where the distance is past the limit.
__attribute__((noinline)) inline void find_scores(float* scores, const float* logits, const float* noise, const float* distances,
                                                  int64_t count, float limit) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats score = load(logits + i) + load(noise + i);
        store(scores + i, choose(load(distances + i) <= limit, score, broadcast(-INFINITY)));
    }
    for (; i < count; i++) scores[i] = distances[i] <= limit ? logits[i] + noise[i] : -INFINITY;
}

// The choice of a step, as what a team does; each row in parts, so that one is work for several threads.
class Drawing {
  public:
    static constexpr int SECTIONS = 7;  // of a team

    // `scores`, if any, take what the tokens taken have.
    Drawing(int64_t* token_ids, float* scores, const float* logits, int64_t row_stride, int64_t num_rows, int64_t size, const Draw* draws,
            int64_t first_token, int num_threads)
        : token_ids_(token_ids), scores_(scores), logits_(logits), row_stride_(row_stride), num_rows_(num_rows), size_(size), draws_(draws),
          first_token_(first_token),
          parts_(num_rows, size, num_threads), found_(size_t(num_rows * parts_.num)), limits_(size_t(num_rows), INFINITY) {
        static thread_local Buffer<float> room;
        for (int64_t row = 0; row < num_rows; row++) is_limited_ |= draws[row].is_limited(size), is_ranked_ |= draws[row].is_ranked(size);
        if (is_limited_) largest_.resize(found_.size()), most_of_runs_ = room.room(size_t(num_rows * parts_.num_runs));
        if (is_ranked_) tallies_.resize(found_.size()), kept_.resize(found_.size()), borders_.resize(size_t(num_rows));
    }

    void run(Team& team) {
        parts_.run(team, num_rows_, [&](const auto& for_each_row, const auto& for_each_part) {
            if (is_limited_) for_each_part([&](int64_t row, int64_t part) {
                if (draws_[row].is_limited(size_))
                    largest_[place(row, part)] = {parts_.find_most_of_runs(most_of_runs_of(row), logits_of(row), part), 0};
            });
            if (is_ranked_) {
                for_each_part([&](int64_t row, int64_t part) { tally(row, part); });
                for_each_row([&](int64_t row) {
                    if (is_ranked(row)) borders_[size_t(row)] = counts_runs(row) ? find_border_of_runs(row) : find_border(row);
                });
                for_each_part([&](int64_t row, int64_t part) { keep(row, part); });
            }
            if (is_limited_) for_each_row([&](int64_t row) { limits_[size_t(row)] = find_limit(row); });
            for_each_part([&](int64_t row, int64_t part) {
                found_[place(row, part)] = draws_[row].is_one() ? find_drawn(row, part) : largest_of_part(row, part);
            });
            for_each_row([&](int64_t row) {
                const Found found = first_of_parts(found_, row);
                token_ids_[row] = token_of(found);
                if (scores_) scores_[row] = found.value;
            });
        });
    }

  private:
    // By how many tokens, or what weight, a bucket of a part adds. Several, for a sum waits for the last one of its bucket.
    using Tally = std::vector<int64_t>;
    static constexpr int NUM_TALLIES = 4;

    // Where a row's last kept distance lies.
    struct Border {
        float least, last;  // of the distances among which it is
        int64_t before;     // what those before them have
        double target;      // the least of what is kept
    };

    size_t place(int64_t row, int64_t part) const { return size_t(row * parts_.num + part); }
    const float* logits_of(int64_t row) const { return logits_ + row * row_stride_; }
    float* most_of_runs_of(int64_t row) const { return most_of_runs_ + row * parts_.num_runs; }

    Found largest_of_part(int64_t row, int64_t part) const {
        const RowSpan all = parts_.span(part);
        if (all.size == 0) return {-INFINITY, 0};
        const Found found = first_largest(logits_of(row) + all.begin, all.size);
        return {found.value, all.begin + found.place};
    }

    Found first_of_parts(const std::vector<Found>& found, int64_t row) const {
        Found most = found[place(row, 0)];
        for (int64_t part = 1; part < parts_.num; part++) {
            const Found& of_part = found[place(row, part)];
            if (!(of_part.value <= most.value) && most.value == most.value) most = of_part;
        }
        return most;
    }

    float largest_of(int64_t row) const { return first_of_parts(largest_, row).value; }

    // Logits below it have a distance of more than the limit, however that is rounded, or taken for 0.
    double least_within(int64_t row, float limit) const {
        return double(largest_of(row)) - (double(limit) * (1 + 0x1p-20) + 0x1p-125) * draws_[row].noise.temperature;
    }

    // Calls work(distances, count, begin) for each run of a part that may have a distance within the limit; past `count` distances are
    // infinite.
    template <class Work>
    void for_each_run(int64_t row, int64_t part, float limit, const Work& work) const {
        alignas(64) float distances[RUN];
        const RowSpan all = parts_.span(part);
        const float most = largest_of(row);
        const double least = least_within(row, limit);
        for (int64_t begin = all.begin; begin < all.begin + all.size; begin += RUN) {
            if (double(most_of_runs_of(row)[begin / RUN]) < least) continue;
            const int64_t count = std::min<int64_t>(RUN, size_ - begin);
            if (count < RUN) std::fill(distances, distances + RUN, INFINITY);
            find_distances(distances, logits_of(row) + begin, count, most, draws_[row].noise.temperature);
            work(distances, count, begin);
        }
    }

    bool is_ranked(int64_t row) const { return draws_[row].is_ranked(size_) && std::isfinite(largest_of(row)); }

    // The first of the largest scores.
    Found find_drawn(int64_t row, int64_t part) const {
        const RowSpan all = parts_.span(part);
        if (draws_[row].is_limited(size_)) return find_drawn_of_kept(row, part);
        const Found found = first_largest(logits_of(row) + all.begin, all.size, draws_[row].noise, first_token_ + all.begin, -INFINITY);
        return {found.value, all.begin + found.place};
    }

    Found find_drawn_of_kept(int64_t row, int64_t part) const {
        alignas(64) float noise[RUN] = {}, scores[RUN];
        const float limit = limits_[size_t(row)];
        Found found{-INFINITY, parts_.span(part).begin};
        if (!std::isfinite(largest_of(row))) return found;  // a row that has no token
        for_each_run(row, part, limit, [&](const float* distances, int64_t count, int64_t begin) {
            if (!find_noise_of_kept(noise, draws_[row].noise, first_token_ + begin, distances, count, limit)) return;
            find_scores(scores, logits_of(row) + begin, noise, distances, count, limit);
            const float of_run = largest(scores, count);
            if (of_run > found.value) found = {of_run, begin + first_of(scores, of_run)};
        });
        return found;
    }

    // Whether the runs tell the last one kept: k of them, of which most have one token of the k.
    bool counts_runs(int64_t row) const { return draws_[row].limits_number(size_) && draws_[row].top_k * 4 <= double(parts_.num_runs); }

    Border find_border_of_runs(int64_t row) const {
        static thread_local std::vector<float> most;
        most.assign(most_of_runs_of(row), most_of_runs_of(row) + parts_.num_runs);
        const auto last = most.begin() + int64_t(draws_[row].top_k) - 1;
        std::nth_element(most.begin(), last, most.end(), std::greater<float>());
        Border border{0, 0, 0, draws_[row].top_k};
        find_distances(&border.last, &*last, 1, largest_of(row), draws_[row].noise.temperature);
        return border;
    }

    void tally(int64_t row, int64_t part) {
        if (!is_ranked(row) || counts_runs(row)) return;
        Tally& tally = tallies_[place(row, part)];
        tally.assign(NUM_TALLIES * NUM_BUCKETS, 0);
        const bool is_number = draws_[row].limits_number(size_);
        const double least = is_number ? -INFINITY : least_within(row, last_that_top_p_keeps(row));
        for_each_run(row, part, is_number ? INFINITY : WEIGHTLESS, [&](const float* distances, int64_t count, int64_t begin) {
            alignas(64) float weights[RUN];
            alignas(64) int32_t buckets[RUN];
            alignas(64) int64_t added[RUN];
            if (is_number)
                std::fill_n(weights, RUN, 1.0f);
            else
                weigh(weights, distances, RUN);
            for (int i = 0; i < RUN; i++) added[i] = int64_t(weights[i]);
            if (double(most_of_runs_of(row)[begin / RUN]) < least) {
                tally[NUM_BUCKETS - 1] += std::accumulate(added, added + RUN, int64_t(0));
                return;
            }
            find_buckets(buckets, distances);
            for (int64_t i = 0; i < count; i++) tally[size_t(i % NUM_TALLIES * NUM_BUCKETS + buckets[i])] += added[i];
        });
    }

    // No less than it: as many tokens as there are, all past it, weigh less than 1 - p of the largest.
    float last_that_top_p_keeps(int64_t row) const { return float(std::log(double(size_) / (1 - draws_[row].top_p))) + 0x1p-10f; }

    Border find_border(int64_t row) const {
        Tally total(NUM_BUCKETS, 0);
        int64_t all = 0;
        for (int64_t part = 0; part < parts_.num; part++)
            for (int i = 0; i < NUM_TALLIES * NUM_BUCKETS; i++) {
                const int64_t of_part = tallies_[place(row, part)][size_t(i)];
                total[size_t(i % NUM_BUCKETS)] += of_part, all += of_part;
            }
        const bool is_number = draws_[row].limits_number(size_);
        Border border{0, 0, 0, is_number ? draws_[row].top_k : least_weight(row, all)};
        int bucket = 0;
        while (bucket < NUM_BUCKETS - 1 && double(border.before + total[size_t(bucket)]) < border.target)
            border.before += total[size_t(bucket++)];
        const bool is_last = bucket == NUM_BUCKETS - 1;
        border.least = is_number ? 0 : begin_of(bucket);  // top-p comes after top-k
        border.last = is_last ? INFINITY : bit_cast<float>(key_of(begin_of(bucket + 1)) - 1);
        return border;
    }

    double least_weight(int64_t row, int64_t total) const { return std::max(draws_[row].top_p * double(total), 1.0); }

    // The distances of the border; by number, which top-p comes after, also of those before it.
    void keep(int64_t row, int64_t part) {
        if (!is_ranked(row)) return;
        std::vector<float>& kept = kept_[place(row, part)];
        kept.clear();
        const Border& border = borders_[size_t(row)];
        for_each_run(row, part, border.last, [&](const float* distances, int64_t count, int64_t) {
            float found[RUN];
            int num_found = 0;
            for (int64_t i = 0; i < count; i++) {  // without branches, which would be guessed wrong
                found[num_found] = distances[i];
                num_found += int(distances[i] >= border.least) & int(distances[i] <= border.last);
            }
            kept.insert(kept.end(), found, found + num_found);
        });
    }

    // The largest distance that a row keeps.
    float find_limit(int64_t row) const {
        const float by_min_p = draws_[row].limit;
        if (!is_ranked(row)) return by_min_p;
        std::vector<float> distances;
        for (int64_t part = 0; part < parts_.num; part++) {
            const std::vector<float>& kept = kept_[place(row, part)];
            distances.insert(distances.end(), kept.begin(), kept.end());
        }
        if (!draws_[row].limits_number(size_)) {
            const Border& border = borders_[size_t(row)];
            return std::min(by_min_p, last_of_weight(distances, border.before, border.target));
        }
        const auto last = distances.begin() + int64_t(draws_[row].top_k) - 1;
        std::nth_element(distances.begin(), last, distances.end());
        const float limit = *last;
        if (!(draws_[row].top_p < 1)) return std::min(by_min_p, limit);
        distances.erase(std::remove_if(distances.begin(), distances.end(), [=](float x) { return x > limit; }), distances.end());
        const int64_t total = weight_of(distances.data(), distances.data() + distances.size());
        return std::min(by_min_p, last_of_weight(distances, 0, least_weight(row, total)));
    }

    // The distance up to which, with what comes before these, the weights reach the target; by halves, so that not all need be sorted.
    static float last_of_weight(std::vector<float>& distances, int64_t before, double target) {
        float *begin = distances.data(), *end = begin + distances.size();
        while (end - begin > 1) {
            float* const middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end);
            const int64_t reached = before + weight_of(begin, middle);
            if (double(reached) < target)
                before = reached, begin = middle;
            else
                end = middle;
        }
        return *begin;
    }

    static int64_t weight_of(const float* begin, const float* end) {
        alignas(64) float distances[CHUNK], weights[CHUNK];
        int64_t sum = 0;
        for (; begin < end; begin += CHUNK) {
            const int64_t count = std::min<int64_t>(CHUNK, end - begin);
            std::fill(std::copy_n(begin, count, distances), distances + CHUNK, INFINITY);
            weigh(weights, distances, count);
            for (int64_t i = 0; i < count; i++) sum += int64_t(weights[i]);
        }
        return sum;
    }

    int64_t* const token_ids_;
    float* const scores_;
    const float* const logits_;
    const int64_t row_stride_, num_rows_, size_;
    const Draw* const draws_;
    const int64_t first_token_;
    const RowParts parts_;
    bool is_limited_ = false, is_ranked_ = false;
    std::vector<Found> found_, largest_;  // [rows][parts], of scores and of logits, as are the next
    float* most_of_runs_ = nullptr;  // [rows][runs], of logits
    std::vector<Tally> tallies_;
    std::vector<Border> borders_;  // [rows]
    std::vector<std::vector<float>> kept_;
    std::vector<float> limits_;  // [rows]
};

}  // namespace weft
