"""What a model must read and compute, whoever runs it: the least bytes and operations for some work. Pure arithmetic.

Weights are read once a step, the embedding's rows not counted; of experts, those that so many tokens choose when all
are equally likely. Of keys and values each computed token reads what it sees; a prompt reads what it sees once.
Operations are those of matrix products and of attention.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.load.records import Usage
from parallel.decoder import Decoder
from parallel.description import DecoderDescription
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Mesh

_SPECIAL = ("embedding.weight", "positions.weight", "head.weight")
"""Rows are looked up in the first two; the head, or the first in its place, is read whole."""
_NEVER_INT8 = (".experts.", ".router.", ".shared_gate.", ".k_up.", ".v_up.")
"""Matrices that stay in the dtype of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine did."""

    step_tokens: tuple[int, ...]
    """Tokens through the model, in each step."""
    requests: tuple[Usage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """One model in one dtype."""

    num_parameters: int
    always_bytes: int
    """Of weights that every step reads."""
    expert_bytes: int
    matrix_elements: int
    """Of weights that every token is multiplied with."""
    expert_elements: int
    head_elements: int
    """Of the head, which only sampled tokens pass."""
    expert_share: float
    """Experts of each token, over all of them."""
    windows: tuple[int | None, ...]
    """Of each layer: how many tokens it sees; None: all."""
    kv_bytes: int
    """Of one token in one layer."""
    attention_flops: int
    """Of one token that sees one other, in one layer."""

    @classmethod
    def of(
        cls,
        description: DecoderDescription,
        dtype: torch.dtype,
        *,
        int8_linears: bool = False,
        int8_cache: bool = False,
    ) -> "ModelCost":
        """Counted from what the decoder would load. Raises ModelError when it cannot be built."""
        linear_bytes = 1 if int8_linears else dtype.itemsize
        decoder = Decoder(
            description,
            mesh=Mesh.single(),
            device=torch.device("meta"),
            dtype=dtype,
            kernels=ReferenceKernels(),
            int8_cache=int8_cache,
        )
        body, experts, others = Counter[bool](), Counter[bool](), Counter[str]()  # elements; bools: of a matrix
        num_linear = 0
        for parameter in decoder.sharded_parameters():
            source, is_matrix = parameter.pieces[0].source, parameter.tensor.dim() > 1
            size = sum(math.prod(piece.full_shape) for piece in parameter.pieces)  # whole tensors: there is one rank
            if source in _SPECIAL:
                others[source] += size
            else:
                (experts if ".experts." in source else body)[is_matrix] += size
                if is_matrix and not any(part in source for part in _NEVER_INT8):
                    num_linear += size
        head = others["embedding.weight" if description.tie_embeddings else "head.weight"]
        moe = description.moe
        return cls(
            num_parameters=body.total() + experts.total() + others.total(),
            always_bytes=(body.total() - num_linear) * dtype.itemsize + (num_linear + head) * linear_bytes,
            expert_bytes=experts.total() * dtype.itemsize,
            matrix_elements=body[True],
            expert_elements=experts[True],
            head_elements=head,
            expert_share=0.0 if moe is None else moe.num_chosen / moe.num_experts,
            windows=description.sliding_windows,
            kv_bytes=decoder.cache_entry.num_elements * decoder.cache_entry.dtype.itemsize,
            attention_flops=4 * description.num_heads * description.head_dim,
        )

    def bytes_read(self, work: Work) -> float:
        """The least that had to be read from memory."""
        experts = sum(1 - (1 - self.expert_share) ** num_tokens for num_tokens in work.step_tokens)
        keys = sum(self._seen_once(usage) for usage in work.requests)
        return len(work.step_tokens) * self.always_bytes + experts * self.expert_bytes + keys * self.kv_bytes

    def flops(self, work: Work) -> float:
        """Multiplications and additions, each counted."""
        num_computed = sum(
            usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1 for usage in work.requests
        )
        num_sampled = sum(usage.completion_tokens for usage in work.requests)
        per_token = 2 * (self.matrix_elements + self.expert_elements * self.expert_share)
        seen = sum(self._seen(usage) for usage in work.requests)
        return num_computed * per_token + 2 * num_sampled * self.head_elements + seen * self.attention_flops

    def decode_bytes(self, num_seqs: int, num_steps: float, seen: Sequence[int]) -> float:
        """The least that steps read in which so many sequences decode; `seen` by each of their tokens."""
        experts = (1 - (1 - self.expert_share) ** num_seqs) * self.expert_bytes
        return num_steps * (self.always_bytes + experts) + self._keys_seen(seen) * self.kv_bytes

    def decode_flops(self, seen: Sequence[int]) -> float:
        """Multiplications and additions of tokens that are decoded, and see so many each."""
        per_token = 2 * (self.matrix_elements + self.expert_elements * self.expert_share + self.head_elements)
        return len(seen) * per_token + self._keys_seen(seen) * self.attention_flops

    def _keys_seen(self, seen: Sequence[int]) -> int:
        """Over all layers."""
        return sum(
            num_layers * sum(num if window is None else min(num, window) for num in seen)
            for window, num_layers in self._kinds()
        )

    def _seen_once(self, usage: Usage) -> int:
        """Keys read, over all layers: by the prompt once, by each further token anew."""
        return sum(
            num_layers * (usage.prompt_tokens + _sum_seen(usage.prompt_tokens, _last(usage), window))
            for window, num_layers in self._kinds()
        )

    def _seen(self, usage: Usage) -> int:
        """Keys that each computed token sees, over all layers."""
        return sum(
            num_layers * _sum_seen(usage.cached_tokens, _last(usage), window) for window, num_layers in self._kinds()
        )

    def _kinds(self) -> Iterator[tuple[int | None, int]]:
        for window in set(self.windows):
            yield window, self.windows.count(window)


def _last(usage: Usage) -> int:
    """Tokens computed at the end; the last one generated is not."""
    return usage.prompt_tokens + usage.completion_tokens - 1


def _sum_seen(start: int, stop: int, window: int | None) -> int:
    """Of the tokens after the first `start` up to number `stop`: how many tokens each sees, itself included."""
    full = stop if window is None else min(stop, window)
    growing = (full * (full + 1) - start * (start + 1)) // 2 if full > start else 0
    return growing + (0 if window is None else window * max(0, stop - max(start, window)))
