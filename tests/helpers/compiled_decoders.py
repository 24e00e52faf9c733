"""Small random models on the compiled kernels of a CPU, whose layers are one call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.checkpoint import load_decoder
from parallel.decoder import Decoder
from parallel.errors import DeviceError
from parallel.kernels.base import AttentionMeta, LayerCache, RunLayers
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.native.build import find_compiler
from parallel.kernels.native.program import CompiledLayers
from parallel.mesh import Axis, Mesh
from parallel.random_model import write_random_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}
LATENTS: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
GROUPED_LATENTS = LATENTS | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 160,
    "topk_method": "noaux_tc",
    "n_routed_experts": 40,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
}
COMPILED = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "mistral": {"model_type": "mistral", "sliding_window": 40},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "gelu-erf": {"hidden_act": "gelu"},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_head": 2, "n_layer": 3, "n_positions": 1024},
    "gpt-neox": {"model_type": "gpt_neox", "num_attention_heads": 2, "rotary_pct": 0.5},
    "opt": {"model_type": "opt", "ffn_dim": 352, "num_attention_heads": 2},
    "bloom": {"model_type": "bloom", "num_attention_heads": 2},
    "cohere": {"model_type": "cohere", "num_attention_heads": 2, "use_qk_norm": True},
    "olmo2": {"model_type": "olmo2", "num_attention_heads": 2},
    "granite": {"model_type": "granite", "residual_multiplier": 0.22},
    "tied": {"tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 48,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 160,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "deepseek-v2": LATENTS,
    "deepseek-v3": GROUPED_LATENTS,
    "mpt": {"model_type": "mpt", "d_model": 128, "n_heads": 2, "n_layers": 3, "attn_config": {"clip_qkv": 0.8}},
    "long-sums": {"hidden_size": 1408, "head_dim": 32, "intermediate_size": 2848, "num_hidden_layers": 1},
}
STEPS = [[(200, 200), (33, 300), (2, 18)], [(1, 301), (1, 19), (1, 700)], [(1, 5), (64, 64)], [(1, 1)], [(90, 600)]]
"""(query, context) of the sequences of each step."""


class EagerKernels(NativeCpuKernels):
    """The same kernels, one call at a time."""

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        return run


def load(
    folder: Path,
    config: dict[str, Any],
    kernels: NativeCpuKernels,
    *,
    mesh: Mesh | None = None,
    int8_linears: bool = False,
    int8_cache: bool = False,
) -> Decoder:
    """A random model of these kernels' dtype, written where there is none yet."""
    assert kernels._programs is not None, "build"
    if not folder.exists():
        write_random_model(folder, config, 0, kernels._programs.dtype)
    return load_decoder(
        folder,
        mesh=mesh or Mesh.single(),
        device=CPU,
        dtype=kernels._programs.dtype,
        kernels=kernels,
        int8_linears=int8_linears,
        int8_cache=int8_cache,
    )


def build(kind: type[NativeCpuKernels] = NativeCpuKernels, dtype: torch.dtype = torch.bfloat16) -> NativeCpuKernels:
    try:
        find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    kernels = kind.build(dtype)
    if kernels._programs is None:
        pytest.skip("this CPU has no products of pairs")
    return kernels


def filled_caches(decoder: Decoder, num_blocks: int) -> list[LayerCache]:
    generator = torch.Generator().manual_seed(1)
    size = num_blocks * BLOCK_SIZE * decoder.cache_entry.num_elements
    if decoder.cache_entry.dtype is torch.int8:
        memories = [torch.zeros(size, dtype=torch.int8) for _ in range(decoder.num_local_layers)]
    else:
        memories = [torch.randn(size, generator=generator).to(decoder.dtype) for _ in range(decoder.num_local_layers)]
    return [decoder.cache_entry.lay_out(memory, BLOCK_SIZE) for memory in memories]


def run(
    decoder: Decoder,
    caches: list[LayerCache],
    meta: AttentionMeta,
    token_ids: Tensor | None = None,
    rows_S: Tensor | None = None,
) -> Tensor:
    """The hidden states of a step; tokens are a function of their position."""
    positions = positions_of(meta)
    token_ids = positions * 7 % 512 if token_ids is None else token_ids
    return decoder(token_ids, positions, caches, [meta] * decoder.num_local_layers, rows_S).clone()


def positions_of(meta: AttentionMeta) -> Tensor:
    starts, contexts = meta.query_starts_host, meta.context_lens_host
    ranges = [torch.arange(end - (starts[s + 1] - starts[s]), end) for s, end in enumerate(contexts)]
    return torch.cat(ranges)


def compiled(decoder: Decoder) -> CompiledLayers:
    layers = decoder._run
    assert isinstance(layers, CompiledLayers)
    return layers


def has_dot_products(kernels: NativeCpuKernels, *, is_int8: bool = False) -> bool:
    assert kernels._programs is not None, "build"
    return kernels._programs.has_dot_products(64, is_int8)
