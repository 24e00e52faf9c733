"""What the compiled kernels read and write in memory, beside tensors: the structures of the C++ headers, in ctypes."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from parallel.description import Activation, RouterScore
from parallel.kernels.host_arrays import Int32Array
from parallel.kernels.sampling import NOISE, Draws, Edits, NoiseArray

ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH, Activation.GELU, Activation.RELU)
"""In the order of `Activation` of activations.h."""

EXPERT_SCORES = (RouterScore.SOFTMAX, RouterScore.SOFTMAX_OF_CHOSEN, RouterScore.SIGMOID)
"""In the order of `ExpertScore` of experts.h."""


class LayerParams(ctypes.Structure):
    """What is constant for the attention of a layer; `LayerParams` of attention_plan.h."""

    _fields_ = (
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("own_column", c_int32),
        ("key_bias", c_void_p),
        ("key_bias_stride", c_int64),
        ("sinks", c_void_p),
    )


class StepLayout(ctypes.Structure):
    """What is constant for the attention of a step; `StepLayout` of attention_plan.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_sequences", c_int32),
        ("block_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_threads", c_int32),
        ("is_int8", c_int32),
    )


class Place(ctypes.Structure):
    """An operand: a run of columns of a buffer. This and what follows mirrors program.h."""

    _fields_ = (("buffer", c_int32), ("column", c_int32))


class Kind(IntEnum):
    """Kind of an operation of a program."""

    RMS_NORM = 0
    ROTARY = 1
    GATE = 2
    WRITE_CACHE = 3
    ATTENTION = 4
    MULTIPLY = 5
    MULTIPLY_GATED = 6
    MULTIPLY_INT8 = 7
    MULTIPLY_GATED_INT8 = 8
    EXPERTS = 9
    SCALE = 10
    LAYER_NORM = 11
    ACTIVATE = 12
    ADD = 13
    GATE_ROWS = 14
    CLAMP = 15
    COPY = 16
    MULTIPLY_HEADS = 17
    MULTIPLY_FLOAT = 18
    ALL_REDUCE = 19
    SUM_SQUARES = 20
    NORM_PART = 21


class Operation(ctypes.Structure):
    """An operation of a program; what the fields mean for each kind is said in program.h."""

    _fields_ = (
        ("kind", c_int32),
        ("index", c_int32),
        ("input", Place),
        ("second", Place),
        ("output", Place),
        ("num_heads", c_int32),
        ("size", c_int32),
        ("flag", c_int32),
        ("eps", c_float),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("weight_stride", c_int64),
        ("in_head_stride", c_int32),
        ("out_head_stride", c_int32),
        ("num_in", c_int32),
        ("num_out", c_int32),
        ("params", c_void_p),
    )


class LayerStep(ctypes.Structure):
    """What a step has for one layer."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("group", c_void_p))


class GroupStep(ctypes.Structure):
    """What a step has for the layers that have a block table in common."""

    _fields_ = (("layout", StepLayout), ("slots", c_void_p))


class AnglesStep(ctypes.Structure):
    """What a step has for one kind of rotation."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("half", c_int64), ("positions", c_void_p))


class Table(ctypes.Structure):
    """A matrix as packed, its copy in 8 bits, what is searched and where that goes; `Table` of table_search.h."""

    _fields_ = (
        ("values", c_void_p),
        ("screen", c_void_p),
        ("num_out", c_int64),
        ("num_in", c_int32),
        ("largest", c_void_p),
        ("indices", c_void_p),
        ("noise", c_void_p),
        ("first_token", c_int64),
        ("edit_starts", c_void_p),
        ("edit_token_ids", c_void_p),
        ("edit_factors", c_void_p),
        ("edit_offsets", c_void_p),
        ("numbers", c_void_p),
        ("draws", c_void_p),
    )

    def ask(
        self,
        noise: NoiseArray | None,
        edits: Edits | None,
        first_token: int = 0,
        *,
        numbers: Int32Array | None = None,
        draws: npt.NDArray[np.void] | None = None,
    ) -> None:
        """Set what is searched for. The arrays live until then; `draws` are of DRAW, the edits lack no token."""
        self.first_token = first_token
        arrays = {f"edit_{name}": getattr(edits, name, None) for name in ("starts", "token_ids", "factors", "offsets")}
        for name, array in (arrays | {"noise": noise, "numbers": numbers, "draws": draws}).items():
            setattr(self, name, None if array is None else array.ctypes.data)


DRAW = np.dtype([("noise", NOISE), ("limit", np.float32), ("top_k", np.float64), ("top_p", np.float64)])
"""`Draw` of draws.h."""


def to_draw_array(draws: Draws) -> npt.NDArray[np.void]:
    """[S] of DRAW."""
    array = np.empty(len(draws.noise), DRAW)
    with np.errstate(divide="ignore"):
        array["limit"] = -np.log(draws.min_p)
    array["noise"], array["top_k"], array["top_p"] = draws.noise, draws.top_k, draws.top_p
    return array


class Embedding(ctypes.Structure):
    """A table, and which rows of it a step begins with."""

    _fields_ = (("values", c_void_p), ("num_rows", c_int64), ("is_packed", c_int32), ("token_ids", c_void_p))


class Step(ctypes.Structure):
    """What a program does not know before."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("buffers", c_void_p),
        ("widths", c_void_p),
        ("layers", c_void_p),
        ("angles", c_void_p),
        ("num_threads", c_int32),
        ("searched", c_int32),
        ("table", c_void_p),
        ("embedding", c_void_p),
        ("kept", c_void_p),
        ("num_kept", c_int64),
    )


class ExpertMatrices(ctypes.Structure):
    """The experts of a layer; `ExpertMatrices` of experts.h."""

    _fields_ = (
        ("into", c_void_p),
        ("into_bias", c_void_p),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("num_experts", c_int64),
        ("hidden_size", c_int32),
        ("inner_size", c_int32),
        ("clamp_alpha", c_float),
        ("clamp_limit", c_float),
        ("is_int8", c_int32),
    )


class ExpertChoice(ctypes.Structure):
    """How a router chooses; `ExpertChoice` of experts.h, where the score is the index in `EXPERT_SCORES`."""

    _fields_ = (
        ("num_chosen", c_int32),
        ("score", c_int32),
        ("is_normalized", c_int32),
        ("multiplier", c_float),
        ("num_groups", c_int32),
        ("num_chosen_groups", c_int32),
        ("bias", c_void_p),
        ("are_logits_float", c_int32),
    )


class ExpertLayer(ctypes.Structure):
    """Experts and how they are chosen."""

    _fields_ = (("matrices", ExpertMatrices), ("choice", ExpertChoice))


class SharedRanks(ctypes.Structure):
    """One rank's view of the memory in which ranks add up; `SharedRanks` of all_reduce.h."""

    _fields_ = (
        ("memory", c_void_p),
        ("sockets", c_void_p),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("timeout_us", c_int64),
        ("num_put", c_uint32),
        ("waited_ns", c_int64),
    )
