// All exports.h speaks of but attention.

#include "cache_int8.h"
#include "draws.h"
#include "edits.h"
#include "elementwise.h"
#include "experts.h"
#include "exports.h"
#include "idle.h"
#include "linear.h"
#include "matrix.h"
#include "matrix_int8.h"
#include "products.h"
#include "program.h"
#include "ranking.h"
#include "sampling.h"
#include "screened.h"

using namespace weft;

EXPORT void weft_multiply_rows(float* out, const void* x, int64_t x_row_stride, int num_rows, const void* weight,
                               int64_t num_out, int num_in, int num_threads) {
    multiply_rows(Target<float>{out, num_out}, static_cast<const Number*>(x), x_row_stride, num_rows,
                  static_cast<const Number*>(weight), num_in, num_threads);
}

EXPORT void weft_largest_of_rows(float* values, int64_t* indices, const void* x, int64_t x_row_stride, int num_rows,
                                 const void* weight, int64_t num_out, int num_in, int num_threads) {
    find_largest<float>(values, indices, num_rows, num_out, [=](const auto& searched) {
        multiply_rows(searched, static_cast<const Number*>(x), x_row_stride, num_rows, static_cast<const Number*>(weight),
                      num_in, num_threads);
    });
}

EXPORT void weft_rms_norm(void* out, const void* x, int64_t num_outer, int64_t num_inner, int64_t outer_stride, int64_t size,
                          void* residual, const void* weight, int64_t weight_stride, int is_weight_float32, float eps,
                          int num_threads) {
    const Rows rows{num_outer, num_inner, outer_stride, size};
    const Target<Number> to{static_cast<Number*>(out), size};
    Number* sum = static_cast<Number*>(residual);
    const Number* from = static_cast<const Number*>(x);
    const auto run = [&](const auto* weights) {
        on_team(threads_for(num_outer * num_inner * size, num_threads), 1, [&](Team& team) {
            norm<false>(to, from, rows, sum, NormWeights<std::decay_t<decltype(*weights)>>{weights, nullptr, weight_stride}, eps, team);
        });
    };
    if (is_weight_float32) return run(static_cast<const float*>(weight));
    run(static_cast<const Number*>(weight));
}

EXPORT void weft_layer_norm(void* out, const void* x, int64_t num_outer, int64_t num_inner, int64_t outer_stride,
                            int64_t size, void* residual, const void* weight, const void* bias, int64_t weight_stride,
                            float eps, int num_threads) {
    const Rows rows{num_outer, num_inner, outer_stride, size};
    const NormWeights<Number> weights{static_cast<const Number*>(weight), static_cast<const Number*>(bias), weight_stride};
    on_team(threads_for(num_outer * num_inner * size, num_threads), 1, [&](Team& team) {
        norm<true>(Target<Number>{static_cast<Number*>(out), size}, static_cast<const Number*>(x), rows, static_cast<Number*>(residual),
                   weights, eps, team);
    });
}

EXPORT void weft_sum_squares(float* out, int64_t out_row_stride, const void* x, int64_t row_stride, int64_t num_rows,
                             int64_t size, int num_threads) {
    on_team(threads_for(num_rows * size, num_threads), 1, [=](Team& team) {
        sum_squares(out, out_row_stride, static_cast<const Number*>(x), row_stride, num_rows, size, team);
    });
}

EXPORT void weft_norm_part(void* x, int64_t row_stride, const float* squares, int64_t squares_row_stride, const void* weight,
                           int64_t num_rows, int64_t size, float num_summed, float eps, int num_threads) {
    on_team(threads_for(num_rows * size, num_threads), 1, [=](Team& team) {
        norm_part(static_cast<Number*>(x), row_stride, squares, squares_row_stride, static_cast<const Number*>(weight),
                  num_rows, size, num_summed, eps, team);
    });
}

EXPORT void weft_gate(void* out, const void* gate_up, int64_t num_rows, int64_t size, int activation, int num_threads) {
    with_activation(Activation(activation), [=](auto known) {
        on_team(threads_for(2 * num_rows * size, num_threads), 1, [=](Team& team) {
            gate<decltype(known)::value>(static_cast<Number*>(out), static_cast<const Number*>(gate_up), num_rows, size, team);
        });
    });
}

