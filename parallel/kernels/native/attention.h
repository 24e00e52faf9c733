// Paged attention (arXiv:2309.06180) over the cache as it lies: no gather, each key and value read once per tile of rows.
//
// Row: one query head of one token. A tile of rows shares a sequence and a key-value head, and goes through the context in
// partitions of fixed length and place, each with a softmax of its own that is merged into the rows' running one
// (arXiv:2112.05682). A long context's partitions may be computed by several threads: they are merged in the same order, so
// a sequence's result never depends on what else is in the step or on the number of threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "attention_products_int8.h"
#include "attention_tiles.h"
#include "cache_int8.h"
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
    int32_t is_int8;  // keys and values are as cache_int8.h says, else of the type of queries
};

constexpr int PARTITION = 256;     // tokens
constexpr int TILE_QUERIES = 8;    // tokens of a chunk whose rows share what is read
constexpr int SHARED_QUERIES = 32; // sequences that share what is read
constexpr int MATRIX_ROWS = 128;   // rows of a chunk that share what is packed for matrix tiles

constexpr int LEAST_TILE_ROWS = 6; // from which on a cache in 8 bits is packed for matrix tiles; up to 4 vectors are faster

// Whether the CPU multiplies these by matrix tiles; C: what the cache holds.
template <class T, class C = T>
bool has_matrix_tiles(int head_dim) {
#ifdef WEFT_HAS_INT8_TILES
    if (sizeof(C) == 1) return head_dim % int8::STEP == 0 && may_use_tiles();
#endif
    if (sizeof(C) == 1) return false;
#ifdef WEFT_HAS_AMX
    return sizeof(T) == 2 && head_dim % PANEL == 0 && may_use_tiles();
#else
    return false;
#endif
}

template <class T, class C = T>
struct Tensors {
    T* out;  // [T, heads, head_dim], dense
    const T* q;
    int64_t q_token_stride;  // elements; heads are dense
    const C* keys;           // [blocks, block_size, kv heads, head_dim], dense; int8_t: as cache_int8.h says
    const C* values;
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

template <int HEAD_DIM, class T>
inline Floats multiply(const T* q, const int8_t* key, int runtime_head_dim) {
    const int head_dim = HEAD_DIM ? HEAD_DIM : runtime_head_dim;
    Floats total = load(key) * load(q);
    for (int dim = LANES; dim < head_dim; dim += LANES) total += load(key + dim) * load(q + dim);
    return total;
}

// Multiplies what each row has of some tokens by a number of each token.
inline void scale_tokens(float* rows, int64_t stride, int num_rows, const float* scales, int num_tokens) {
    for (int row = 0; row < num_rows; row++)
        for (int token = 0; token < num_tokens; token++) rows[row * stride + token] *= scales[token];
}

// The hardware does not foresee where the next tokens of a head lie.
template <class T>
void prefetch(const T* heads, int64_t token_stride, int head_dim) {
    for (int token = 0; token < LANES; token++)
        for (int dim = 0; dim < head_dim; dim += int(64 / sizeof(T))) __builtin_prefetch(heads + token * token_stride + dim);
}

// Scores of num_rows rows of q with the keys of num_tokens <= LANES tokens. Writes LANES scores a row; only the first
// num_tokens mean something. HEAD_DIM 0: not known when compiled.
template <int HEAD_DIM, class T, class C>
void score_keys(const C* keys, int64_t token_stride, int num_tokens, const C* next_keys, const T* q, int num_rows,
                int head_dim, float scale, float* scores, int64_t scores_stride) {
    for (int row = 0; row < num_rows; row++) {
        Floats products[LANES];
        for (int token = 0; token < LANES; token++)
            products[token] =
                multiply<HEAD_DIM>(q + row * head_dim, keys + std::min(token, num_tokens - 1) * token_stride, head_dim);
        store(scores + row * scores_stride, sum_each(products) * scale);
    }
    if (next_keys) prefetch(next_keys, token_stride, head_dim);
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

// Turns scores[0, count), times `scale`, into weights as finely as T asks for; those outside [begin, end) become 0. count is
// rounded up to LANES.
template <class T>
Running soften(float* scores, int count, int begin, int end, float scale, float soft_cap, const float* bias) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats most = broadcast(-INFINITY);
    for (int i = 0; i < count; i += LANES) {
        Floats x = load(scores + i) * scale;
        if (soft_cap != 0) x = soft_capped(x, soft_cap);
        if (bias) {
            Floats added{};
            std::memcpy(&added, bias + i, sizeof(float) * std::min(LANES, count - i));
            x += added;
        }
        if (i < begin || i + LANES > end) {
            const Ints index = lanes + i;
            x = choose((index >= begin) & (index < end), x, broadcast(-INFINITY));
        }
        most = larger(x, most);
        store(scores + i, x);
    }
    Running result{largest(most), 0};
    if (result.most == -INFINITY) result.most = 0;  // nothing is seen: all weights become 0
    Floats total{};
    for (int i = 0; i < count; i += LANES) {
        const Floats x = exponential_below_zero<T>(load(scores + i) - result.most);
        total += x;
        store(scores + i, x);
    }
    result.sum = sum(total);
    return result;
}

// Buffers of one thread; they only grow.
class Scratch {
  public:
    Buffer<float> scores, part, totals, products;
    Buffer<BFloat16> packed, weights;
    std::vector<Running> running;

