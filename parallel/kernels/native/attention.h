// Paged attention (arXiv:2309.06180) over the cache as it lies: no gather, each key and value read once per tile of rows.
//
// Row: one query head of one token. A tile of rows shares a sequence and a key-value head, and goes through the context in
// partitions of fixed length and place, each with a softmax of its own that is merged into the rows' running one
// (arXiv:2112.05682). A long context's partitions may be computed by several threads: they are merged in the same order, so
// a sequence's result never depends on what else is in the step or on the number of threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "threads.h"
#include "vector.h"

namespace weft {

// Constant for a layer; mirrored by ctypes in library.py.
struct LayerParams {
    float scale;
    float soft_cap;          // 0: none
    int32_t window;          // a token sees itself and window - 1 before it; 0: all before it
    const float* key_bias;   // [heads, positions]; null: none
    int64_t key_bias_stride;
    const float* sinks;      // [heads]; null: none
};

// Constant for a step; mirrored by ctypes in library.py.
struct StepLayout {
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* context_lens;  // [sequences]
    const int32_t* block_tables;  // [sequences, table_stride]
    int64_t table_stride;
    int32_t num_sequences;
    int32_t block_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;  // a multiple of LANES
    int32_t num_threads;
};

constexpr int PARTITION = 256;     // tokens
constexpr int TILE_QUERIES = 8;    // tokens of a chunk whose rows share what is read

template <class T>
struct Tensors {
    T* out;  // [T, heads, head_dim], dense
    const T* q;
    int64_t q_token_stride;  // elements; heads are dense
    const T* keys;           // [blocks, block_size, kv heads, head_dim], dense
    const T* values;
};

inline Floats soft_capped(Floats x, float cap) {
    return cap - (2.0f * cap) / (exponential(x * (2.0f / cap)) + 1.0f);  // cap * tanh(x / cap)
}

// Lane i of the result is the sum of rows[i]; rows are overwritten.
inline Floats sum_each(Floats* rows) {
    for (int width = LANES / 2; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) {
            const Floats a = rows[2 * i], b = rows[2 * i + 1];
            rows[i] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                      __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        }
    return rows[0];
}

// The product of one row of q with one key, before its lanes are summed.
template <int HEAD_DIM>
inline Floats multiply(const float* q, const float* key, int runtime_head_dim) {
    const int head_dim = HEAD_DIM ? HEAD_DIM : runtime_head_dim;
    Floats total = load(key) * load(q);
    for (int dim = LANES; dim < head_dim; dim += LANES) total += load(key + dim) * load(q + dim);
    return total;
}

template <int HEAD_DIM>
inline Floats multiply(const BFloat16* q, const BFloat16* key, int runtime_head_dim) {
    const int head_dim = HEAD_DIM ? HEAD_DIM : runtime_head_dim;
#ifdef __AVX512BF16__  // two products a lane, exact, summed in float32
    if (head_dim % (2 * LANES) == 0) {
        Floats total{};
        for (int dim = 0; dim < head_dim; dim += 2 * LANES)
            total = (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_loadu_si512(key + dim),
                                             (__m512bh)_mm512_loadu_si512(q + dim));
        return total;
    }
#endif
    Floats total = load(key) * load(q);
    for (int dim = LANES; dim < head_dim; dim += LANES) total += load(key + dim) * load(q + dim);
    return total;
}

// Scores of num_rows rows of q with the keys of num_tokens <= LANES tokens. Writes LANES scores a row; only the first
// num_tokens mean something. HEAD_DIM 0: not known when compiled.
template <int HEAD_DIM, class T>
void score_keys(const T* keys, int64_t token_stride, int num_tokens, const T* next_keys, const T* q, int num_rows,
                int head_dim, float scale, float* scores, int64_t scores_stride) {
    for (int row = 0; row < num_rows; row++) {
        Floats products[LANES];
        for (int token = 0; token < LANES; token++)
            products[token] =
                multiply<HEAD_DIM>(q + row * head_dim, keys + std::min(token, num_tokens - 1) * token_stride, head_dim);
        store(scores + row * scores_stride, sum_each(products) * scale);
    }
    // the hardware does not foresee where the next block lies
    for (int token = 0; next_keys && token < LANES; token++)
        for (int dim = 0; dim < head_dim; dim += int(64 / sizeof(T)))
            __builtin_prefetch(next_keys + token * token_stride + dim);
}

// Adds weight * value of each token to ROWS rows, WIDTH vectors of the head at a time.
template <int ROWS, int WIDTH, class T>
void add_values(const T* values, int64_t token_stride, int num_tokens, const float* weights, int64_t weights_stride,
                float* totals, int head_dim) {
    for (int dim = 0; dim < head_dim; dim += WIDTH * LANES) {
        Floats sums[ROWS][WIDTH];
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < WIDTH; i++) sums[row][i] = load(totals + row * head_dim + dim + i * LANES);
        for (int token = 0; token < num_tokens; token++) {
            const T* value = values + token * token_stride + dim;
            Floats part[WIDTH];
            for (int i = 0; i < WIDTH; i++) part[i] = load(value + i * LANES);
            for (int row = 0; row < ROWS; row++) {
                const Floats weight = broadcast(weights[row * weights_stride + token]);
                for (int i = 0; i < WIDTH; i++) sums[row][i] += weight * part[i];
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < WIDTH; i++) store(totals + row * head_dim + dim + i * LANES, sums[row][i]);
    }
}

template <int WIDTH, class T>
void add_values_to_rows(const T* values, int64_t token_stride, int num_tokens, const float* weights,
                        int64_t weights_stride, float* totals, int num_rows, int head_dim) {
    int row = 0;
    for (; row + 4 <= num_rows; row += 4)
        add_values<4, WIDTH>(values, token_stride, num_tokens, weights + row * weights_stride, weights_stride,
                             totals + row * head_dim, head_dim);
    for (; row < num_rows; row++)
        add_values<1, WIDTH>(values, token_stride, num_tokens, weights + row * weights_stride, weights_stride,
                             totals + row * head_dim, head_dim);
}

// The running softmax of one row: the largest score, and the sum of e^(score - largest).
struct Running {
    float most = -INFINITY;
    float sum = 0;
};

// Adds a partition's softmax (its sums in `part_totals`) to the running one.
inline void merge(Running& running, float* totals, const Running& part, const float* part_totals, int head_dim) {
    if (part.sum == 0) return;
    const float most = std::max(running.most, part.most);
    const float old = running.sum == 0 ? 0 : exponential(running.most - most);
    const float fresh = exponential(part.most - most);
    running = {most, running.sum * old + part.sum * fresh};
    for (int dim = 0; dim < head_dim; dim += LANES)
        store(totals + dim, load(totals + dim) * old + load(part_totals + dim) * fresh);
}

// Turns scores[0, count) into weights; those outside [begin, end) become 0. count is rounded up to LANES.
inline Running soften(float* scores, int count, int begin, int end, float soft_cap, const float* bias) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats most = broadcast(-INFINITY);
    for (int i = 0; i < count; i += LANES) {
        Floats x = load(scores + i);
        if (soft_cap != 0) x = soft_capped(x, soft_cap);
        if (bias) {
            Floats added{};
            std::memcpy(&added, bias + i, sizeof(float) * std::min(LANES, count - i));
            x += added;
        }
        const Ints index = lanes + i;
        x = choose((index >= begin) & (index < end), x, broadcast(-INFINITY));
        most = larger(x, most);
        store(scores + i, x);
    }
    Running result{largest(most), 0};
    if (result.most == -INFINITY) result.most = 0;  // nothing is seen: all weights become 0
    Floats total{};
    for (int i = 0; i < count; i += LANES) {
        const Floats x = exponential(load(scores + i) - result.most);
        total += x;
        store(scores + i, x);
    }
    result.sum = sum(total);
    return result;
}

