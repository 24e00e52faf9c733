"""The least bytes that a rank's model reads in a step: its weights, and the keys and values that its tokens see.

What bench/load/model_cost.py says of a whole run, of one step: a sequence's keys are read once, however many of its
tokens are computed in it. Where a copy of the head in 8 bits tells which outputs may be the largest, that is read and
not the head; what is then looked at again depends on the values, and is not counted. Host arithmetic over what a step
has at hand, and little of it: on a CPU the step waits.
"""

from collections import Counter

from parallel.decoder import Decoder
from parallel.kernels.base import AttentionMeta


class ModelReads:
    """Counts the bytes that one rank reads."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        weights = decoder.weight_sizes
        self._always_bytes: float = weights.always_bytes
        self._experts = weights if weights.expert_bytes else None
        windows = Counter(decoder.description.sliding_windows[i] for i in decoder.layer_indices)
        key_bytes = decoder.cache_entry.num_elements * decoder.cache_entry.dtype.itemsize
        self._full_bytes = windows.pop(None, 0) * key_bytes
        """Bytes of one token in the cache, over the layers that see everything."""
        self._windows = [
            (window, num_layers * key_bytes) for window, num_layers in windows.items() if window is not None
        ]

    def step_bytes(self, meta: AttentionMeta, *, num_searched: int) -> float:
        """Return the bytes that a step reads. `meta` is that of any group of layers; of `num_searched` tokens only the
        largest logit is asked.
        """
        step_bytes = self._always_bytes + self._full_bytes * sum(meta.context_lens_host)
        if num_searched:
            step_bytes -= self._decoder.spared_bytes(num_searched)
        if self._experts is not None:
            step_bytes += self._experts.expert_bytes_read(meta.query_starts_host[-1])
        for window, num_bytes in self._windows:
            step_bytes += num_bytes * _num_seen(meta, window)
        return step_bytes


def _num_seen(meta: AttentionMeta, window: int) -> int:
    """Tokens that at least one of each sequence's own tokens sees, over all sequences."""
    lengths = meta.context_lens_host
    if meta.max_context_len <= window:
        return sum(lengths)
    first = meta.num_decodes  # the first with more tokens than one
    decodes = [length if length < window else window for length in lengths[:first]]
    starts = meta.query_starts_host
    chunks = [min(lengths[i], window - 1 + starts[i + 1] - starts[i]) for i in range(first, len(lengths))]
    return sum(decodes) + sum(chunks)