    static Scratch& of_this_thread() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

// Rows of one sequence that go through its context together.
struct Tile {
    int32_t sequence;
    int32_t first_query, num_queries;      // packed tokens
    int32_t first_kv_head, num_kv_heads;
    int32_t first_partition, num_partitions;
    int32_t split;                         // index into Splits::open; -1: the tile sees the whole context
    // The queries are single tokens of sequences that follow each other, `sequence` the first of them: their tables have
    // this partition in common. Each has its own split, in the same order.
    bool is_shared = false;
};

// A tile's partitions computed apart: their results lie side by side until the last one is there.
struct Splits {
    struct Open {
        std::atomic<int> missing;
        int num_partitions, num_tiles;
        size_t place;  // in running, and times head_dim in totals
        Open(int num_partitions, int num_tiles, size_t place)
            : missing(num_tiles), num_partitions(num_partitions), num_tiles(num_tiles), place(place) {}
        Open(const Open& other) : Open(other.num_partitions, other.num_tiles, other.place) {}
    };
    std::vector<Open> open;
    std::vector<Running> running;  // [tile][partition][row]
    std::vector<float> totals;
};

// Where the queries of a step are.
struct Queries {
    const StepLayout& layout;
    int window;

    int begin(int s) const { return layout.query_starts[s]; }
    int end(int s) const { return layout.query_starts[s + 1]; }
    int count(int s) const { return end(s) - begin(s); }
    int position(int s, int query) const { return layout.context_lens[s] - (end(s) - query); }
    int first_seen(int s, int query) const { return window ? std::max(0, position(s, query) - window + 1) : 0; }
};

// What is computed together, and by how many; the same for all layers of a step that have the same window.
class AttentionPlan {
  public:
    // has_tiles: chunks are multiplied by matrix tiles.
    AttentionPlan(const StepLayout& layout, int window, bool has_tiles)
        : layout_(layout), queries_{layout, window}, group_(layout.num_heads / layout.num_kv_heads), has_tiles_(has_tiles) {
        plan();
    }
    AttentionPlan(const AttentionPlan&) = delete;

    std::vector<Tile> tiles;
    Splits splits;

  private:
    void plan() {
        int64_t num_decodes = 0, decode_tokens = 0;
        for (int s = 0; s < layout_.num_sequences; s++)
            if (queries_.count(s) == 1) num_decodes++, decode_tokens += layout_.context_lens[s] - queries_.first_seen(s, queries_.begin(s));
        for (int s = 0; s < layout_.num_sequences; s++)
            if (queries_.count(s) > 1) plan_chunk(s);
        for (int s = 0; s < layout_.num_sequences;) {
            const int end = queries_.count(s) == 1 ? end_of_shared(s) : s + 1;
            if (end - s > 1)
                plan_shared(s, end);
            else if (queries_.count(s) == 1)
                plan_decode(s, num_decodes, decode_tokens);
            s = end;
        }
        splits.totals.resize(splits.running.size() * layout_.head_dim);
    }

