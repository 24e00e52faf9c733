"""What a model must read and compute, whoever runs it: the least bytes and operations for some work. Pure arithmetic.

Weights are read as parallel/weight_sizes.py says. Of keys and values each computed token reads what it sees; a prompt
reads what it sees once. Operations are those of matrix products and of attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.load.records import Usage
from parallel.decoder import Decoder
from parallel.description import DecoderDescription
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Mesh
from parallel.weight_sizes import WeightSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine did."""

    step_tokens: tuple[int, ...]
    """Tokens through the model, in each step."""
    requests: tuple[Usage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """One model in one dtype."""

    weights: WeightSizes
    windows: tuple[int | None, ...]
    """How many tokens each layer sees; None: all."""
    kv_bytes: int
    """Bytes of one token's keys and values in one layer."""
    attention_flops: int
    """Operations of one token that sees one other, in one layer."""

    @classmethod
    def of(
        cls,
        description: DecoderDescription,
        dtype: torch.dtype,
        *,
        int8_linears: bool = False,
        int8_cache: bool = False,
        int8_experts: bool = True,
    ) -> "ModelCost":
        """Count what the decoder would load. Raises ModelError when it cannot be built.

        Args:
            int8_experts: with `int8_linears` experts are in 8 bits too, as on a CPU.
        """
        kernels = ReferenceKernels()
        kernels.quantizes_experts = int8_experts
        decoder = Decoder(
            description,
            mesh=Mesh.single(),
            device=torch.device("meta"),
            dtype=dtype,
            kernels=kernels,
            int8_linears=int8_linears,
            int8_cache=int8_cache,
        )
        return cls(
            weights=decoder.weight_sizes,
            windows=description.sliding_windows,
            kv_bytes=decoder.cache_entry.num_elements * decoder.cache_entry.dtype.itemsize,
            attention_flops=description.seen_flops,
        )

    def bytes_read(self, work: Work) -> float:
        """Return the least that had to be read from memory."""
        keys = sum(self._seen_once(usage) for usage in work.requests)
        return sum(self.weights.bytes_read(num) for num in work.step_tokens) + keys * self.kv_bytes

    def flops(self, work: Work) -> float:
        """Return the multiplications and additions, each counted."""
        num_computed = sum(
            usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1 for usage in work.requests
        )
        num_sampled = sum(usage.completion_tokens for usage in work.requests)
        weights = self.weights
        per_token = 2 * (weights.matrix_elements + weights.expert_elements * weights.expert_share)
        seen = sum(self._seen(usage) for usage in work.requests)
        return num_computed * per_token + 2 * num_sampled * weights.head_elements + seen * self.attention_flops

    def decode_bytes(self, num_seqs: int, num_steps: float, seen: Sequence[int]) -> float:
        """Return the least that steps read in which so many sequences decode; `seen` by each of their tokens."""
        return num_steps * self.weights.bytes_read(num_seqs) + self._keys_seen(seen) * self.kv_bytes

    def decode_flops(self, seen: Sequence[int]) -> float:
        """Return the multiplications and additions of tokens that are decoded, and see so many each."""
        weights = self.weights
        active = weights.matrix_elements + weights.expert_elements * weights.expert_share + weights.head_elements
        return len(seen) * 2 * active + self._keys_seen(seen) * self.attention_flops

    def _keys_seen(self, seen: Sequence[int]) -> int:
        """Return the keys that these tokens see, over all layers."""
        return sum(
            num_layers * sum(num if window is None else min(num, window) for num in seen)
            for window, num_layers in self._kinds()
        )

    def _seen_once(self, usage: Usage) -> int:
        """Return the keys read, over all layers: by the prompt once, by each further token anew."""
        return sum(
            num_layers * (usage.prompt_tokens + _sum_seen(usage.prompt_tokens, _last(usage), window))
            for window, num_layers in self._kinds()
        )

    def _seen(self, usage: Usage) -> int:
        """Return the keys that each computed token sees, over all layers."""
        return sum(
            num_layers * _sum_seen(usage.cached_tokens, _last(usage), window) for window, num_layers in self._kinds()
        )

    def _kinds(self) -> Iterator[tuple[int | None, int]]:
        for window in set(self.windows):
            yield window, self.windows.count(window)


def _last(usage: Usage) -> int:
    """Return how many tokens are computed at the end; the last one generated is not."""
    return usage.prompt_tokens + usage.completion_tokens - 1


def _sum_seen(start: int, stop: int, window: int | None) -> int:
    """Sum how many tokens each token sees, itself included, after the first `start` and up to number `stop`."""
    full = stop if window is None else min(stop, window)
    growing = (full * (full + 1) - start * (start + 1)) // 2 if full > start else 0
    return growing + (0 if window is None else window * max(0, stop - max(start, window)))