// Buffers of one thread; they only grow.
class Scratch {
  public:
    float* scores(size_t size) { return grown(scores_, size); }
    float* part(size_t size) { return grown(part_, size); }
    float* totals(size_t size) { return grown(totals_, size); }
    std::vector<Running> running;

    static Scratch& of_this_thread() {
        static thread_local Scratch scratch;
        return scratch;
    }

  private:
    static float* grown(std::vector<float>& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
        return buffer.data();
    }
    std::vector<float> scores_, part_, totals_;
};

// Rows of one sequence that go through its context together.
struct Tile {
    int32_t sequence;
    int32_t first_query, num_queries;      // packed tokens
    int32_t first_kv_head, num_kv_heads;
    int32_t first_partition, num_partitions;
    int32_t split;                         // index into Splits::open; -1: the tile sees the whole context
};

// A tile's partitions computed apart: their results lie side by side until the last one is there.
struct Splits {
    struct Open {
        std::atomic<int> missing;
        size_t place;  // in running, and times head_dim in totals
        Open(int missing, size_t place) : missing(missing), place(place) {}
        Open(const Open& other) : missing(other.missing.load()), place(other.place) {}
    };
    std::vector<Open> open;
    std::vector<Running> running;  // [tile][partition][row]
    std::vector<float> totals;
};

