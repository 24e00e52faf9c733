// Attention by itself: it takes as long to compile as all the rest, and does so at the same time.

#include "attention.h"
#include "exports.h"

using namespace weft;

#define DEFINE(NAME, T)                                                                                                 \
    template void weft::attend(const Target<T>&, const T*, int64_t, const void*, const void*, const StepLayout&,        \
                               const LayerParams&, AttentionPlan&, Team&);                                              \
    EXPORT void weft_attention_##NAME(void* out, const void* q, int64_t q_token_stride, const void* keys,               \
                                      const void* values, const StepLayout* layout, const LayerParams* params) {        \
        AttentionPlan plan(*layout, params->window, packs_chunks<T>(*layout));                                          \
        const Target<T> to{static_cast<T*>(out), int64_t(layout->num_heads) * layout->head_dim};                        \
        on_team(layout->num_threads, 1, [&](Team& team) {                                                               \
            attend(to, static_cast<const T*>(q), q_token_stride, keys, values, *layout, *params, plan, team);           \
        });                                                                                                             \
    }                                                                                                                   \
    EXPORT int weft_has_dot_products_##NAME(int head_dim, int is_int8) {                                                \
        return is_int8 ? has_dot_products<T, int8_t>(head_dim) : has_dot_products<T>(head_dim);                         \
    }

FOR_EACH_TYPE(DEFINE)