EXPORT void weft_activate(void* x, int64_t row_stride, int64_t num_rows, int64_t size, int activation, int num_threads) {
    with_activation(Activation(activation), [=](auto known) {
        on_team(threads_for(num_rows * size, num_threads), 1, [=](Team& team) {
            activate<decltype(known)::value>(static_cast<Number*>(x), row_stride, num_rows, size, team);
        });
    });
}

EXPORT void weft_gate_rows(void* y, int64_t y_row_stride, const void* x, int64_t x_row_stride, const void* weight,
                           int64_t num_rows, int64_t size, int num_threads) {
    on_team(threads_for(2 * num_rows * size, num_threads), 1, [=](Team& team) {
        gate_rows(static_cast<Number*>(y), y_row_stride, static_cast<const Number*>(x), x_row_stride,
                  static_cast<const Number*>(weight), num_rows, size, team);
    });
}

EXPORT void weft_rotary(void* heads, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,
                        int64_t head_dim, const float* cos, const float* sin, int64_t half, int is_interleaved,
                        int num_threads) {
    on_team(threads_for(num_tokens * num_heads * head_dim, num_threads), 1, [=](Team& team) {
        rotary(Heads<Number>{static_cast<Number*>(heads), token_stride, head_stride}, num_tokens, num_heads, head_dim, cos,
               sin, half, nullptr, is_interleaved, team);
    });
}

EXPORT void weft_write_cache(void* keys, void* values, const void* k, const void* v, int64_t k_token_stride,
                             int64_t v_token_stride, const int64_t* slots, int64_t num_tokens, int64_t size,
                             int num_threads) {
    on_team(threads_for(2 * num_tokens * size, num_threads), 1, [=](Team& team) {
        write_cache(static_cast<Number*>(keys), static_cast<Number*>(values), static_cast<const Number*>(k),
                    static_cast<const Number*>(v), k_token_stride, v_token_stride, slots, num_tokens, size, team);
    });
}

EXPORT void weft_write_cache_int8(void* keys, void* values, const void* k, const void* v, int64_t k_token_stride,
                                  int64_t v_token_stride, const int64_t* slots, int64_t num_tokens, int64_t block_size,
                                  int64_t num_heads, int64_t head_dim, int num_threads) {
    on_team(threads_for(2 * num_tokens * num_heads * head_dim, num_threads), 1, [=](Team& team) {
        write_cache_int8(static_cast<int8_t*>(keys), static_cast<int8_t*>(values), static_cast<const Number*>(k),
                         static_cast<const Number*>(v), k_token_stride, v_token_stride, slots, num_tokens,
                         {block_size, num_heads, head_dim}, team);
    });
}

#define DEFINE_CHOOSE_LARGEST(NAME, T)                                                                                  \
    EXPORT void weft_choose_largest_##NAME(int64_t* token_ids, const void* logits, int64_t row_stride, int64_t num_rows, \
                                           int64_t size, int num_threads) {                                             \
        on_team(threads_for(num_rows * size, num_threads), 1, [=](Team& team) {                                         \
            choose_largest(token_ids, static_cast<const T*>(logits), row_stride, num_rows, size, team);                 \
        });                                                                                                             \
    }

FOR_EACH_TYPE(DEFINE_CHOOSE_LARGEST)

EXPORT void weft_choose_tokens(int64_t* token_ids, float* scores, const float* logits, int64_t row_stride, int64_t num_rows,
                               int64_t size, const Draw* draws, int64_t first_token, int num_threads) {
    StartedTeam::finish_last();
    num_threads = threads_for(num_rows * size, num_threads);
    Drawing drawing(token_ids, scores, logits, row_stride, num_rows, size, draws, first_token, num_threads);
    on_team(num_threads, Drawing::SECTIONS, [&](Team& team) { drawing.run(team); });
}

EXPORT void weft_rank_tokens(float* totals, float* values, int64_t* tokens, const float* logits, int64_t row_stride, const int64_t* rows,
                             int64_t num_rows, int64_t size, int64_t number, int num_threads) {
    num_threads = threads_for(num_rows * size, num_threads);
    Ranking ranking(totals, values, tokens, logits, row_stride, rows, num_rows, size, number, num_threads);
    on_team(num_threads, Ranking::SECTIONS, [&](Team& team) { ranking.run(team); });
}

