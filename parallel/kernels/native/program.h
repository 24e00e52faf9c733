// All layers of a step in one call: a list of operations on buffers, run by one team from the first to the last.
//
// The list is recorded once from the layers themselves (program.py) and is the same for every step; what changes with
// a step is in Step. A buffer holds a row for each token; an operand is a run of columns of a buffer.

#pragma once

#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "all_reduce.h"
#include "attention.h"
#include "cache_int8.h"
#include "elementwise.h"
#include "experts.h"
#include "matrix.h"
#include "matrix_int8.h"
#include "products.h"
#include "table_search.h"

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

// A buffer and the first column of an operand in it; mirrored by ctypes in structures.py, as are the structures below.
struct Place {
    int32_t buffer, column;
};

enum class Kind : int32_t { RMS_NORM, ROTARY, GATE, WRITE_CACHE, ATTENTION, MULTIPLY, MULTIPLY_GATED, MULTIPLY_INT8, MULTIPLY_GATED_INT8, EXPERTS, SCALE, LAYER_NORM, ACTIVATE, ADD, GATE_ROWS, CLAMP, COPY, MULTIPLY_HEADS, MULTIPLY_FLOAT, ALL_REDUCE, SUM_SQUARES, NORM_PART };

struct Operation {
    Kind kind;
    int32_t index;      // the layer of a cache, or the angles of a rotation
    Place in, second;   // second: the residual of a norm (buffer -1: none), the values of WRITE_CACHE, the logits of EXPERTS, what ADD adds (buffer -1: the weight, to each row), x of GATE_ROWS, the squares of NORM_PART
    Place out;
    int32_t num_heads, size;     // of an operand's row: heads (1: it has none) of so many columns
    int32_t flag;                // weight is float32; what is added up is float32; pairs are interleaved; the Activation of ACTIVATE and GATE
    float eps;                   // of a norm, the factor of SCALE, or the limit of CLAMP
    const void* weight;          // of a norm, gate or ADD, a matrix as packed, an ExpertLayer, or the SharedRanks of ALL_REDUCE
    const void* bias;
    int64_t weight_stride;       // between the weights of heads
    int32_t in_head_stride, out_head_stride;  // of ROTARY, COPY and MULTIPLY_HEADS
    int32_t num_in, num_out;                  // of a matrix; MULTIPLY_HEADS has one for each head; of NORM_PART: numbers that were summed
    const LayerParams* params;
};

struct GroupStep {  // of layers
    StepLayout layout;
    const int64_t* slots;
};

struct LayerStep {
    void *keys, *values;
    const GroupStep* group;
};

struct AnglesStep {
    const float *cos, *sin;
    int64_t half;
    const int64_t* positions;  // whose rows the tokens take; null: each its own
};

struct Embedding {
    const void* values;  // of a table, packed or row after row
    int64_t num_rows;
    int32_t is_packed;
    const int64_t* token_ids;
};

struct Step {
    int64_t num_tokens;
    void* const* buffers;
    const int64_t* widths;  // columns of each buffer
    const LayerStep* layers;
    const AnglesStep* angles;
    int32_t num_threads;
    int32_t searched;    // the buffer whose rows are looked up in the table after all operations
    const Table* table;  // null: none
    const Embedding* embedding;  // whose rows fill the first buffer before all operations; null: it is filled
    const int64_t* kept;         // the tokens whose result is wanted, ascending: after the last attention there are no others
    int64_t num_kept;            // below 0: all
};

