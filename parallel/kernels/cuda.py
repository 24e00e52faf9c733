"""The operations of the model on CUDA: the reference's, but for those that would make the host wait for the device."""

from parallel.kernels.base import ExpertWeights, PackedExperts
from parallel.kernels.grouped_experts import GroupedExperts, GroupedLinear, is_fast_in_torch, torch_grouped_linear
from parallel.kernels.reference import ReferenceKernels


class CudaKernels(ReferenceKernels):
    """`Kernels` for a GPU. Its experts were checked on a CPU, not yet on a GPU (tests/gpu/test_experts.py)."""

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.pack_experts`."""
        return GroupedExperts(weights, _choose_grouped_linear(weights))


def _choose_grouped_linear(weights: ExpertWeights) -> GroupedLinear:
    if is_fast_in_torch(weights.into_XJE) and is_fast_in_torch(weights.down_XEI):
        return torch_grouped_linear
    from parallel.kernels.triton_grouped_linear import triton_grouped_linear  # comes with torch where there is CUDA

    return triton_grouped_linear
