// Attention by itself, so that it is compiled while all the rest is.

#include "attention.h"
#include "exports.h"

namespace weft {

void attend(const Target<Number>& out, const Number* q, int64_t q_token_stride, const void* keys, const void* values,
            const StepLayout& layout, const LayerParams& params, AttentionPlan& plan, Team& team) {
    const auto run = [&](const auto* keys, const auto* values) {
        using Cached = std::decay_t<decltype(*keys)>;
        PagedAttention<Cached>({out, q, q_token_stride, keys, values}, layout, params, plan).run(team);
    };
    if (layout.is_int8) return run(static_cast<const int8_t*>(keys), static_cast<const int8_t*>(values));
    run(static_cast<const Number*>(keys), static_cast<const Number*>(values));
}

}  // namespace weft

using namespace weft;

EXPORT void weft_attention(void* out, const void* q, int64_t q_token_stride, const void* keys, const void* values,
                           const StepLayout* layout, const LayerParams* params) {
    AttentionPlan plan(*layout, params->window, packs_chunks(*layout));
    const Target<Number> to{static_cast<Number*>(out), int64_t(layout->num_heads) * layout->head_dim};
    on_team(layout->num_threads, 1, [&](Team& team) {
        attend(to, static_cast<const Number*>(q), q_token_stride, keys, values, *layout, *params, plan, team);
    });
}

EXPORT int weft_has_dot_products(int head_dim, int is_int8) { return has_dot_products(head_dim, is_int8); }