template <class T>
class Program {
  public:
    Program(const Operation* operations, int count, const Step& step) : operations_(operations), count_(count), step_(step) {
        static thread_local Buffer<Number> scratch;
        int64_t most = 0;
        for (int i = 0; i < count; i++)
            if (is_product(operations[i])) most = std::max(most, scratch_size(step.num_tokens, operations[i].num_in));
        // The left side of a product is packed while the one before it still reads its own.
        for (int i = 0; i < 2; i++) packed_[i] = scratch.room(2 * most) + i * most;
#ifdef WEFT_HAS_INT8
        static thread_local int8::Scratch quantized;
        quantized_ = &quantized;
        for (int i = 0; i < count; i++)
            if (operations[i].kind == Kind::MULTIPLY_INT8 || operations[i].kind == Kind::MULTIPLY_GATED_INT8)
                quantized.room(step.num_tokens, operations[i].num_in);
#endif
        for (int i = 0; i < count; i++)
            if (operations[i].kind == Kind::ATTENTION) {
                const StepLayout* layout = &step.layers[operations[i].index].group->layout;
                const std::pair<const StepLayout*, int> key(layout, operations[i].params->window);
                auto [entry, is_new] = plan_of_.try_emplace(key, nullptr);
                if (is_new) entry->second = &plans_.emplace_back(*layout, operations[i].params->window, packs_chunks(*layout));
                plans_in_order_.push_back(entry->second);
            }
        if (step.num_kept >= 0) find_kept();
        find_packed();
        place_experts();
        place_heads();
#ifdef WEFT_HAS_ALL_REDUCE
        for (int i = 0; i < count; i++)
            if (operations[i].kind == Kind::ALL_REDUCE) {
                all_reduce_.emplace(*static_cast<SharedRanks*>(const_cast<void*>(operations[i].weight)));
                break;  // all have the same
            }
#endif
        const Place searched{step.searched, 0};
        const int num_rows = int(step.num_kept < 0 ? step.num_tokens : step.num_kept);
        if (step.table && num_rows > 0) search_ = std::make_unique<TableSearch>(*step.table, LeftRows{at(searched), stride(searched), num_rows}, step.num_threads);
    }

    int num_sections() const {
        return 2 + count_ * MULTIPLY_SECTIONS + num_sections_of_sums() + int(experts_.size()) * ExpertProducts::SECTIONS +
               int(heads_.size()) * ProductsOfHeads::SECTIONS + TableSearch::SECTIONS;
    }

    void run(Team& team) {
        if (step_.embedding) look_up(*step_.embedding, team);
        int num_attentions = 0, num_experts = 0, num_heads = 0;
        int64_t num_chunks = 0;
        for (int i = 0; i < count_; i++) {
            if (i == num_whole_) {
                if (step_.num_kept == 0) return;
                keep(team);
            }
            AttentionPlan* plan = operations_[i].kind == Kind::ATTENTION ? plans_in_order_[num_attentions++] : nullptr;
            if (operations_[i].kind == Kind::EXPERTS)
                run_experts(operations_[i], *experts_[num_experts++], team);
            else if (operations_[i].kind == Kind::MULTIPLY_HEADS)
                heads_[num_heads++].run(team);
            else if (operations_[i].kind == Kind::ALL_REDUCE) {
                if (!add_up(i, num_chunks, team)) return;
            } else
                run(i, plan, team);
        }
        if (search_) search_->run(team);
    }

    // When the team is done. Returns whether its results are there: a Meeting.
    int finish() const {
#ifdef WEFT_HAS_ALL_REDUCE
        if (all_reduce_ && all_reduce_->meeting() != Meeting::DONE) return int(all_reduce_->meeting());
#endif
        if (search_) search_->write();
        return 0;
    }

  private:
    T* at(Place place) const { return static_cast<T*>(step_.buffers[place.buffer]) + place.column; }
    int64_t stride(Place place) const { return step_.widths[place.buffer]; }

    // Of a buffer of float32.
    float* floats_at(Place place) const { return reinterpret_cast<float*>(at(place)); }
    int64_t floats_stride(Place place) const { return stride(place) * int64_t(sizeof(T)) / int64_t(sizeof(float)); }

    static bool is_product(const Operation& o) { return o.kind == Kind::MULTIPLY || o.kind == Kind::MULTIPLY_GATED || o.kind == Kind::MULTIPLY_FLOAT; }

    void look_up(const Embedding& embedding, Team& team) const {
        T* const x = at({0, 0});
        const T* const values = static_cast<const T*>(embedding.values);
        const int width = int(step_.widths[0]);
        if (embedding.is_packed)
            unpack_rows(x, embedding.token_ids, step_.num_tokens, {values, nullptr, embedding.num_rows, width}, team);
        else
            copy_rows(x, embedding.token_ids, step_.num_tokens, values, embedding.num_rows, width, team);
    }

