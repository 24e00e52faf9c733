"""Layers in compiled pieces: what the layers as they are give, for any number of tokens, and compiled only once.

Most tests run the pieces without inductor, operation by operation: then results are the same bits, and the same models
take a moment. Inductor itself needs g++, and seconds for each kernel.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import anonymous_tokens, engine_over, exact_config, request
from helpers.engines import run as run_engine
from helpers.paged_layout import make_meta
from helpers.tiny_models import tiny_model
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from parallel.checkpoint import load_decoder
from parallel.decoder import Decoder
from parallel.errors import DeviceError
from parallel.kernels.base import AttentionMeta, AttentionParams, Kernels, LayerCache, RunLayers
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cuda_graphs import GraphedLayers, Recording, Result
from parallel.kernels.inductor import InductorKernels
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.select import select_kernels
from parallel.mesh import Axis, Mesh
from parallel.random_model import write_random_model
from workers.config import CacheConfig, SchedulerConfig
from workers.errors import EngineConfigError
from workers.rank import lead_group

REPOSITORY = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
P, NUM_BLOCKS = 16, 40
MODELS = ["llama-bias", "mistral-window", "qwen3", "olmo2", "gemma2", "gptj", "bloom", "gpt_oss", "deepseek_v3"]
STEPS = [[(9, 9), (20, 30)], [(1, 10), (1, 31)], [(1, 32)], [(1, 1), (64, 64), (3, 35)], [(1, 2)]]
"""(query, context) of the sequences of each step."""
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")


def as_it_is(module: GraphModule, _examples: object) -> Callable[..., Any]:
    return module


def traced(inner: Kernels, cache: Path) -> InductorKernels:
    return InductorKernels(inner, CPU, cache, as_it_is)


def load(folder: Path, kernels: Kernels, dtype: torch.dtype = torch.float32, *, int8_linears: bool = False) -> Decoder:
    return load_decoder(folder, mesh=Mesh.single(), device=CPU, dtype=dtype, kernels=kernels, int8_linears=int8_linears)


def new_caches(decoder: Decoder) -> list[LayerCache]:
    entry = decoder.cache_entry
    memory = torch.zeros(decoder.num_local_layers, NUM_BLOCKS * P * entry.num_elements, dtype=entry.dtype)
    return [entry.lay_out(part, P) for part in memory]


def hidden_states(decoder: Decoder, steps: Iterable[Sequence[tuple[int, int]]] = STEPS) -> list[Tensor]:
    """What each step gives, and at last the caches; tokens are a function of their position."""
    caches, results = new_caches(decoder), []
    for spans in steps:
        meta = make_meta(spans, block_size=P, num_blocks=NUM_BLOCKS)
        positions = torch.cat([torch.arange(context - query, context) for query, context in spans])
        with torch.inference_mode():
            results.append(decoder(positions * 7 % 100, positions, caches, [meta] * len(caches)).clone())
    return [*results, *(half for cache in caches for half in cache[:2])]


def same_bits(one: Decoder, other: Decoder) -> bool:
    return all(torch.equal(x, y) for x, y in zip(hidden_states(one), hidden_states(other), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_pieces_and_calls_are_the_layers(name: str, tmp_path: Path) -> None:
    folder = tiny_model(name)
    assert same_bits(load(folder, traced(ReferenceKernels(), tmp_path)), load(folder, ReferenceKernels()))


@pytest.mark.parametrize("int8_linears", [False, True])
def test_products_of_packed_weights_are_calls(int8_linears: bool, tmp_path: Path) -> None:
    write_random_model(tmp_path / "model", CONFIG | {"hidden_size": 512, "intermediate_size": 768}, 0, torch.float32)

    class Packing(ReferenceKernels):
        pack_linear = CpuKernels.pack_linear

    one, other = (
        load(tmp_path / "model", kernels, int8_linears=int8_linears)
        for kernels in (traced(Packing(), tmp_path), Packing())
    )
    assert same_bits(one, other)


def test_layers_of_a_kind_are_one_piece(tmp_path: Path) -> None:
    pieces = []

    def note(module: GraphModule, _examples: object) -> Callable[..., Any]:
        pieces.append(module)
        return module

    decoder = load(tiny_model("llama"), InductorKernels(ReferenceKernels(), CPU, tmp_path, note))
    hidden_states(decoder, [[(5, 5)], [(1, 6)], [(2, 8), (40, 40)], [(1, 9)]])
    assert decoder.num_local_layers == 3
    assert len(pieces) == 2 * 3  # before the first attention, between two, after the last; several tokens, and one


def test_compiled_layers_are_recorded_as_graphs(tmp_path: Path) -> None:
    class Graphed(ReferenceKernels):
        def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
            starts, lengths = meta.query_starts.tolist(), meta.context_lens.tolist()  # a graph has no host lists
            meta = replace(meta, query_starts_host=starts, context_lens_host=lengths)
            return super().attention(q_TNH, cache, meta, params)

        def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
            return GraphedLayers(run, call_again)

    folder = tiny_model("llama")
    graphed = load(folder, traced(Graphed(), tmp_path))
    steps = [[(8, 8)], [(1, 9)], [(1, 10)], [(1, 11), (1, 20)], [(1, 12), (1, 21)]]
    for one, other in zip(
        hidden_states(graphed, steps), hidden_states(load(folder, ReferenceKernels()), steps), strict=True
    ):
        assert torch.equal(one, other)


def call_again(run: Callable[[], Result], memory: object) -> Recording:
    result = run()

    def replay() -> None:
        for to, tensor in zip(result, run(), strict=True):
            to.copy_(tensor)

    return Recording(replay, result, memory)


def test_layers_that_look_at_the_number_of_tokens_are_refused(tmp_path: Path) -> None:
    class Looking(InductorKernels):
        def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
            return super().silu_mul(gate_up_T2I) * (2 if gate_up_T2I.shape[0] < 100 else 1)

    kernels = Looking(ReferenceKernels(), CPU, tmp_path, as_it_is)
    decoder = load(tiny_model("llama"), kernels)
    with pytest.raises(DeviceError, match=r"several tokens.* < 100; allowed: without compile"):
        kernels.compile_ahead(*decoder.layer_inputs(), decoder.num_local_layers)


def test_steps_too_long_to_compile_run_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import parallel.kernels.inductor_layers

    monkeypatch.setattr(parallel.kernels.inductor_layers, "MOST_TOKENS", 10)
    folder = tiny_model("gpt_oss")
    assert same_bits(load(folder, traced(ReferenceKernels(), tmp_path)), load(folder, ReferenceKernels()))


def test_kernels_tell_around_which_others_layers_are_compiled(tmp_path: Path) -> None:
    inner = ReferenceKernels()
    inner.attention_backend = "its own"
    kernels = traced(inner, tmp_path)
    assert (kernels.name, kernels.attention_backend) == ("reference, compiled", "its own")


@pytest.mark.parametrize("name", ["auto", "cpu-native"])
def test_kernels_that_are_compiled_already_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=rf"compile with kernels '{name}' on cpu.*allowed: kernels reference or cpu"):
        select_kernels(CPU, torch.float32, name, compiles=True)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_without_a_compiler_it_is_refused(name: str) -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(DeviceError, match=r"compile on cpu needs a C\+\+ compiler.*allowed here: without compile"),
    ):
        select_kernels(CPU, torch.float32, name, compiles=True)


def test_an_engine_refuses_what_its_kernels_do_not_allow() -> None:
    config = exact_config(tiny_model("llama"), cache=CacheConfig(), scheduler=SchedulerConfig(), compile=True)
    with pytest.raises(EngineConfigError, match="compile with kernels 'auto' on cpu"):
        lead_group(config)


def tokens(folder: Path, *, compiles: bool) -> dict[str, list[int]]:
    """What an engine gives for prompts of several lengths, in batches of changing size."""
    config = exact_config(
        folder,
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8),
        kernels="reference",
        compile=compiles,
    )
    executor = lead_group(config)
    engine = engine_over(executor, config, tokens=anonymous_tokens(), vocab_size=128, max_context=256)
    requests = [request(str(n), range(3, 4 + 9 * n), max_tokens=4 + 5 * n) for n in range(5)]
    outcomes = run_engine(engine, requests)
    executor.close()
    return {name: outcome.token_ids for name, outcome in outcomes.items()}


def num_compiled() -> tuple[int, int]:
    """Pieces that this process compiled, and those that it took from the cache."""
    compiled = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]
    return compiled, counters["inductor"]["fxgraph_cache_hit"]


_START = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2]).parent))
from test_inductor_layers import num_compiled, tokens
found = tokens(Path(sys.argv[1]), compiles=True)
print(repr((found, num_compiled())))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with a cache of its own, in which torch's headers are compiled once."""
    return tmp_path_factory.mktemp("home")