EXPORT void weft_edit_logits(float* logits, int64_t row_stride, int64_t num_rows, int64_t num_columns, const int64_t* starts,
                             const int64_t* tokens, const float* factors, const float* offsets, int64_t first_token, int num_threads) {
    on_team(threads_for(16 * starts[num_rows], num_threads), 1, [=](Team& team) {
        edit_logits(logits, row_stride, num_rows, num_columns, Edits{starts, tokens, factors, offsets}, first_token, team);
    });
}

// Of `Number`: 0 for bfloat16, 1 for float16, 2 for float32.
EXPORT int weft_number(void) { return WEFT_IS_FLOAT32 ? 2 : WEFT_IS_FLOAT16; }

EXPORT int weft_most_rows(void) { return most_rows(); }

#ifdef WEFT_HAS_PACKED_MATRIX

EXPORT int weft_has_programs(void) { return 1; }

EXPORT void weft_pack_matrix(void* packed, const void* weight, int64_t num_out, int num_in, int num_threads) {
    on_team(num_threads, 1, [=](Team& team) {
        pack_matrix(static_cast<Number*>(packed), static_cast<const Number*>(weight), num_out, num_in, team);
    });
}

template <class Result>
void multiply_packed(const Result& result, const LeftRows& left, const PackedMatrix& matrix, int num_threads) {
    static thread_local Buffer<Number> scratch;
    Number* room = scratch.room(scratch_size(left.count, matrix.num_in));
    on_team(num_threads, MULTIPLY_SECTIONS, [&](Team& team) { multiply(result, left, matrix, room, team); });
}

EXPORT void weft_unpack_rows(void* rows, const int64_t* indices, int64_t count, const void* packed, int64_t num_out,
                             int num_in, int num_threads) {
    const PackedMatrix matrix{static_cast<const Number*>(packed), nullptr, num_out, num_in};
    constexpr int64_t READ = LANES;  // bytes for one of a row
    on_team(threads_for(count * num_in * READ, num_threads), 1, [=](Team& team) {
        unpack_rows(static_cast<Number*>(rows), indices, count, matrix, team);
    });
}

// Of the result: rounded to 16 bits, or the sums as they are.
#define DEFINE_PACKED(NAME, T)                                                                                          \
    EXPORT void weft_multiply_##NAME(void* out, const void* x, int64_t x_row_stride, int num_rows, const void* packed,  \
                                     const void* bias, int64_t num_out, int num_in, int num_threads) {                  \
        const PackedMatrix matrix{static_cast<const Number*>(packed), static_cast<const Number*>(bias), num_out, num_in};\
        const LeftRows left{static_cast<const Number*>(x), x_row_stride, num_rows};                                   \
        multiply_packed(Target<T>{static_cast<T*>(out), num_out}, left, matrix, num_threads);                           \
    }

DEFINE_PACKED(float32, float)
DEFINE_PACKED(number, Number)

EXPORT void weft_largest_number(float* values, int64_t* indices, const void* x, int64_t x_row_stride, int num_rows,
                                  const void* packed, const void* bias, int64_t num_out, int num_in, int num_threads) {
    const PackedMatrix matrix{static_cast<const Number*>(packed), static_cast<const Number*>(bias), num_out, num_in};
    const LeftRows left{static_cast<const Number*>(x), x_row_stride, num_rows};
    find_largest<Number>(values, indices, num_rows, num_out,
                           [&](const auto& searched) { multiply_packed(searched, left, matrix, num_threads); });
}