    // Each operation has its own: a thread may still look at those of the one before.
    void place_experts() {
        static thread_local Buffer<char> scratch;
        int64_t most = 0;
        const auto layer = [](const Operation& o) { return static_cast<const ExpertLayer*>(o.weight); };
        for (int i = 0; i < count_; i++)
            if (operations_[i].kind == Kind::EXPERTS)
                most = std::max(most, experts_scratch_size(step_.num_tokens, layer(operations_[i])->choice.num_chosen, layer(operations_[i])->matrices));
        void* const room = scratch.room(size_t(most));
        for (int i = 0; i < count_; i++) {
            const Operation& o = operations_[i];
            if (o.kind == Kind::EXPERTS)
                experts_.push_back(make_expert_products(at(o.out), {at(o.in), stride(o.in), int(num_tokens(i))}, layer(o)->matrices, layer(o)->choice.num_chosen, room, step_.num_threads));
        }
    }

    // They have one room: none of these operations follows another that is not done.
    void place_heads() {
        static thread_local Buffer<Number> scratch;
        int64_t most = 0;
        for (const Operation* o = operations_; o < operations_ + count_; o++)
            if (o->kind == Kind::MULTIPLY_HEADS) most = std::max(most, ProductsOfHeads::scratch_size(step_.num_tokens, o->num_heads, o->num_in));
        Number* const room = scratch.room(size_t(most));
        for (int i = 0; i < count_; i++) {
            const Operation& o = operations_[i];
            if (o.kind == Kind::MULTIPLY_HEADS)
                heads_.emplace_back(out_heads(o), in_heads(o), int(num_tokens(i)), o.num_heads, packed_matrix(o), room, step_.num_threads);
        }
    }

    Heads<T> in_heads(const Operation& o) const { return {at(o.in), stride(o.in), o.in_head_stride}; }
    Heads<T> out_heads(const Operation& o) const { return {at(o.out), stride(o.out), o.out_head_stride}; }

    static PackedMatrix packed_matrix(const Operation& o) {
        return {static_cast<const T*>(o.weight), static_cast<const T*>(o.bias), o.num_out, o.num_in};
    }

    void run_experts(const Operation& o, ExpertProducts& products, Team& team) const {
        products.choose(at(o.second), stride(o.second) * int64_t(sizeof(T)), static_cast<const ExpertLayer*>(o.weight)->choice, team);
        products.run(team);
    }

#ifdef WEFT_HAS_ALL_REDUCE
    int num_sections_of_sums() const {
        int64_t num_chunks = 0;
        for (int i = 0; i < count_; i++)
            if (operations_[i].kind == Kind::ALL_REDUCE)
                num_chunks += AllReduce::num_chunks(num_tokens(i) * operations_[i].size * int64_t(operations_[i].flag ? sizeof(float) : sizeof(T)));
        return int(num_chunks) * AllReduce::SECTIONS;
    }

    bool add_up(int index, int64_t& num_chunks, Team& team) {
        const Operation& o = operations_[index];
        const int64_t count = num_tokens(index) * o.size;
        return o.flag ? all_reduce_->run(floats_at(o.in), count, num_chunks, team) : all_reduce_->run(at(o.in), count, num_chunks, team);
    }
#else
    int num_sections_of_sums() const { return 0; }
    bool add_up(int, int64_t&, Team&) { return false; }  // there is none
#endif

    int64_t num_tokens(int index) const { return index < num_whole_ ? step_.num_tokens : step_.num_kept; }

    // Finds the operations that have all tokens, and what the others read of them.
    void find_kept() {
        const auto is_attention = [](const Operation& o) { return o.kind == Kind::ATTENTION; };
        const Operation* const end = operations_ + count_;
        num_whole_ = int(std::find_if(std::reverse_iterator(end), std::reverse_iterator(operations_), is_attention).base() - operations_);
        std::set<int> written;
        for (const Operation* o = operations_ + num_whole_; o < end; o++) {
            for (const int buffer : {o->in.buffer, o->second.buffer})
                if (buffer >= 0 && !written.count(buffer)) kept_buffers_.insert(buffer);
            written.insert(o->out.buffer);
        }
    }

    // Puts the rows that are kept in front of each buffer.
    void keep(Team& team) const {
        const std::vector<int> buffers(kept_buffers_.begin(), kept_buffers_.end());
        team.for_each(int64_t(buffers.size()), [&](int64_t item) {
            const Place place{buffers[item], 0};
            for (int64_t i = 0; i < step_.num_kept; i++)
                if (step_.kept[i] != i) std::copy_n(at(place) + step_.kept[i] * stride(place), stride(place), at(place) + i * stride(place));
        });
    }