template <class T>
class PagedAttention {
  public:
    PagedAttention(const Tensors<T>& tensors, const StepLayout& layout, const LayerParams& params)
        : tensors_(tensors), layout_(layout), params_(params), group_(layout.num_heads / layout.num_kv_heads),
          token_stride_(int64_t(layout.num_kv_heads) * layout.head_dim) {}

    void run() {
        plan();
        for_each_item(int64_t(tiles_.size()), layout_.num_threads, [this](int64_t item) { compute(tiles_[item]); });
    }

  private:
    // ------------------------------------------------------------------ what is computed together

    void plan() {
        int64_t num_decodes = 0, decode_tokens = 0;
        for (int s = 0; s < layout_.num_sequences; s++)
            if (num_queries(s) == 1) num_decodes++, decode_tokens += layout_.context_lens[s] - first_seen(s, queries_begin(s));
        for (int s = 0; s < layout_.num_sequences; s++)
            if (num_queries(s) > 1) plan_chunk(s);
        for (int s = 0; s < layout_.num_sequences; s++)
            if (num_queries(s) == 1) plan_decode(s, num_decodes, decode_tokens);
    }

    void plan_chunk(int s) {
        const int step = std::max(1, std::min(TILE_QUERIES, 64 / group_));
        for (int head = 0; head < layout_.num_kv_heads; head++)
            for (int query = queries_begin(s); query < queries_end(s); query += step)
                add_tile(s, query, std::min(step, queries_end(s) - query), head, 1);
    }

    // All heads of a token lie side by side, so a tile of all of them reads memory in order; where there are too few
    // tiles for the threads, or one is much longer than the rest, it is split.
    void plan_decode(int s, int64_t num_decodes, int64_t decode_tokens) {
        const int query = queries_begin(s), threads = layout_.num_threads;
        const int64_t tokens = layout_.context_lens[s] - first_seen(s, query);
        if (threads == 1 || (num_decodes >= 4 * threads && tokens * 2 * threads <= decode_tokens)) {
            add_tile(s, query, 1, 0, layout_.num_kv_heads);
            return;
        }
        const int first = first_seen(s, query) / PARTITION, last = (layout_.context_lens[s] - 1) / PARTITION;
        const int num_partitions = last - first + 1;
        const int wanted = int((4 * threads + num_decodes * num_partitions - 1) / (num_decodes * num_partitions));
        const int heads = std::max(1, layout_.num_kv_heads / wanted);
        for (int head = 0; head < layout_.num_kv_heads; head += heads) {
            const int num_heads = std::min(heads, layout_.num_kv_heads - head);
            if (num_partitions == 1) {
                add_tile(s, query, 1, head, num_heads);
                continue;
            }
            const int split = int(splits_.open.size());
            splits_.open.emplace_back(num_partitions, splits_.running.size());
            splits_.running.resize(splits_.running.size() + size_t(num_partitions) * num_heads * group_);
            for (int partition = first; partition <= last; partition++)
                tiles_.push_back({s, query, 1, head, num_heads, partition, 1, split});
        }
        splits_.totals.resize(splits_.running.size() * layout_.head_dim);
    }

    void add_tile(int s, int query, int num_queries, int kv_head, int num_kv_heads) {
        const int first = first_seen(s, query) / PARTITION;
        const int last = position(s, query + num_queries - 1) / PARTITION;
        tiles_.push_back({s, query, num_queries, kv_head, num_kv_heads, first, last - first + 1, -1});
    }

    int queries_begin(int s) const { return layout_.query_starts[s]; }
    int queries_end(int s) const { return layout_.query_starts[s + 1]; }
    int num_queries(int s) const { return queries_end(s) - queries_begin(s); }
    int position(int s, int query) const { return layout_.context_lens[s] - (queries_end(s) - query); }
    int first_seen(int s, int query) const {
        return params_.window ? std::max(0, position(s, query) - params_.window + 1) : 0;
    }

    // ------------------------------------------------------------------ one tile

