"""The choice of tokens on a CPU: the largest logits by the compiled kernels (native/), draws in plain torch."""

from functools import partial

import torch
from torch import Tensor

from parallel.kernels.native.build import build_library
from parallel.kernels.native.library import load_largest
from parallel.kernels.sampling import ChooseTokens, choose_in_torch


def make_native_choice() -> ChooseTokens:
    """Compile where needed, and load. On torch's threads. Raises DeviceError when this machine cannot."""
    functions, num_threads = load_largest(build_library()), torch.get_num_threads()

    def largest(logits_SV: Tensor) -> Tensor:
        num_rows, vocab_size = logits_SV.shape
        logits = logits_SV if logits_SV.dtype in functions else logits_SV.float()
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        functions[logits.dtype](
            token_ids.data_ptr(), logits.data_ptr(), logits.stride(0), num_rows, vocab_size, num_threads
        )
        return token_ids

    return partial(choose_in_torch, largest=largest)
