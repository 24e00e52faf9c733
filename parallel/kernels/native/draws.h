// Tokens drawn from rows of logits; what that means is said in sampling.py.
//
// A row that draws takes the first of its tokens for which logit + temperature * noise is largest, as far as there are tokens that it
// keeps. The largest logit of a row has distance 0, any other one (largest - logit) / temperature: top-k, top-p and min-p say up to which
// distance tokens are kept. For top-k and top-p, numbers or weights are summed by buckets of distances, and only the bucket in which the
// last one kept lies is sorted. Weights are e^-distance in units of 2^-42, and integers: no order of summation, and so no number of threads
// or rows, can change a token.

#pragma once

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

constexpr int64_t CHUNK = 64 * LANES;  // logits whose distances are in the first-level cache
constexpr float UNITS = 0x1p42f;       // of the largest weight; sums over 2^21 tokens fit in 64 bits

// Of `count` logits, up to a chunk. One copy of the code, so that a logit always has the same bits.
__attribute__((noinline)) inline void find_distances(float* distances, const float* logits, int64_t count, float most, float temperature) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(distances + i, (broadcast(most) - load(logits + i)) / broadcast(temperature));
    for (; i < count; i++) distances[i] = (most - logits[i]) / temperature;
}

// Of `count` distances, up to a chunk, in units: 0 of those past the limit. What is past `count`, up to a whole vector, is overwritten.
__attribute__((noinline)) inline void weigh(float* weights, const float* distances, int64_t count, float limit) {
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats distance = load(distances + i);
        const Ints is_kept = distance <= limit;
        store(weights + i, has_any(is_kept) ? choose(is_kept, exponential(-distance) * UNITS, Floats{}) : Floats{});
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

inline int bucket_of(float distance) { return std::clamp((key_of(distance) >> BUCKET_SHIFT) - FIRST_BUCKET, 0, NUM_BUCKETS - 1); }

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

// Of `count` logits, up to a chunk, with what is added to them; -inf where the distance is past the limit.
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
    static constexpr int SECTIONS = 6;  // of a team

    // `scores`, if any, take what the tokens taken have.
    Drawing(int64_t* token_ids, float* scores, const float* logits, int64_t row_stride, int64_t num_rows, int64_t size, const Draw* draws,
            int64_t first_token, int num_threads)
        : token_ids_(token_ids), scores_(scores), logits_(logits), row_stride_(row_stride), num_rows_(num_rows), size_(size), draws_(draws),
          first_token_(first_token),
          num_parts_(choose_parts(num_rows, size, num_threads)), part_size_(((size - 1) / num_parts_ / CHUNK + 1) * CHUNK),
          found_(size_t(num_rows * num_parts_)), limits_(size_t(num_rows), INFINITY) {
        for (int64_t row = 0; row < num_rows; row++) is_limited_ |= draws[row].is_limited(size), is_ranked_ |= draws[row].is_ranked(size);
        if (is_limited_) largest_.resize(found_.size());
        if (is_ranked_) tallies_.resize(found_.size()), kept_.resize(found_.size());
    }

    void run(Team& team) {
        const auto for_each_part = [&](const auto& work) {
            team.for_each(num_rows_ * num_parts_, [&](int64_t item) { work(item / num_parts_, item % num_parts_); });
        };
        if (is_limited_) for_each_part([&](int64_t row, int64_t part) {
            if (draws_[row].is_limited(size_)) largest_[place(row, part)] = largest_of_part(row, part);
        });
        if (is_ranked_) {
            for_each_part([&](int64_t row, int64_t part) { tally(row, part); });
            for_each_part([&](int64_t row, int64_t part) { keep(row, part); });
        }
        if (is_limited_) team.for_each(num_rows_, [&](int64_t row) { limits_[size_t(row)] = find_limit(row); });
        for_each_part([&](int64_t row, int64_t part) {
            found_[place(row, part)] = draws_[row].is_one() ? find_drawn(row, part) : largest_of_part(row, part);
        });
        team.for_each(num_rows_, [&](int64_t row) {
            const Found found = first_of_parts(found_, row);
            token_ids_[row] = token_of(found);
            if (scores_) scores_[row] = found.value;
        });
    }

  private:
    struct Span {
        int64_t begin, size;  // of a row
    };

    // By how many tokens, or what weight, a bucket of a part adds.
    using Tally = std::vector<int64_t>;

    // Where a row's last kept distance lies: the bucket, and what those before it have.
    struct Border {
        int bucket;
        int64_t before;
        double target;  // the least of what is kept
    };

    static int64_t choose_parts(int64_t num_rows, int64_t size, int num_threads) {
        constexpr int64_t LEAST = 8 * CHUNK;
        return num_rows >= num_threads ? 1 : std::max<int64_t>(1, std::min<int64_t>(num_threads, size / LEAST));
    }

    size_t place(int64_t row, int64_t part) const { return size_t(row * num_parts_ + part); }
    const float* logits_of(int64_t row) const { return logits_ + row * row_stride_; }

    Span span(int64_t part) const {
        const int64_t begin = std::min(part * part_size_, size_);
        return {begin, std::min(part_size_, size_ - begin)};
    }

    Found largest_of_part(int64_t row, int64_t part) const {
        const Span all = span(part);
        if (all.size == 0) return {-INFINITY, 0};
        const Found found = first_largest(logits_of(row) + all.begin, all.size);
        return {found.value, all.begin + found.place};
    }

    Found first_of_parts(const std::vector<Found>& found, int64_t row) const {
        Found most = found[place(row, 0)];
        for (int64_t part = 1; part < num_parts_; part++) {
            const Found& of_part = found[place(row, part)];
            if (!(of_part.value <= most.value) && most.value == most.value) most = of_part;
        }
        return most;
    }

    float largest_of(int64_t row) const { return first_of_parts(largest_, row).value; }

    // Of the chunk that begins there; infinite past the end of the row.
    int64_t find_distances_of(float* distances, int64_t row, float most, int64_t begin) const {
        const int64_t count = std::min(CHUNK, size_ - begin);
        std::fill(distances + count / LANES * LANES, distances + CHUNK, INFINITY);
        find_distances(distances, logits_of(row) + begin, count, most, draws_[row].noise.temperature);
        return count;
    }

    // Calls work(distances, count, begin) for each chunk of a part.
    template <class Work>
    void for_each_chunk(int64_t row, int64_t part, const Work& work) const {
        alignas(64) float distances[CHUNK];
        const Span all = span(part);
        const float most = largest_of(row);
        for (int64_t begin = all.begin; begin < all.begin + all.size; begin += CHUNK)
            work(distances, find_distances_of(distances, row, most, begin), begin);
    }

    bool is_ranked(int64_t row) const { return draws_[row].is_ranked(size_) && std::isfinite(largest_of(row)); }

    // The first of the largest scores.
    Found find_drawn(int64_t row, int64_t part) const {
        const Span all = span(part);
        if (draws_[row].is_limited(size_)) return find_drawn_of_kept(row, all);
        const Found found = first_largest(logits_of(row) + all.begin, all.size, draws_[row].noise, first_token_ + all.begin, -INFINITY);
        return {found.value, all.begin + found.place};
    }

    Found find_drawn_of_kept(int64_t row, const Span& all) const {
        alignas(64) float noise[CHUNK] = {}, scores[CHUNK], distances[CHUNK];
        const float most = largest_of(row), limit = limits_[size_t(row)];
        Found found{-INFINITY, all.begin};
        if (!std::isfinite(most)) return found;  // a row that has no token
        for (int64_t begin = all.begin; begin < all.begin + all.size; begin += CHUNK) {
            const int64_t count = find_distances_of(distances, row, most, begin);
            if (!find_noise_of_kept(noise, draws_[row].noise, first_token_ + begin, distances, count, limit)) continue;
            find_scores(scores, logits_of(row) + begin, noise, distances, count, limit);
            const float of_chunk = largest(scores, count);
            if (of_chunk != of_chunk) return {of_chunk, begin};
            if (of_chunk > found.value) found = {of_chunk, begin + first_of(scores, of_chunk)};
        }
        return found;
    }

    void tally(int64_t row, int64_t part) {
        if (!is_ranked(row)) return;
        Tally& tally = tallies_[place(row, part)];
        tally.assign(NUM_BUCKETS, 0);
        const bool is_number = draws_[row].limits_number(size_);
        alignas(64) float weights[CHUNK];
        for_each_chunk(row, part, [&](const float* distances, int64_t count, int64_t) {
            if (!is_number) weigh(weights, distances, count, INFINITY);
            for (int64_t i = 0; i < count; i++) tally[size_t(bucket_of(distances[i]))] += is_number ? 1 : int64_t(weights[i]);
        });
    }

    Border find_border(int64_t row) const {
        Tally total(NUM_BUCKETS, 0);
        int64_t all = 0;
        for (int64_t part = 0; part < num_parts_; part++)
            for (int bucket = 0; bucket < NUM_BUCKETS; bucket++) {
                const int64_t of_part = tallies_[place(row, part)][size_t(bucket)];
                total[size_t(bucket)] += of_part, all += of_part;
            }
        const bool is_number = draws_[row].limits_number(size_);
        Border border{0, 0, is_number ? draws_[row].top_k : least_weight(row, all)};
        while (border.bucket < NUM_BUCKETS - 1 && double(border.before + total[size_t(border.bucket)]) < border.target)
            border.before += total[size_t(border.bucket++)];
        return border;
    }

    double least_weight(int64_t row, int64_t total) const { return std::max(draws_[row].top_p * double(total), 1.0); }

    // The distances of the border's bucket; by number, which top-p comes after, also of those before it.
    void keep(int64_t row, int64_t part) {
        if (!is_ranked(row)) return;
        std::vector<float>& kept = kept_[place(row, part)];
        kept.clear();
        const int border = find_border(row).bucket;
        const float least = draws_[row].limits_number(size_) ? 0 : begin_of(border), end = begin_of(border + 1);
        const bool is_last = border == NUM_BUCKETS - 1;
        for_each_chunk(row, part, [&](const float* distances, int64_t count, int64_t) {
            for (int64_t begin = 0; begin < count; begin += LANES) {
                const Floats some = load(distances + begin);
                if (!is_last && !has_any((some < end) & ~(some < least))) continue;
                for (int64_t i = begin; i < std::min(begin + LANES, count); i++)
                    if (distances[i] >= least && (is_last || distances[i] < end)) kept.push_back(distances[i]);
            }
        });
    }

    // The largest distance that a row keeps.
    float find_limit(int64_t row) const {
        const float by_min_p = draws_[row].limit;
        if (!is_ranked(row)) return by_min_p;
        std::vector<float> distances;
        for (int64_t part = 0; part < num_parts_; part++) {
            const std::vector<float>& kept = kept_[place(row, part)];
            distances.insert(distances.end(), kept.begin(), kept.end());
        }
        if (!draws_[row].limits_number(size_)) {
            const Border border = find_border(row);
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
            weigh(weights, distances, count, INFINITY);
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
    const int64_t num_parts_, part_size_;
    bool is_limited_ = false, is_ranked_ = false;
    std::vector<Found> found_, largest_;  // [rows][parts], of scores and of logits, as are the next
    std::vector<Tally> tallies_;
    std::vector<std::vector<float>> kept_;
    std::vector<float> limits_;  // [rows]
};

}  // namespace weft
