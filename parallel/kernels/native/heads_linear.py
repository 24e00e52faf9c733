"""A matrix for each head, laid out for the compiled products (products.h): all heads are one call of the library."""

from torch import Tensor

from parallel.host_memory import HugePages
from parallel.kernels.native.library import Programs
from parallel.kernels.native.packed_linear import PANEL
from parallel.kernels.native.tape import Recorder, Tape


def can_pack_heads(weight_NIO: Tensor, programs: Programs) -> bool:
    """Whether the compiled products take these matrices."""
    _, num_in, num_out = weight_NIO.shape
    return weight_NIO.dtype is programs.dtype and num_in % PANEL == 0 and num_out % PANEL == 0


class NativeHeadsLinear:
    """A `HeadsLinear`; matrices whose outputs are rows of memory are laid out where they are."""

    def __init__(
        self, weight_NIO: Tensor, programs: Programs, recorder: Recorder, num_threads: int, *, memory: HugePages
    ) -> None:
        weight_NOI = weight_NIO.transpose(1, 2)
        if not weight_NOI.is_contiguous():
            weight_NOI = memory.empty(weight_NOI.numel(), weight_NOI.dtype).view(weight_NOI.shape).copy_(weight_NOI)
        self._packed_NOI = weight_NOI
        self._multiply_heads = programs.multiply_heads
        self._recorder = recorder
        self._num_threads = num_threads
        address, num_heads, num_out, num_in = weight_NOI.data_ptr(), *weight_NOI.shape
        programs.pack_matrix(address, address, num_heads * num_out, num_in, num_threads)

    def __call__(self, x_TNI: Tensor) -> Tensor:
        """See `HeadsLinear`."""
        x_TNI = x_TNI if x_TNI.stride(2) == 1 else x_TNI.contiguous()
        num_heads, num_out, num_in = self._packed_NOI.shape
        out_TNO = x_TNI.new_empty(len(x_TNI), num_heads, num_out)
        self._multiply_heads(
            *(out_TNO.data_ptr(), *out_TNO.stride()[:2], x_TNI.data_ptr(), *x_TNI.stride()[:2]),
            *(len(x_TNI), num_heads, self._packed_NOI.data_ptr(), num_out, num_in, self._num_threads),
        )
        self._recorder.note(Tape.multiply_heads, out_TNO, x_TNI, self._packed_NOI)
        return out_TNO