EXPORT void weft_multiply_heads(void* out, int64_t out_token_stride, int64_t out_head_stride, void* x, int64_t x_token_stride,
                                int64_t x_head_stride, int num_tokens, int num_heads, const void* packed, int64_t num_out, int num_in,
                                int num_threads) {
    static thread_local Buffer<Number> scratch;
    Number* const room = scratch.room(size_t(ProductsOfHeads::scratch_size(num_tokens, num_heads, num_in)));
    const Heads<Number> to{static_cast<Number*>(out), out_token_stride, out_head_stride};
    const Heads<Number> from{static_cast<Number*>(x), x_token_stride, x_head_stride};
    const PackedMatrix first{static_cast<const Number*>(packed), nullptr, num_out, num_in};
    const ProductsOfHeads products(to, from, num_tokens, num_heads, first, room, num_threads);
    on_team(num_threads, ProductsOfHeads::SECTIONS, [&](Team& team) { products.run(team); });
}

EXPORT void weft_search_table(const Table* table, const void* x, int64_t x_row_stride, int num_rows, int num_threads) {
    StartedTeam::finish_last();
    TableSearch search(*table, {static_cast<const Number*>(x), x_row_stride, num_rows}, num_threads);
    on_team(num_threads, TableSearch::SECTIONS, [&](Team& team) { search.run(team); });
    search.write();
}

std::unique_ptr<ExpertProducts> make_products(void* out, const LeftRows& x, const ExpertMatrices& matrices, int64_t num_chosen, int num_threads) {
    static thread_local Buffer<char> scratch;
    void* room = scratch.room(size_t(experts_scratch_size(x.count, num_chosen, matrices)));
    return make_expert_products(static_cast<Number*>(out), x, matrices, num_chosen, room, num_threads);
}

EXPORT void weft_run_experts(void* out, const void* x, int64_t x_row_stride, int num_tokens, const int64_t* experts, const float* weights,
                             int64_t num_chosen, const ExpertMatrices* matrices, int num_threads) {
    const LeftRows left{static_cast<const Number*>(x), x_row_stride, num_tokens};
    const auto products = make_products(out, left, *matrices, num_chosen, num_threads);
    products->set_chosen(experts, weights);
    on_team(num_threads, ExpertProducts::SECTIONS, [&](Team& team) { products->run(team); });
}

EXPORT void weft_choose_and_run_experts(void* out, const void* x, int64_t x_row_stride, int num_tokens, const void* logits,
                                        int64_t logits_row_bytes, const ExpertLayer* layer, int num_threads) {
    const LeftRows left{static_cast<const Number*>(x), x_row_stride, num_tokens};
    const auto products = make_products(out, left, layer->matrices, layer->choice.num_chosen, num_threads);
    on_team(num_threads, ExpertProducts::SECTIONS, [&](Team& team) {
        products->choose(logits, logits_row_bytes, layer->choice, team);
        products->run(team);
    });
}

// Of a program: 0, or why its results are not there, a Meeting.
EXPORT int weft_run(const Operation* operations, int count, const Step* step) {
    StartedTeam::finish_last();  // its scratch memory is this one's too
    Program<Number> program(operations, count, *step);
    on_team(step->num_threads, program.num_sections(), [&](Team& team) { program.run(team); });
    return program.finish();
}

EXPORT int weft_can_start(int num_threads) { return StartedTeam::can_start(num_threads); }

// The same, begun by other threads than this one, which joins them in weft_finish, or before it runs or starts another.
EXPORT StartedProgram* weft_start(const Operation* operations, int count, const Step* step) {
    StartedTeam::finish_last();
    return new StartedProgram(operations, count, *step);
}

EXPORT int weft_finish(StartedProgram* started) {
    const int meeting = started->finish();
    if (started->has_ended()) delete started;  // else it was another thread that began it, and ends it
    return meeting;
}

#else

EXPORT int weft_has_programs(void) { return 0; }

#endif

#ifdef WEFT_HAS_ALL_REDUCE

EXPORT int64_t weft_rank_bytes(void) { return RANK_BYTES; }

// A Meeting. Ranks call it in the same order, and none while a program of theirs runs.
#define DEFINE_ALL_REDUCE(NAME, T)                                                                                      \
    EXPORT int weft_all_reduce_##NAME(SharedRanks* ranks, void* x, int64_t count, int num_threads) {                    \
        AllReduce sum(*ranks);                                                                                          \
        const int num_sections = int(AllReduce::num_chunks(count * int64_t(sizeof(T)))) * AllReduce::SECTIONS;          \
        on_team(threads_for(count, num_threads), num_sections, [&](Team& team) {                                        \
            int64_t num_done = 0;                                                                                       \
            sum.run(static_cast<T*>(x), count, num_done, team);                                                         \
        });                                                                                                             \
        return int(sum.meeting());                                                                                      \
    }