    // Sequences [s, end) begin with the same partition.
    int end_of_shared(int s) const {
        int end = s + 1;
        while (end < layout_.num_sequences && queries_.count(end) == 1 && shares(end, 0)) end++;
        return end;
    }

    // Whether a sequence has all tokens of a partition, and they lie where those of the one before it do.
    bool shares(int s, int partition) const {
        if (queries_.window || PARTITION % layout_.block_size) return false;
        const int blocks = PARTITION / layout_.block_size;
        const auto table = [&](int s) { return layout_.block_tables + s * layout_.table_stride + partition * blocks; };
        const bool is_whole = std::min(layout_.context_lens[s - 1], layout_.context_lens[s]) >= (partition + 1) * PARTITION;
        return is_whole && std::equal(table(s), table(s) + blocks, table(s - 1));
    }

    // What several sequences have in common is read once for all of them, a head at a time.
    void plan_shared(int first, int end) {
        std::vector<std::vector<Tile>> common(end - first);  // by the sequence they begin with
        std::vector<int> num_common(end - first);            // leading partitions of a sequence that are in such tiles
        bool has_more = true;
        for (int partition = 0; has_more; partition++) {
            has_more = false;
            for (int s = first, last; s < end; s = last) {
                const auto is_next = [&](int other) { return num_common[other - first] == partition; };
                last = s + 1;
                while (last < end && last - s < SHARED_QUERIES && is_next(last) && shares(last, partition)) last++;
                if (last - s == 1 || !is_next(s)) continue;
                has_more = true;
                for (int head = 0; head < layout_.num_kv_heads; head++)
                    common[s - first].push_back({s, queries_.begin(s), last - s, head, 1, partition, 1, -1, true});
                for (int other = s; other < last; other++) num_common[other - first]++;
            }
        }
        const int split = int(splits.open.size());
        for (int s = first; s < end; s++) {
            const int num_partitions = (layout_.context_lens[s] - 1) / PARTITION + 1, shared = num_common[s - first];
            splits.open.emplace_back(num_partitions, shared * layout_.num_kv_heads + num_partitions - shared, splits.running.size());
            splits.running.resize(splits.running.size() + size_t(num_partitions) * layout_.num_heads);
            for (Tile& tile : common[s - first]) {
                tile.split = split + s - first;
                tiles.push_back(tile);
            }
            for (int partition = shared; partition < num_partitions; partition++)
                tiles.push_back({s, queries_.begin(s), 1, 0, layout_.num_kv_heads, partition, 1, split + s - first});
        }
    }

    void plan_chunk(int s) {
        const int step = std::max(1, has_tiles_ ? MATRIX_ROWS / group_ : std::min(TILE_QUERIES, 64 / group_));
        for (int head = 0; head < layout_.num_kv_heads; head++)
            for (int query = queries_.begin(s); query < queries_.end(s); query += step)
                add_tile(s, query, std::min(step, queries_.end(s) - query), head, 1);
    }

    // All heads of a token lie side by side, so a tile of all of them reads memory in order; where there are too few
    // tiles for the threads, or one is much longer than the rest, it is split.
    void plan_decode(int s, int64_t num_decodes, int64_t decode_tokens) {
        const int query = queries_.begin(s), threads = layout_.num_threads;
        const int64_t tokens = layout_.context_lens[s] - queries_.first_seen(s, query);
        if (threads == 1 || (num_decodes >= 4 * threads && tokens * 2 * threads <= decode_tokens)) {
            add_tile(s, query, 1, 0, layout_.num_kv_heads);
            return;
        }
        const int first = queries_.first_seen(s, query) / PARTITION, last = (layout_.context_lens[s] - 1) / PARTITION;
        const int num_partitions = last - first + 1;
        const int wanted = int((4 * threads + num_decodes * num_partitions - 1) / (num_decodes * num_partitions));
        const int heads = std::max(1, layout_.num_kv_heads / wanted);
        for (int head = 0; head < layout_.num_kv_heads; head += heads) {
            const int num_heads = std::min(heads, layout_.num_kv_heads - head);
            if (num_partitions == 1) {
                add_tile(s, query, 1, head, num_heads);
                continue;
            }
            const int split = int(splits.open.size());
            splits.open.emplace_back(num_partitions, num_partitions, splits.running.size());
            splits.running.resize(splits.running.size() + size_t(num_partitions) * num_heads * group_);
            for (int partition = first; partition <= last; partition++)
                tiles.push_back({s, query, 1, head, num_heads, partition, 1, split});
        }
    }

