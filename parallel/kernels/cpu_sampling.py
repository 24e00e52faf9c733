"""The choice of tokens on a CPU, by the compiled kernels (native/sampling.h, native/draws.h, native/ranking.h)."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.host_arrays import Int64Array
from parallel.kernels.native.build import build_library
from parallel.kernels.native.library import load_draws, load_edits, load_largest, load_ranking
from parallel.kernels.native.packed_linear import in_rows
from parallel.kernels.native.structures import DRAW, to_draw_array
from parallel.kernels.sampling import Draws, Edits, NoiseArray, TokenChoice, edit_in_torch


def make_native_choice(library: Path | None = None) -> TokenChoice:
    """Return the choice of a library, else of this machine's, compiled if need be. On torch's threads. DeviceError."""
    library, num_threads = library or build_library(), torch.get_num_threads()
    find_largest, draw, rank_tokens = load_largest(library), load_draws(library), load_ranking(library)
    edit_logits = load_edits(library)

    def choose(logits_SV: Tensor, draws: Draws | None) -> Tensor:
        if draws is not None:
            return draw_rows(logits_SV, to_draw_array(draws), 0)[1]
        logits = in_rows(logits_SV if logits_SV.dtype in find_largest else logits_SV.float())
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        rows = token_ids.data_ptr(), logits.data_ptr(), logits.stride(0), *logits.shape
        find_largest[logits.dtype](*rows, num_threads)
        return token_ids

    def find(logits_SV: Tensor, noise: NoiseArray | None, first_token: int) -> tuple[Tensor, Tensor]:
        settings = np.zeros(len(logits_SV), DRAW)
        if noise is not None:
            settings["noise"], settings["limit"], settings["top_p"] = noise, np.inf, 1
        return draw_rows(logits_SV, settings, first_token)

    def draw_rows(logits_SV: Tensor, settings: np.typing.NDArray[np.void], first_token: int) -> tuple[Tensor, Tensor]:
        logits = in_rows(logits_SV.float())
        token_ids, scores = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        rows = token_ids.data_ptr(), scores.data_ptr(), logits.data_ptr(), logits.stride(0), *logits.shape
        draw(*rows, settings.ctypes.data, first_token, num_threads)
        return scores, token_ids

    def rank(logits_SV: Tensor, rows: Int64Array, number: int) -> tuple[Tensor, Tensor, Tensor]:
        logits, rows = in_rows(logits_SV), np.ascontiguousarray(rows)
        totals, values = torch.empty(len(rows)), torch.empty(len(rows), number)
        token_ids = torch.empty(len(rows), number, dtype=torch.int64)
        ranked = totals.data_ptr(), values.data_ptr(), token_ids.data_ptr()
        sizes = len(rows), logits.shape[1], number
        rank_tokens(*ranked, logits.data_ptr(), logits.stride(0), rows.ctypes.data, *sizes, num_threads)
        return totals, values, token_ids

    def edit(logits_SV: Tensor, edits: Edits, first_token: int) -> None:
        if edits.last is not None or logits_SV.stride(1) != 1:
            edit_in_torch(logits_SV, edits, first_token)
            return
        columns = [column.ctypes.data for column in edits[:4]]
        edit_logits(logits_SV.data_ptr(), logits_SV.stride(0), *logits_SV.shape, *columns, first_token, num_threads)

    return TokenChoice(choose, find, rank, edit)