    // Rows of a tile are ordered by key-value head, then query, then query head of the group.
    void compute(const Tile& tile) {
        Scratch& scratch = Scratch::of_this_thread();
        const int num_rows = tile.num_kv_heads * tile.num_queries * group_;
        const size_t totals_size = size_t(num_rows) * layout_.head_dim;
        static thread_local std::vector<T> buffer;
        const T* q = queries(tile, buffer);
        if (tile.split >= 0) {
            Splits::Open& open = splits_.open[tile.split];
            const int first = first_seen(tile.sequence, tile.first_query) / PARTITION;
            const size_t place = open.place + size_t(tile.first_partition - first) * num_rows;
            attend_partition(tile, tile.first_partition, q, scratch, &splits_.running[place],
                             &splits_.totals[place * layout_.head_dim]);
            if (open.missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_split(tile, open.place);
            return;
        }
        std::vector<Running>& running = scratch.running;
        running.assign(2 * num_rows, Running{});
        float* totals = scratch.totals(totals_size);
        attend_partition(tile, tile.first_partition, q, scratch, running.data(), totals);
        for (int partition = tile.first_partition + 1; partition < tile.first_partition + tile.num_partitions; partition++) {
            float* part = scratch.part(totals_size);
            attend_partition(tile, partition, q, scratch, &running[num_rows], part);
            for (int row = 0; row < num_rows; row++)
                merge(running[row], totals + size_t(row) * layout_.head_dim, running[num_rows + row],
                      part + size_t(row) * layout_.head_dim, layout_.head_dim);
        }
        write(tile, running.data(), totals);
    }

    void finish_split(const Tile& tile, size_t place) {
        const int num_rows = tile.num_kv_heads * group_, head_dim = layout_.head_dim;
        const int first = first_seen(tile.sequence, tile.first_query) / PARTITION;
        const int num_partitions = (layout_.context_lens[tile.sequence] - 1) / PARTITION - first + 1;
        Running* running = &splits_.running[place];
        float* totals = &splits_.totals[place * head_dim];
        for (int partition = 1; partition < num_partitions; partition++)
            for (int row = 0; row < num_rows; row++) {
                const size_t other = size_t(partition) * num_rows + row;
                merge(running[row], totals + size_t(row) * head_dim, running[other], totals + other * head_dim, head_dim);
            }
        write(tile, running, totals);
    }

    // The queries of a tile side by side; those of a single token already lie so.
    const T* queries(const Tile& tile, std::vector<T>& buffer) const {
        const int heads = tile.num_kv_heads * group_, head_dim = layout_.head_dim;
        const T* first = tensors_.q + tile.first_query * tensors_.q_token_stride + int64_t(tile.first_kv_head) * group_ * head_dim;
        if (tile.num_queries == 1) return first;
        const size_t size = size_t(heads) * tile.num_queries * head_dim;
        if (buffer.size() < size) buffer.resize(size);
        T* to = buffer.data();
        const size_t group_size = size_t(group_) * head_dim;
        for (int head = 0; head < heads; head += group_)
            for (int query = 0; query < tile.num_queries; query++, to += group_size)
                std::memcpy(to, first + query * tensors_.q_token_stride + head * head_dim, group_size * sizeof(T));
        return buffer.data();
    }

    void attend_partition(const Tile& tile, int partition, const T* q, Scratch& scratch, Running* running, float* totals) {
        switch (layout_.head_dim) {
            case 64: return attend_partition<64>(tile, partition, q, scratch, running, totals);
            case 128: return attend_partition<128>(tile, partition, q, scratch, running, totals);
            default: return attend_partition<0>(tile, partition, q, scratch, running, totals);
        }
    }

    template <int HEAD_DIM>
    void attend_partition(const Tile& tile, int partition, const T* q, Scratch& scratch, Running* running, float* totals) {
        const int head_dim = HEAD_DIM ? HEAD_DIM : layout_.head_dim;
        const int rows_a_head = tile.num_queries * group_, num_rows = tile.num_kv_heads * rows_a_head;
        const int begin = std::max(partition * PARTITION, first_seen(tile.sequence, tile.first_query));
        const int last_query = tile.first_query + tile.num_queries - 1;
        const int end = std::min((partition + 1) * PARTITION, position(tile.sequence, last_query) + 1);
        const int64_t scores_stride = PARTITION + LANES;
        float* scores = scratch.scores(size_t(num_rows) * scores_stride);

        for_each_run(tile, begin, end, [&](int64_t offset, int64_t next, int token, int num_tokens) {
            for (int head = 0; head < tile.num_kv_heads; head++, offset += head_dim)
                score_keys<HEAD_DIM>(tensors_.keys + offset, token_stride_, num_tokens,
                                     next < 0 ? nullptr : tensors_.keys + next + head * head_dim,
                                     q + size_t(head) * rows_a_head * head_dim, rows_a_head, head_dim, params_.scale,
                                     scores + head * rows_a_head * scores_stride + token, scores_stride);
        });
        for (int row = 0; row < num_rows; row++) running[row] = soften_row(tile, row, begin, end, scores + row * scores_stride);
        std::fill(totals, totals + size_t(num_rows) * head_dim, 0.0f);
        for_each_run(tile, begin, end, [&](int64_t offset, int64_t, int token, int num_tokens) {
            for (int head = 0; head < tile.num_kv_heads; head++, offset += head_dim) {
                const float* weights = scores + head * rows_a_head * scores_stride + token;
                float* to = totals + size_t(head) * rows_a_head * head_dim;
                const T* values = tensors_.values + offset;
                if (head_dim % (4 * LANES) == 0)
                    add_values_to_rows<4>(values, token_stride_, num_tokens, weights, scores_stride, to, rows_a_head, head_dim);
                else
                    add_values_to_rows<1>(values, token_stride_, num_tokens, weights, scores_stride, to, rows_a_head, head_dim);
            }
        });
    }

    Running soften_row(const Tile& tile, int row, int begin, int end, float* scores) const {
        const int query = tile.first_query + row / group_ % tile.num_queries;
        const int head = (tile.first_kv_head + row / (group_ * tile.num_queries)) * group_ + row % group_;
        const int seen_begin = std::max(begin, first_seen(tile.sequence, query));
        const int seen_end = std::min(end, position(tile.sequence, query) + 1);
        const float* bias = params_.key_bias ? params_.key_bias + head * params_.key_bias_stride + begin : nullptr;
        return soften(scores, end - begin, seen_begin - begin, seen_end - begin, params_.soft_cap, bias);
    }

    // Calls visit(offset of the first token's first head, the same of the next run or -1, token - begin, tokens) for runs
    // of at most LANES tokens that lie in one block.
    template <class Visit>
    void for_each_run(const Tile& tile, int begin, int end, Visit visit) const {
        const int32_t* table = layout_.block_tables + tile.sequence * layout_.table_stride;
        const auto offset = [&](int token) {
            const int64_t slot = int64_t(table[token / layout_.block_size]) * layout_.block_size + token % layout_.block_size;
            return slot * token_stride_ + int64_t(tile.first_kv_head) * layout_.head_dim;
        };
        for (int token = begin; token < end;) {
            const int room = layout_.block_size - token % layout_.block_size;
            const int num_tokens = std::min({LANES, room, end - token});
            const int next = token + num_tokens;
            visit(offset(token), next < end ? offset(next) : -1, token - begin, num_tokens);
            token = next;
        }
    }

    void write(const Tile& tile, const Running* running, const float* totals) const {
        const int head_dim = layout_.head_dim;
        int row = 0;
        for (int head = tile.first_kv_head * group_; head < (tile.first_kv_head + tile.num_kv_heads) * group_; head += group_)
            for (int query = 0; query < tile.num_queries; query++)
                for (int member = 0; member < group_; member++, row++) {
                    const float factor = final_factor(running[row], head + member);
                    const int64_t token = tile.first_query + query;
                    T* to = tensors_.out + (token * layout_.num_heads + head + member) * head_dim;
                    for (int dim = 0; dim < head_dim; dim += LANES) store(to + dim, load(totals + dim) * factor);
                    totals += head_dim;
                }
    }

    // One over the sum of all weights, a sink's among them: it takes its share and adds no value.
    float final_factor(const Running& running, int head) const {
        if (!params_.sinks) return 1.0f / running.sum;
        const float most = std::max(running.most, params_.sinks[head]);
        const float scale = exponential(running.most - most);
        return scale / (running.sum * scale + exponential(params_.sinks[head] - most));
    }

    const Tensors<T> tensors_;
    const StepLayout& layout_;
    const LayerParams& params_;
    const int group_;
    const int64_t token_stride_;
    std::vector<Tile> tiles_;
    Splits splits_;
};

}  // namespace weft
