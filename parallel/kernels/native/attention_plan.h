// Which rows of a step go through which part of their context together. Terms are those of attention.h.

#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention_vectors.h"

namespace weft {

// Constant for a layer; mirrored by ctypes in structures.py.
struct LayerParams {
    float scale;
    float soft_cap;          // 0: none
    int32_t window;          // a token sees itself and window - 1 before it; 0: all before it
    int32_t own_column;      // of key_bias: that of the query's own key, by whose distance the others follow; -1: columns are positions
    const float* key_bias;   // [heads, positions]; null: none
    int64_t key_bias_stride;
    const float* sinks;      // [heads]; null: none
};

// Constant for a step; mirrored by ctypes in structures.py.
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
constexpr int LEAST_TILE_ROWS = 6; // from which on rows are bundled; vectors read 8 bits faster up to 4
constexpr int LEAST_BUNDLE = 64, MOST_BUNDLE = 512;  // rows

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

// Pieces of chunks that go through a key-value head together: what a partition has in common for pieces that
// follow each other is packed once.
struct Bundle {
    int first_piece, num_pieces;
    int kv_head;
    int64_t cost;  // rows times tokens
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
    // packs_chunks: they become bundles.
    AttentionPlan(const StepLayout& layout, int window, bool packs_chunks)
        : layout_(layout), queries_{layout, window}, group_(layout.num_heads / layout.num_kv_heads), packs_chunks_(packs_chunks) {
        plan();
    }
    AttentionPlan(const AttentionPlan&) = delete;

    std::vector<Bundle> bundles;  // the longest first
    std::vector<Tile> pieces;     // of bundles, whose heads they have
    std::vector<Tile> tiles;
    Splits splits;

  private:
    void plan() {
        int64_t num_decodes = 0, decode_tokens = 0;
        for (int s = 0; s < layout_.num_sequences; s++)
            if (queries_.count(s) == 1) num_decodes++, decode_tokens += layout_.context_lens[s] - queries_.first_seen(s, queries_.begin(s));
        plan_bundles();
        for (int s = 0; s < layout_.num_sequences; s++)
            if (queries_.count(s) > 1 && !is_bundled(s)) plan_chunk(s);
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

    bool is_bundled(int s) const { return packs_chunks_ && queries_.count(s) > 1 && queries_.count(s) * group_ >= LEAST_TILE_ROWS; }

    // Bundles hold as many rows as are near a core, and fewer where threads would have nothing to do. Only what does not fit
    // into one is cut.
    void plan_bundles() {
        int64_t num_rows = 0;
        for (int s = 0; s < layout_.num_sequences; s++)
            if (is_bundled(s)) num_rows += queries_.count(s) * group_;
        const int64_t share = num_rows * layout_.num_kv_heads / (4 * layout_.num_threads);
        const int most = std::max(1, int(std::clamp<int64_t>(share, LEAST_BUNDLE, MOST_BUNDLE)) / group_);  // queries
        int first = 0, room = most;
        for (int s = 0; s < layout_.num_sequences; s++)
            for (int query = queries_.begin(s), count; is_bundled(s) && query < queries_.end(s); query += count, room -= count) {
                const int missing = queries_.end(s) - query;
                if (room == 0 || (missing > room && missing <= most)) add_bundle(first), first = int(pieces.size()), room = most;
                count = std::min(missing, room);
                pieces.push_back({s, query, count, 0, 1, 0, 0, -1});
            }
        add_bundle(first);
        std::stable_sort(bundles.begin(), bundles.end(), [](const Bundle& a, const Bundle& b) { return a.cost > b.cost; });
    }

    // The pieces from `first` on.
    void add_bundle(int first) {
        const int count = int(pieces.size()) - first;
        int64_t cost = 0;
        for (int i = first; i < first + count; i++) {
            const int last_query = pieces[i].first_query + pieces[i].num_queries - 1;
            const int num_tokens = queries_.position(pieces[i].sequence, last_query) - queries_.first_seen(pieces[i].sequence, pieces[i].first_query);
            cost += int64_t(pieces[i].num_queries) * num_tokens;
        }
        for (int head = 0; head < layout_.num_kv_heads && count > 0; head++) bundles.push_back({first, count, head, cost});
    }

    void plan_chunk(int s) {
        const int step = std::max(1, std::min(TILE_QUERIES, 64 / group_));
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
    const bool packs_chunks_;
};

}  // namespace weft