    void add_tile(int s, int query, int num_queries, int kv_head, int num_kv_heads) {
        const int first = queries_.first_seen(s, query) / PARTITION;
        const int last = queries_.position(s, query + num_queries - 1) / PARTITION;
        tiles.push_back({s, query, num_queries, kv_head, num_kv_heads, first, last - first + 1, -1});
    }

    const StepLayout& layout_;
    const Queries queries_;
    const int group_;
    const bool has_tiles_;
};

template <class T, class C = T>
class PagedAttention {
  public:
    PagedAttention(const Tensors<T, C>& tensors, const StepLayout& layout, const LayerParams& params, AttentionPlan& plan)
        : tensors_(tensors), layout_(layout), params_(params), plan_(plan), queries_{layout, params.window},
          group_(layout.num_heads / layout.num_kv_heads), token_stride_(int64_t(layout.num_kv_heads) * layout.head_dim),
          blocks_{layout.block_size, layout.num_kv_heads, layout.head_dim},
          block_stride_(IS_INT8 ? blocks_.stride() : blocks_.num_integers()) {}

    void run(Team& team) {
        team.for_each(int64_t(plan_.tiles.size()), [this](int64_t item) { compute(plan_.tiles[item]); });
    }

  private:
    static constexpr bool IS_INT8 = sizeof(C) == 1;

