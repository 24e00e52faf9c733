"""The choice of tokens on a CPU, by the compiled kernels (native/sampling.h, native/draws.h)."""

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.native.build import build_library
from parallel.kernels.native.library import load_draws, load_largest
from parallel.kernels.sampling import NOISE, ChooseTokens, Draws

_DRAW = np.dtype([("noise", NOISE), ("limit", np.float32), ("top_k", np.float64), ("top_p", np.float64)])
"""`Draw` of draws.h."""


def make_native_choice() -> ChooseTokens:
    """Compile where needed, and load. On torch's threads. Raises DeviceError when this machine cannot."""
    library, num_threads = build_library(), torch.get_num_threads()
    find_largest, draw = load_largest(library), load_draws(library)

    def choose(logits_SV: Tensor, draws: Draws | None) -> Tensor:
        num_rows, vocab_size = logits_SV.shape
        is_known = logits_SV.dtype in find_largest if draws is None else logits_SV.dtype is torch.float32
        logits = logits_SV if is_known else logits_SV.float()
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        rows = token_ids.data_ptr(), logits.data_ptr(), logits.stride(0), num_rows, vocab_size
        if draws is None:
            find_largest[logits.dtype](*rows, num_threads)
        else:
            settings = _settings(draws)
            draw(*rows, settings.ctypes.data, num_threads)
        return token_ids

    return choose


def _settings(draws: Draws) -> np.typing.NDArray[np.void]:
    settings = np.empty(len(draws.noise), _DRAW)
    with np.errstate(divide="ignore"):
        settings["limit"] = -np.log(draws.min_p)
    settings["noise"], settings["top_k"], settings["top_p"] = draws.noise, draws.top_k, draws.top_p
    return settings