    // Finds the results that only the product after them reads: they are written as it wants them.
    void find_packed() {
        is_packed_.assign(count_, false);
        if (!needs_packing(step_.num_tokens)) return;
        std::map<int, int> readers;
        for (int i = 0; i < count_; i++) readers[operations_[i].in.buffer]++, readers[operations_[i].second.buffer]++;
        for (int i = 0; i + 1 < count_; i++) {
            const Operation &o = operations_[i], &next = operations_[i + 1];
            const bool is_read_so = is_product(next) && next.in.buffer == o.out.buffer && next.in.column == 0 &&
                                    o.out.column == 0 && next.num_in == stride(o.out);
            is_packed_[i] = can_pack(o) && is_read_so && readers[o.out.buffer] == 1 && i + 1 != num_whole_ && needs_packing(num_tokens(i));
        }
    }

    bool can_pack(const Operation& o) const {
        switch (o.kind) {
            case Kind::RMS_NORM:
            case Kind::LAYER_NORM:
                return o.num_heads == 1 && o.size == stride(o.out);
            case Kind::ATTENTION:
                return step_.layers[o.index].group->layout.head_dim % PANEL == 0;
            default:
                return o.kind == Kind::MULTIPLY_GATED;
        }
    }

    void run(int index, AttentionPlan* plan, Team& team) const {
        const Operation& o = operations_[index];
        T* const packed_out = packed_[index % 2];  // what is read lies in the other one
        const auto out = [&] { return Target<T>{is_packed_[index] ? packed_out : at(o.out), stride(o.out), bool(is_packed_[index])}; };
        switch (o.kind) {
            case Kind::RMS_NORM:
            case Kind::LAYER_NORM: {
                const Rows rows{num_tokens(index), o.num_heads, stride(o.in), o.size};
                const Target<T> to{out().values, o.size, bool(is_packed_[index])};
                T* residual = o.second.buffer < 0 ? nullptr : at(o.second);
                const NormWeights<T> weights{static_cast<const T*>(o.weight), static_cast<const T*>(o.bias), o.weight_stride};
                if (o.kind == Kind::LAYER_NORM) return norm<true>(to, at(o.in), rows, residual, weights, o.eps, team);
                if (!o.flag) return norm<false>(to, at(o.in), rows, residual, weights, o.eps, team);
                const NormWeights<float> floats{static_cast<const float*>(o.weight), nullptr, o.weight_stride};
                return norm<false>(to, at(o.in), rows, residual, floats, o.eps, team);
            }
            case Kind::SUM_SQUARES:
                return sum_squares(floats_at(o.out), floats_stride(o.out), at(o.in), stride(o.in), num_tokens(index), o.size, team);
            case Kind::NORM_PART:
                return norm_part(at(o.in), stride(o.in), floats_at(o.second), floats_stride(o.second), static_cast<const T*>(o.weight),
                                 num_tokens(index), o.size, float(o.num_in), o.eps, team);
            case Kind::ROTARY: {
                const AnglesStep& angles = step_.angles[o.index];
                return rotary(in_heads(o), num_tokens(index), o.num_heads, o.size, angles.cos, angles.sin, angles.half, angles.positions,
                              bool(o.flag), team);
            }
            case Kind::GATE:
                return with_activation(Activation(o.flag), [&](auto activation) {
                    gate<decltype(activation)::value>(at(o.out), at(o.in), num_tokens(index), o.size, team);
                });
            case Kind::ACTIVATE:
                return with_activation(Activation(o.flag), [&](auto activation) {
                    activate<decltype(activation)::value>(at(o.in), stride(o.in), num_tokens(index), o.size, team);
                });
            case Kind::SCALE:
                return scale(at(o.in), stride(o.in), num_tokens(index), o.size, o.eps, team);
            case Kind::CLAMP:
                return clamp(at(o.in), stride(o.in), num_tokens(index), o.size, o.eps, team);
            case Kind::COPY:
                return copy_heads(out_heads(o), in_heads(o), num_tokens(index), o.num_heads, o.size, team);
            case Kind::ADD:
                if (o.second.buffer < 0) return add(at(o.in), stride(o.in), static_cast<const T*>(o.weight), 0, num_tokens(index), o.size, team);
                return add(at(o.in), stride(o.in), at(o.second), stride(o.second), num_tokens(index), o.size, team);
            case Kind::GATE_ROWS:
                return gate_rows(at(o.in), stride(o.in), at(o.second), stride(o.second), static_cast<const T*>(o.weight), num_tokens(index),
                                 o.size, team);
            case Kind::WRITE_CACHE: {
                const LayerStep& layer = step_.layers[o.index];
                const auto& [layout, slots] = *layer.group;
                if (layout.is_int8)
                    return write_cache_int8(static_cast<int8_t*>(layer.keys), static_cast<int8_t*>(layer.values), at(o.in),
                                            at(o.second), stride(o.in), stride(o.second), slots, num_tokens(index),
                                            {layout.block_size, o.num_heads, o.size}, team);
                return write_cache(static_cast<T*>(layer.keys), static_cast<T*>(layer.values), at(o.in), at(o.second),
                                   stride(o.in), stride(o.second), slots, num_tokens(index),
                                   int64_t(o.num_heads) * o.size, team);
            }
            case Kind::ATTENTION: {
                const LayerStep& layer = step_.layers[o.index];
                return attend(out(), at(o.in), stride(o.in), layer.keys, layer.values, layer.group->layout, *o.params, *plan, team);
            }
            case Kind::MULTIPLY:
            case Kind::MULTIPLY_GATED:
            case Kind::MULTIPLY_FLOAT: {
                const PackedMatrix matrix = packed_matrix(o);
                const bool is_left_packed = index > 0 && is_packed_[index - 1];
                T* const other = packed_[1 - index % 2];
                const LeftRows left{is_left_packed ? other : at(o.in), stride(o.in), int(num_tokens(index)), is_left_packed};
                if (o.kind == Kind::MULTIPLY) return weft::multiply<false>(out(), left, matrix, other, team);
                if (o.kind == Kind::MULTIPLY_FLOAT)
                    return weft::multiply<false>(Target<float>{reinterpret_cast<float*>(at(o.out)), o.num_out}, left, matrix, other, team);
                return weft::multiply<true>(out(), left, matrix, other, team);
            }
            case Kind::EXPERTS:
            case Kind::MULTIPLY_HEADS:
            case Kind::ALL_REDUCE:
                return;  // they are objects
#ifdef WEFT_HAS_INT8
            case Kind::MULTIPLY_INT8:
                return multiply_int8<false>(o, num_tokens(index), team);
            case Kind::MULTIPLY_GATED_INT8:
                return multiply_int8<true>(o, num_tokens(index), team);
#endif
        }
    }

#ifdef WEFT_HAS_INT8
    template <bool IS_GATED>
    void multiply_int8(const Operation& o, int64_t num_tokens, Team& team) const {
        const int8::Left left = quantized_->room(num_tokens, o.num_in);  // there is as much already
        int8::quantize(left, at(o.in), stride(o.in), o.num_in, team);
        const Target<T> out{at(o.out), o.num_out / (IS_GATED ? 2 : 1)};
        int8::multiply<IS_GATED>(out, left, int8::Matrix<T>(o.weight, o.bias, o.num_out, o.num_in), team);
    }

