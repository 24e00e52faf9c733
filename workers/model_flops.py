"""The operations that a rank's model has to do in a step: multiplications and additions of products and attention.

What bench/load/model_cost.py says of a whole run, of one step. Host arithmetic, as in model_reads.py. Every token
counts in every layer, though some kernels leave out what nobody asks of the last one (`StartedLayers.start`).
"""

from collections import Counter

from parallel.decoder import Decoder
from parallel.kernels.base import AttentionMeta


class ModelFlops:
    """Counts the operations of one rank."""

    def __init__(self, decoder: Decoder) -> None:
        weights, description = decoder.weight_sizes, decoder.description
        self._token_flops = 2 * (weights.matrix_elements + weights.expert_elements * weights.expert_share)
        self._sampled_flops = 2 * weights.head_elements
        windows = Counter(description.sliding_windows[i] for i in decoder.layer_indices)
        key_flops = description.seen_flops / decoder.mesh.tp.size
        self._layers = [(window, num_layers * key_flops) for window, num_layers in windows.items()]
        """The operations of one token that sees one other, over the layers of each window."""

    def step_flops(self, meta: AttentionMeta, *, num_sampled: int) -> float:
        """Return the operations of a step: `meta` is that of any of its groups, and it samples `num_sampled` tokens."""
        step_flops = self._token_flops * meta.query_starts_host[-1] + self._sampled_flops * num_sampled
        for window, flops in self._layers:
            step_flops += flops * _num_seen(meta, window)
        return step_flops


def _num_seen(meta: AttentionMeta, window: int | None) -> int:
    """How many tokens each token sees, itself included, summed over all tokens of the step."""
    lengths, starts, first = meta.context_lens_host, meta.query_starts_host, meta.num_decodes
    if window is None or meta.max_context_len <= window:
        window = meta.max_context_len
        decodes = sum(lengths[:first])
    else:
        decodes = sum(length if length < window else window for length in lengths[:first])
    chunks = (_seen_by_chunk(lengths[i], starts[i + 1] - starts[i], window) for i in range(first, len(lengths)))
    return decodes + sum(chunks)


def _seen_by_chunk(stop: int, num_tokens: int, window: int) -> int:
    """How many tokens the last `num_tokens` before position `stop` see, summed over them."""
    start, full = stop - num_tokens, min(stop, window)
    growing = (full * (full + 1) - start * (start + 1)) // 2 if full > start else 0
    return growing + window * max(0, stop - max(start, window))