    // Rows of a tile are ordered by key-value head, then query, then query head of the group.
    void compute(const Tile& tile) {
        Scratch& scratch = Scratch::of_this_thread();
        const int num_rows = tile.num_kv_heads * tile.num_queries * group_;
        const size_t totals_size = size_t(num_rows) * layout_.head_dim;
        static thread_local Buffer<T> buffer;
        const T* q = gather(tile, buffer);
        if (tile.is_shared) return compute_shared(tile, q, scratch);
        if (tile.split >= 0) {
            Splits::Open& open = plan_.splits.open[tile.split];
            const int first = queries_.first_seen(tile.sequence, tile.first_query) / PARTITION;
            const size_t place = open.place + size_t(tile.first_partition - first) * num_rows;
            attend_partition(tile, tile.first_partition, q, scratch, &plan_.splits.running[place],
                             &plan_.splits.totals[place * layout_.head_dim]);
            if (open.missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_split(tile, open);
            return;
        }
        std::vector<Running>& running = scratch.running;
        running.assign(2 * num_rows, Running{});
        float* totals = scratch.totals.room(totals_size);
        attend_partition(tile, tile.first_partition, q, scratch, running.data(), totals);
        for (int partition = tile.first_partition + 1; partition < tile.first_partition + tile.num_partitions; partition++) {
            float* part = scratch.part.room(totals_size);
            attend_partition(tile, partition, q, scratch, &running[num_rows], part);
            for (int row = 0; row < num_rows; row++)
                merge(running[row], totals + size_t(row) * layout_.head_dim, running[num_rows + row],
                      part + size_t(row) * layout_.head_dim, layout_.head_dim);
        }
        write(tile, running.data(), totals);
    }

    void compute_shared(const Tile& tile, const T* q, Scratch& scratch) {
        const int head_dim = layout_.head_dim, rows = tile.num_queries * group_;
        std::vector<Running>& running = scratch.running;
        running.resize(rows);
        float* totals = scratch.totals.room(size_t(rows) * head_dim);
        attend_partition(tile, tile.first_partition, q, scratch, running.data(), totals);
        for (int i = 0; i < tile.num_queries; i++) {
            Splits::Open& open = plan_.splits.open[tile.split + i];
            const size_t place = open.place + size_t(tile.first_partition) * layout_.num_heads + tile.first_kv_head * group_;
            std::copy_n(&running[i * group_], group_, &plan_.splits.running[place]);
            std::copy_n(totals + size_t(i) * group_ * head_dim, size_t(group_) * head_dim, &plan_.splits.totals[place * head_dim]);
            const Tile whole{tile.sequence + i, tile.first_query + i, 1, 0, layout_.num_kv_heads, 0, 1, tile.split + i};
            if (open.missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_split(whole, open);
        }
    }

    void finish_split(const Tile& tile, Splits::Open& open) {
        const int num_rows = tile.num_kv_heads * group_, head_dim = layout_.head_dim;
        open.missing.store(open.num_tiles, std::memory_order_relaxed);  // for the next layer
        Running* running = &plan_.splits.running[open.place];
        float* totals = &plan_.splits.totals[open.place * head_dim];
        for (int partition = 1; partition < open.num_partitions; partition++)
            for (int row = 0; row < num_rows; row++) {
                const size_t other = size_t(partition) * num_rows + row;
                merge(running[row], totals + size_t(row) * head_dim, running[other], totals + other * head_dim, head_dim);
            }
        write(tile, running, totals);
    }

    // The queries of a tile side by side; those of a single token lie so already.
    const T* gather(const Tile& tile, Buffer<T>& buffer) const {
        const int heads = tile.num_kv_heads * group_, head_dim = layout_.head_dim;
        const T* first = tensors_.q + tile.first_query * tensors_.q_token_stride + int64_t(tile.first_kv_head) * group_ * head_dim;
        if (tile.num_queries == 1 && group_ <= ROOM / 2) return first;  // more rows may be read than there are
        T* const gathered = buffer.room((size_t(heads) * tile.num_queries + ROOM) * head_dim);
        T* to = gathered;
        const size_t group_size = size_t(group_) * head_dim;
        for (int head = 0; head < heads; head += group_)
            for (int query = 0; query < tile.num_queries; query++, to += group_size)
                std::memcpy(to, first + query * tensors_.q_token_stride + head * head_dim, group_size * sizeof(T));
        return gathered;
    }

    void attend_partition(const Tile& tile, int partition, const T* q, Scratch& scratch, Running* running, float* totals) {
#ifdef WEFT_HAS_INT8
        if constexpr (IS_INT8)
            if (layout_.head_dim % int8::STEP == 0) {
                const int num_rows = tile.num_kv_heads * tile.num_queries * group_;
                float* scores = scratch.scores.room(size_t(num_rows) * (PARTITION + LANES));
                return attend_integers(tile, partition, q, scores, running, totals);
            }
#endif
#ifdef WEFT_HAS_AMX
        if constexpr (sizeof(T) == 2 && !IS_INT8)
            if (has_matrix_tiles<T>(layout_.head_dim))
                return attend_by_tiles(tile, partition, q, scratch, running, totals);
#endif
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
        const int begin = std::max(partition * PARTITION, queries_.first_seen(tile.sequence, tile.first_query));
        const int last_query = tile.first_query + tile.num_queries - 1;
        const int end = std::min((partition + 1) * PARTITION, queries_.position(tile.sequence, last_query) + 1);
        const int64_t scores_stride = PARTITION + LANES;
        float* scores = scratch.scores.room(size_t(num_rows) * scores_stride);

        for_each_run(tile, begin, end, [&](int64_t offset, int64_t next, int token, int num_tokens) {
            for (int head = 0; head < tile.num_kv_heads; head++, offset += head_dim) {
                float* const of_head = scores + head * rows_a_head * scores_stride + token;
                score_keys<HEAD_DIM>(tensors_.keys + offset, token_stride_, num_tokens,
                                     next < 0 ? nullptr : tensors_.keys + next + head * head_dim,
                                     q + size_t(head) * rows_a_head * head_dim, rows_a_head, head_dim, params_.scale,
                                     of_head, scores_stride);
                if constexpr (IS_INT8)
                    scale_tokens(of_head, scores_stride, rows_a_head, scales(tensors_.keys, tile, begin + token, head), num_tokens);
            }
        });
        for (int row = 0; row < num_rows; row++) running[row] = soften_row(tile, row, begin, end, scores + row * scores_stride);
        std::fill(totals, totals + size_t(num_rows) * head_dim, 0.0f);
        for_each_run(tile, begin, end, [&](int64_t offset, int64_t next, int token, int num_tokens) {
            for (int head = 0; head < tile.num_kv_heads; head++, offset += head_dim) {
                if (next >= 0) prefetch(tensors_.values + next + head * head_dim, token_stride_, head_dim);
                float* const weights = scores + head * rows_a_head * scores_stride + token;
                if constexpr (IS_INT8)
                    scale_tokens(weights, scores_stride, rows_a_head, scales(tensors_.values, tile, begin + token, head), num_tokens);
                float* to = totals + size_t(head) * rows_a_head * head_dim;
                const C* values = tensors_.values + offset;
                if (head_dim % (4 * LANES) == 0)
                    add_values_to_rows<4>(values, token_stride_, num_tokens, weights, scores_stride, to, rows_a_head, head_dim);
                else
                    add_values_to_rows<1>(values, token_stride_, num_tokens, weights, scores_stride, to, rows_a_head, head_dim);
            }
        });
    }

#ifdef WEFT_HAS_AMX
    // As attend_partition, by matrix tiles: weights are rounded to bf16 before they meet the values.
    void attend_by_tiles(const Tile& tile, int partition, const T* q, Scratch& scratch, Running* running, float* totals) {
        const int head_dim = layout_.head_dim, rows = tile.num_queries * group_;
        const int begin = std::max(partition * PARTITION, queries_.first_seen(tile.sequence, tile.first_query));
        const int last_query = tile.first_query + tile.num_queries - 1;
        const int end = std::min((partition + 1) * PARTITION, queries_.position(tile.sequence, last_query) + 1);
        if (rows == 1) return attend_single_rows(tile, begin, end, q, scratch, running, totals);
        const int num_tokens = (end - begin + PANEL - 1) / PANEL * PANEL;
        float* scores = scratch.scores.room(size_t(rows + ROOM) * PARTITION);
        BFloat16* weights = scratch.weights.room(size_t(rows + ROOM) * PARTITION);
        float* products = scratch.products.room(size_t(rows + ROOM) * head_dim);
        const size_t head_size = size_t(num_tokens) * head_dim;
        BFloat16* packed_keys = scratch.packed.room(2 * tile.num_kv_heads * head_size);
        BFloat16* packed_values = packed_keys + tile.num_kv_heads * head_size;
        int64_t offsets[PARTITION];
        find_tokens(tile, begin, end, num_tokens, offsets);
        pack_keys(packed_keys, tensors_.keys, tensors_.values, offsets, num_tokens, tile.num_kv_heads, head_dim);
        pack_values(packed_values, tensors_.values, offsets, num_tokens, tile.num_kv_heads, head_dim);
        const TileScope scope(std::min(rows, TILE), TILE);
        for (int head = 0; head < tile.num_kv_heads; head++) {
            const PackedMatrix keys{packed_keys + head * head_size, nullptr, num_tokens, head_dim};
            const PackedMatrix values{packed_values + head * head_size, nullptr, head_dim, num_tokens};
            const size_t first_row = size_t(head) * rows;
            multiply_dense(scores, PARTITION, q + first_row * head_dim, head_dim, rows, keys);
            for (int row = 0; row < rows; row++) {
                float* of_row = scores + size_t(row) * PARTITION;
                running[first_row + row] = soften_row(tile, int(first_row) + row, begin, end, of_row, params_.scale);
                std::fill(of_row + (end - begin + LANES - 1) / LANES * LANES, of_row + num_tokens, 0.0f);
                to_bfloat16(weights + size_t(row) * PARTITION, of_row, num_tokens);
            }
            multiply_dense(products, head_dim, weights, PARTITION, rows, values);
            std::copy_n(products, size_t(rows) * head_dim, totals + first_row * head_dim);
        }
    }

    // One row a head: neither keys nor values are packed.
    void attend_single_rows(const Tile& tile, int begin, int end, const T* q, Scratch& scratch, Running* running, float* totals) {
        const int head_dim = layout_.head_dim, heads = tile.num_kv_heads, count = end - begin;
        const int num_tokens = (count + TILE - 1) / TILE * TILE;
        int64_t offsets[PARTITION];
        find_tokens(tile, begin, end, num_tokens, offsets);
        float* scores = scratch.scores.room(size_t(heads) * PARTITION);
        const TileScope scope = TileScope::of_columns(1);
        for (int token = 0; token < num_tokens; token += TILE) {
            const bool is_together = (begin + token) % layout_.block_size + TILE <= layout_.block_size;
            const int following = token + TILE;
            const T* next = following < num_tokens ? tensors_.keys + offsets[following] : tensors_.values + offsets[0];
            for (int head = 0; head < heads; head++) {
                const Next ahead = next_of(tile, next, head, TILE);
                for (int i = 0; i < TILE; i++) ahead.ask(i, head_dim / STEP);
                const T* keys = is_together ? tensors_.keys + offsets[token] + head * head_dim : gather_keys(offsets + token, head, scratch);
                score_row(scores + head * PARTITION + token, keys, is_together ? token_stride_ : head_dim, q + head * head_dim, head_dim);
            }
        }
        for (int head = 0; head < heads; head++) {
            float* of_head = scores + head * PARTITION;
            running[head] = soften_row(tile, head, begin, end, of_head, params_.scale);
            round_to_bfloat16(of_head, num_tokens);
        }
        std::fill(totals, totals + size_t(heads) * head_dim, 0.0f);
        for (int token = 0; token < count; token += STEP) {
            const int following = std::min(token + STEP, count - 1);
            for (int head = 0; head < heads; head++) {
                const Next next = next_of(tile, tensors_.values + offsets[following], head, STEP);
                const float* weights = scores + head * PARTITION + token;
                const T* values = tensors_.values + head * head_dim;
                float* to = totals + head * head_dim;
                const auto add = [&](auto add_step, int dim) {
                    add_step(to + dim, values + dim, offsets + token, weights, std::min(STEP, count - token), Next{next.from + dim, next.stride});
                };
                for (int dim = 0; dim + 2 * STEP <= head_dim; dim += 2 * STEP) add(add_step_of_values<2>, dim);
                if (head_dim % (2 * STEP)) add(add_step_of_values<1>, head_dim - STEP);
            }
        }
        for (int head = 0; head < heads; head++) interleave(totals + head * head_dim, head_dim);
    }

    // A head's share of what the tile reads next, the heads of so many tokens: in the order of memory, if the tile has all of it.
    Next next_of(const Tile& tile, const T* next, int head, int num_tokens) const {
        const bool has_all = tile.num_kv_heads == layout_.num_kv_heads;
        return {next + head * layout_.head_dim * (has_all ? num_tokens : 1), has_all ? layout_.head_dim : token_stride_};
    }

    // The keys of 16 tokens that lie in more than one block.
    const T* gather_keys(const int64_t* offsets, int head, Scratch& scratch) const {
        const int head_dim = layout_.head_dim;
        T* const gathered = scratch.packed.room(size_t(TILE) * head_dim);
        for (int i = 0; i < TILE; i++)
            std::memcpy(gathered + i * head_dim, tensors_.keys + offsets[i] + head * head_dim, head_dim * sizeof(T));
        return gathered;
    }
#endif

    // Where the tile's first head of each token begins; those past the last one are the last one again.
    void find_tokens(const Tile& tile, int begin, int end, int num_tokens, int64_t* offsets) const {
        int i = 0;
        for (int token = begin; token < end;) {
            const int64_t first = place(tile, token);
            const int block_end = std::min(end, token - token % layout_.block_size + layout_.block_size);
            for (int j = 0; token < block_end; token++, j++) offsets[i++] = first + j * token_stride_;
        }
        for (; i < num_tokens; i++) offsets[i] = offsets[end - begin - 1];
    }

    // As attend_partition, by integers: attention_int8.h.
    void attend_integers(const Tile& tile, int partition, const T* q, float* scores, Running* running, float* totals);

    Running soften_row(const Tile& tile, int row, int begin, int end, float* scores, float scale = 1) const {
        const int query = tile.first_query + row / group_ % tile.num_queries;
        const int head = (tile.first_kv_head + row / (group_ * tile.num_queries)) * group_ + row % group_;
        const int seen_begin = std::max(begin, queries_.first_seen(tile.sequence, query));
        const int seen_end = std::min(end, queries_.position(tile.sequence, query) + 1);
        const float* bias = params_.key_bias ? params_.key_bias + head * params_.key_bias_stride + begin : nullptr;
        return soften<T>(scores, end - begin, seen_begin - begin, seen_end - begin, scale, params_.soft_cap, bias);
    }

    // Calls visit(offset of the first token's first head, the same of the next run or -1, token - begin, tokens) for runs
    // of at most LANES tokens that lie in one block.
    template <class Visit>
    void for_each_run(const Tile& tile, int begin, int end, Visit visit) const {
        for (int token = begin; token < end;) {
            const int room = layout_.block_size - token % layout_.block_size;
            const int num_tokens = std::min({LANES, room, end - token});
            const int next = token + num_tokens;
            visit(place(tile, token), next < end ? place(tile, next) : -1, token - begin, num_tokens);
            token = next;
        }
    }

    // Where the first of the tile's heads of a token begins in keys and values.
    int64_t place(const Tile& tile, int token) const {
        return block_of(tile, token) * block_stride_ + token % layout_.block_size * token_stride_ +
               int64_t(tile.first_kv_head) * layout_.head_dim;
    }

    int64_t block_of(const Tile& tile, int token) const {
        return layout_.block_tables[tile.sequence * layout_.table_stride + token / layout_.block_size];
    }

    // Of a half in 8 bits, the scales of one of the tile's heads from a token on; those of the next head lie block_size further.
    const float* scales(const C* half, const Tile& tile, int token, int head = 0) const {
        const C* const of_block = half + block_of(tile, token) * block_stride_ + blocks_.num_integers();
        return reinterpret_cast<const float*>(of_block) + (tile.first_kv_head + head) * layout_.block_size + token % layout_.block_size;
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

    static constexpr int ROOM = 32;  // rows past the last that matrix tiles may touch
    const Tensors<T, C> tensors_;
    const StepLayout& layout_;
    const LayerParams& params_;
    AttentionPlan& plan_;
    const Queries queries_;
    const int group_;
    const int64_t token_stride_;
    const Int8Blocks blocks_;
    const int64_t block_stride_;
};

// Whether a step's chunks are multiplied by matrix tiles.
template <class T>
bool chunks_by_tiles(const StepLayout& layout) {
    return layout.is_int8 ? has_matrix_tiles<T, int8_t>(layout.head_dim) : has_matrix_tiles<T>(layout.head_dim);
}

// One layer, whatever its cache holds.
template <class T>
void attend(T* out, const T* q, int64_t q_token_stride, const void* keys, const void* values, const StepLayout& layout,
            const LayerParams& params, AttentionPlan& plan, Team& team) {
    if (layout.is_int8) {
        const Tensors<T, int8_t> tensors{out, q, q_token_stride, static_cast<const int8_t*>(keys), static_cast<const int8_t*>(values)};
        return PagedAttention<T, int8_t>(tensors, layout, params, plan).run(team);
    }
    const Tensors<T> tensors{out, q, q_token_stride, static_cast<const T*>(keys), static_cast<const T*>(values)};
    PagedAttention<T>(tensors, layout, params, plan).run(team);
}

}  // namespace weft

#include "attention_int8.h"
