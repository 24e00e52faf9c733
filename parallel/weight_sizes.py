"""How large the weights of one rank are, and the least of them that a step reads. Pure arithmetic over parameters.

Weights are read once a step, the embedding's rows not counted; of experts, those that so many tokens choose when all
are equally likely.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from parallel.description import DecoderDescription
from parallel.shard import ShardedParameter

_SPECIAL = ("embedding.weight", "positions.weight", "head.weight")
"""Rows are looked up in the first two; the head, or the first in its place, is read whole."""
_NEVER_INT8 = (".router.", ".shared_gate.", ".k_up.", ".v_up.")
"""Matrices that stay in the dtype of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """The weights of one rank in one dtype."""

    num_parameters: int
    always_bytes: int
    """Bytes of weights that every step reads."""
    expert_bytes: int
    matrix_elements: int
    """Elements of weights that every token is multiplied with."""
    expert_elements: int
    head_elements: int
    """Elements of the head, which only sampled tokens pass; 0 where the rank has none."""
    expert_share: float
    """Share of all experts that each token passes."""

    @classmethod
    def of(
        cls,
        parameters: Iterable[ShardedParameter],
        description: DecoderDescription,
        dtype: torch.dtype,
        *,
        has_head: bool,
        int8_linears: bool,
        int8_experts: bool,
    ) -> "WeightSizes":
        """Counted from the parameters of a rank of this model; `has_head`: it is on the last stage."""
        body, experts, others = Counter[bool](), Counter[bool](), Counter[str]()  # elements; bools: of a matrix
        num_linear = 0
        for parameter in parameters:
            source, is_matrix = parameter.pieces[0].source, parameter.tensor.dim() > 1
            size = parameter.tensor.numel()
            if source in _SPECIAL:
                others[source] += size
            else:
                is_expert = ".experts." in source
                (experts if is_expert else body)[is_matrix] += size
                if is_matrix and not is_expert and not any(part in source for part in _NEVER_INT8):
                    num_linear += size
        head = others["embedding.weight" if description.tie_embeddings else "head.weight"] if has_head else 0
        linear_bytes = 1 if int8_linears else dtype.itemsize
        moe = description.moe
        return cls(
            num_parameters=body.total() + experts.total() + others.total(),
            always_bytes=(body.total() - num_linear) * dtype.itemsize + (num_linear + head) * linear_bytes,
            expert_bytes=experts[True] * (1 if int8_experts else dtype.itemsize) + experts[False] * dtype.itemsize,
            matrix_elements=body[True],
            expert_elements=experts[True],
            head_elements=head,
            expert_share=0.0 if moe is None else moe.num_chosen / moe.num_experts,
        )

    def bytes_read(self, num_tokens: int) -> float:
        """Return the least bytes of weights that a step of `num_tokens` reads."""
        return self.always_bytes + self.expert_bytes_read(num_tokens)

    def expert_bytes_read(self, num_tokens: int) -> float:
        """Return the bytes of experts that a step of `num_tokens` reads, by expectation."""
        return self.expert_bytes * (1 - (1 - self.expert_share) ** num_tokens)