@needs_compiler
def test_tokens_are_those_of_the_layers_as_they_are_and_a_second_start_compiles_nothing(home: Path) -> None:
    folder = home / "model"
    write_random_model(folder, CONFIG, 0, torch.float32)
    expected = tokens(folder, compiles=False)
    assert start(folder) == (expected, (6, 0))  # whatever the number of tokens
    written = files(home / ".cache" / "weft")
    assert written
    assert start(folder) == (expected, (0, 6))
    assert files(home / ".cache" / "weft") == written  # no machine code is new


def start(folder: Path) -> Any:
    """What a new process gives whose cache is beside the model: tokens, and what it compiled and found compiled."""
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _START, str(folder), __file__],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "HOME": str(folder.parent),  # where the cache is
            # else torch compiles a probe for each kind of vectors of the CPU, for longer than the layers take
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else a process beside it imports torch, to compile in
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return eval(done.stdout.splitlines()[-1])


def files(folder: Path) -> dict[Path, int]:
    """Libraries and when they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.so")}


@needs_compiler
def test_bfloat16_is_close(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)  # as in `start`
    write_random_model(tmp_path / "model", CONFIG | {"num_hidden_layers": 1}, 0, torch.bfloat16)
    one, other = (
        hidden_states(load(tmp_path / "model", kernels, torch.bfloat16), STEPS[:2])[:2]
        for kernels in (InductorKernels(ReferenceKernels(), CPU, home / ".cache" / "weft"), ReferenceKernels())
    )
    for compiled, eager in zip(one, other, strict=True):
        error = (compiled.float() - eager.float()).norm() / eager.float().norm()
        assert error < 0.01  # what is fused rounds less often