    int8::Scratch* quantized_ = nullptr;
#endif
    const Operation* operations_;
    const int count_;
    const Step& step_;
    int num_whole_ = count_;      // operations that have all tokens
    std::set<int> kept_buffers_;  // that the others read
    Number* packed_[2] = {};
    std::vector<char> is_packed_;  // the result of each operation
    std::deque<AttentionPlan> plans_;
    std::map<std::pair<const StepLayout*, int>, AttentionPlan*> plan_of_;
    std::vector<AttentionPlan*> plans_in_order_;
    std::vector<std::unique_ptr<ExpertProducts>> experts_;  // of each such operation
    std::deque<ProductsOfHeads> heads_;                     // the same
    std::unique_ptr<TableSearch> search_;
#ifdef WEFT_HAS_ALL_REDUCE
    std::optional<AllReduce> all_reduce_;
#endif
};

// A program under way. What the step points to stays until it has finished.
class StartedProgram {
  public:
    StartedProgram(const Operation* operations, int count, const Step& step)
        : step_(step),
          program_(operations, count, step_),
          team_(step.num_threads, program_.num_sections(), [this](Team& team) { program_.run(team); }, [this] { meeting_ = program_.finish(); }) {}

    int finish() {
        team_.finish();
        return meeting_;
    }

    bool has_ended() const { return team_.has_ended(); }

  private:
    const Step step_;
    Program<Number> program_;
    int meeting_ = 0;
    StartedTeam team_;  // the last one: it begins at once
};

}  // namespace weft

#endif