FOR_EACH_TYPE(DEFINE_ALL_REDUCE)

#else

EXPORT int64_t weft_rank_bytes(void) { return 0; }

#endif

#ifdef WEFT_HAS_SCREEN

EXPORT int weft_most_screened_rows(void) { return most_screened_rows(); }
EXPORT int weft_most_sifted_rows(void) { return most_sifted_rows(); }

EXPORT void weft_make_screen(void* screen, const void* weight, int64_t num_out, int num_in, int num_threads) {
    on_team(num_threads, 1, [=](Team& team) {
        make_screen(Screen(screen, num_out, num_in), static_cast<const Number*>(weight), num_out, num_in, team);
    });
}

// Of the outputs in float32, as edited, those that may be among the `numbers` largest of their rows, each with its row's noise; -inf in place
// of others.
EXPORT void weft_sift_table(const Table* table, float* out, const int32_t* numbers, const void* x, int64_t x_row_stride, int num_rows,
                            int num_threads) {
    StartedTeam::finish_last();
    const PackedMatrix packed{table->values, nullptr, table->num_out, table->num_in};
    ScreenedSearch search({static_cast<const Number*>(x), x_row_stride, num_rows}, packed,
                          Screen(table->screen, table->num_out, table->num_in), table->noise, table->edits, numbers);
    on_team(num_threads, SIFT_SECTIONS, [&](Team& team) { search.run(Sifted{out, table->num_out}, team); });
}

#else

EXPORT int weft_most_screened_rows(void) { return 0; }
EXPORT int weft_most_sifted_rows(void) { return 0; }

#endif

#ifdef WEFT_HAS_INT8

EXPORT int weft_has_int8(void) { return 1; }

template <class Result, class T>
void multiply_int8(const Result& result, const T* x, int64_t x_row_stride, int num_rows, const int8::Matrix<T>& matrix,
                   int num_threads) {
    static thread_local int8::Scratch scratch;
    const int8::Left left = scratch.room(num_rows, matrix.num_in);
    on_team(num_threads, int8::MULTIPLY_SECTIONS, [&](Team& team) {
        int8::quantize(left, x, x_row_stride, matrix.num_in, team);
        int8::multiply<false>(result, left, matrix, team);
    });
}

EXPORT void weft_pack_int8(void* packed, int64_t num_out, int num_in, const void* weight, int64_t first, int64_t count,
                           int num_threads) {
    const int8::Matrix<Number> matrix(packed, nullptr, num_out, num_in);
    on_team(num_threads, 1, [=](Team& team) {
        int8::pack_matrix(matrix, static_cast<const Number*>(weight), first, count, team);
    });
}

EXPORT void weft_multiply_int8(void* out, const void* x, int64_t x_row_stride, int num_rows, const void* packed,
                               const void* bias, int64_t num_out, int num_in, int num_threads) {
    const int8::Matrix<Number> matrix(packed, bias, num_out, num_in);
    multiply_int8(Target<Number>{static_cast<Number*>(out), num_out}, static_cast<const Number*>(x), x_row_stride, num_rows,
                  matrix, num_threads);
}

EXPORT void weft_largest_int8(float* values, int64_t* indices, const void* x, int64_t x_row_stride, int num_rows,
                              const void* packed, const void* bias, int64_t num_out, int num_in, const Noise* noise,
                              int64_t first_token, int num_threads) {
    const int8::Matrix<Number> matrix(packed, bias, num_out, num_in);
    const auto multiply = [&](const auto& searched) {
        multiply_int8(searched, static_cast<const Number*>(x), x_row_stride, num_rows, matrix, num_threads);
    };
    find_largest<Number>(values, indices, num_rows, num_out, multiply, RowNoise{noise, first_token});
}

#else

EXPORT int weft_has_int8(void) { return 0; }

#endif

#ifdef __linux__
EXPORT void weft_take_when_idle(void* first, size_t size, size_t page) { take_when_idle(static_cast<char*>(first), size, page); }
#endif
