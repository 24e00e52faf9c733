"""The Triton kernels mean what the reference means, in Triton's interpreter, and compile for GPUs that are not here.

Interpreted in float32 and float16: the interpreter of Triton 3.9 multiplies and rounds bfloat16 wrongly.
"""

import pytest
from helpers.triton_programs import interpret, run_with_triton

_ATTENTION = """
import torch
from helpers.attention_cases import attention_cases
from parallel.kernels import cuda_buckets, triton_attention as kernels
from parallel.kernels.triton_attention import triton_attention

cpu = torch.device("cpu")
for case in attention_cases():
    # of most the chunks, none of which is so long, are not cut: to merge each of their rows takes most of the time
    cuda_buckets.MIN_CHUNK_PARTITION_SIZE = 512 if case.name in ("head 8", "one group", "all") else 1024
    case.check(triton_attention, torch.float32, cpu)
    if case.name in ("head 96", "partitions", "all"):
        case.check(triton_attention, torch.float16, cpu)
cuda_buckets.MIN_CONTEXT_BUCKET, cuda_buckets.MIN_CHUNK_PARTITION_SIZE = 16, 64  # contexts of chunks are cut
for case in attention_cases():
    if case.name in ("head 80", "odd blocks", "only chunks", "bias by distance", "sinks"):
        case.check(triton_attention, torch.float32, cpu)
kernels._MOST_PROGRAMS = 1  # each has all partitions of a sequence
kernels._MANY_PROGRAMS = 1
for case in attention_cases():
    if case.name in ("partitions", "no partitions", "all"):
        case.check(triton_attention, torch.float32, cpu)
"""


def test_attention_is_right_when_interpreted() -> None:
    interpret(_ATTENTION)


_WAITS = """
from dataclasses import replace
from math import prod
from types import SimpleNamespace
import torch
from triton import language
from helpers.paged_layout import make_layout
from parallel.kernels import cuda_buckets, triton_attention as kernels
from parallel.kernels.base import AttentionParams

num_programs = num_waits = 0


class Counted:
    def __init__(self, kernel):
        self._kernel = kernel

    def __getitem__(self, grid):
        global num_programs
        num_programs += prod(grid)
        return self._kernel[grid]


def wait():
    global num_waits
    num_waits += 1


language.extra.cuda = SimpleNamespace(gdc_wait=wait, gdc_launch_dependents=lambda: None)
kernels.launch_options = lambda device: {"IS_EARLY": True}
kernels.attend, kernels.merge = Counted(kernels.attend), Counted(kernels.merge)
cuda_buckets.MIN_CONTEXT_BUCKET, cuda_buckets.MIN_CHUNK_PARTITION_SIZE = 16, 64
layout = make_layout([(1, 70)] * 3, num_kv_heads=1, head_dim=16, block_size=16)
meta = layout.meta
for room in (0, 4):  # as in a recorded step without chunks
    starts = torch.cat([meta.query_starts, meta.query_starts.new_full([room], 3)])
    lens = torch.cat([meta.context_lens, meta.context_lens.new_zeros(room)])
    tables = torch.cat([meta.block_tables, meta.block_tables.new_zeros(room, meta.block_tables.shape[1])])
    step = replace(meta, query_starts=starts, context_lens=lens, block_tables=tables, num_decodes=3)
    out = kernels.triton_attention(torch.randn(3, 2, 16), layout.cache, step, AttentionParams(scale=0.25))
    assert out.isfinite().all()
    assert num_waits == num_programs > 0, (num_waits, num_programs)
"""


def test_every_program_of_attention_waits_for_the_kernel_before_it() -> None:
    """A launch none of whose programs waits would be over first, and hide that kernel from the one after it."""
    interpret(_WAITS)


_VARIANTS = """
import torch
from parallel.kernels import triton_attention as kernels
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.cuda_buckets import choose_bucket, choose_mixed, largest_mixed, largest_steps

MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_CONTEXT = 256, 4096, 10_000
variants = set()


class Noted:
    def __init__(self, kernel):
        self._kernel = kernel

    def __getitem__(self, grid):
        return self._note

    def _note(self, *args, **constants):
        named = zip(self._kernel.arg_names, args)
        plain = {name: arg for name, arg in named if name not in self._kernel.do_not_specialize}
        kinds = {name: (arg == 1, arg % 16 == 0) for name, arg in plain.items() if isinstance(arg, int)}
        variants.add((self._kernel.__name__, *kinds.items(), *constants.items()))


def attend(num_tokens, num_decodes, num_chunks, context):
    def new(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    num_seqs = num_decodes + num_chunks
    meta = AttentionMeta(
        query_starts=new(num_seqs + 1),
        context_lens=new(num_seqs),
        block_tables=new(num_seqs, context),
        slot_mapping=new(num_tokens, dtype=torch.int64),
        num_decodes=num_decodes,
        max_query_len=num_tokens,
        max_context_len=context,
        query_starts_host=[],
        context_lens_host=[],
    )
    q = new(num_tokens, num_kv_heads * num_group, 128, dtype=torch.bfloat16)
    cache = LayerCache(*(new(9, 16, num_kv_heads, 128, dtype=torch.bfloat16) for _ in range(2)))
    kernels.triton_attention(q, cache, meta, AttentionParams(scale=1.0, sliding_window=window))


kernels.attend, kernels.merge = Noted(kernels.attend), Noted(kernels.merge)
kernels._shared_bytes = lambda device: 227 << 10
for num_kv_heads, num_group, window in ((8, 4, None), (1, 8, None), (4, 4, 700), (8, 8, 128)):
    for of in largest_mixed(max_num_tokens=MAX_NUM_TOKENS, max_context=MAX_CONTEXT):
        of = choose_mixed(num_tokens=of.num_tokens, num_chunks=1, max_context_len=of.max_context_len)
        attend(of.num_tokens, of.num_tokens, of.num_chunks, of.max_context_len)
    for of in largest_steps(max_num_seqs=MAX_NUM_SEQS, max_context=MAX_CONTEXT):
        of = choose_bucket(num_tokens=of.num_tokens, num_decodes=of.num_tokens, max_context_len=of.max_context_len)
        attend(of.num_tokens, of.num_tokens, 0, of.max_context_len)
    recorded = variants.copy()
    for num_decodes in range(0, MAX_NUM_SEQS, 15):
        for num_tokens in (513, 1000, MAX_NUM_TOKENS):
            for context in (*range(300, 2300, 200), 3000, 5000, MAX_CONTEXT):
                attend(num_tokens, num_decodes, 1, context)
                assert variants == recorded, (num_tokens, num_decodes, context, variants - recorded)

    variants.clear()  # now without graphs, in which steps have their own sizes
    for of in largest_mixed(max_num_tokens=MAX_NUM_TOKENS, max_context=MAX_CONTEXT):
        attend(of.num_tokens, 0, 1, of.max_context_len)
    for of in largest_steps(max_num_seqs=MAX_NUM_SEQS, max_context=MAX_CONTEXT):
        attend(of.num_tokens, of.num_tokens, 0, of.max_context_len)
    rehearsed = variants.copy()
    for num_decodes in (*range(0, 20, 3), *range(20, MAX_NUM_SEQS, 45), MAX_NUM_SEQS):
        for num_new in (0, 1, 5, 40, 200, MAX_NUM_TOKENS - num_decodes):
            for context in (*range(300, 2300, 200), 3000, 5000, MAX_CONTEXT):
                attend(num_decodes + num_new, num_decodes, num_new > 0, context)
                assert variants == rehearsed, (num_decodes, num_new, context, variants - rehearsed)
"""


def test_attention_of_every_step_is_compiled_before_the_first_request() -> None:
    """By recorded ones, or those that are rehearsed where none is: else the first of its kind would wait."""
    run_with_triton(_VARIANTS)


_ELEMENTWISE = """
import torch
from helpers.elementwise_cases import elementwise_checks
from parallel.kernels.cuda import CudaKernels

for check in elementwise_checks():
    for dtype in (torch.float32, torch.float16):
        check(CudaKernels(torch.device("cpu")), dtype, torch.device("cpu"))
"""


def test_operations_between_products_are_right_when_interpreted() -> None:
    interpret(_ELEMENTWISE)


_LINEAR = """
import torch
from helpers.linear_cases import check_gate_of_one_row, linear_cases

for case in linear_cases():
    for dtype in (torch.float32, torch.float16):
        case.check(dtype, torch.device("cpu"))
check_gate_of_one_row(torch.float16, torch.device("cpu"))
"""


def test_linear_layers_are_right_when_interpreted() -> None:
    interpret(_LINEAR)


_SAMPLING = """
import torch
from helpers.sampling_cases import check_edits, sampling_cases
from parallel.kernels import triton_sampling
from parallel.kernels.sampling import TokenChoice, rank_in_torch
from parallel.kernels.triton_sampling import choose_in_triton, edit_in_triton, find_in_triton

choice, cpu = TokenChoice(choose_in_triton, find_in_triton, rank_in_torch, edit_in_triton), torch.device("cpu")
for case in sampling_cases():
    case.check(choice, cpu)
check_edits(choice, cpu)
triton_sampling._MOST_GATHERED = 1  # nearly all rows with limits are read whole
for case in sampling_cases():
    if case.name in ("random 300", "mixed 5000", "odd rows of each kind"):
        case.check(choice, cpu)
"""


def test_tokens_are_those_of_the_reference_when_interpreted() -> None:
    interpret(_SAMPLING)


_WAYS_TO_SAMPLE = """
from itertools import product
from pathlib import Path
import tempfile
import torch
from helpers.plans import make_plan
from helpers.recording import StandIn
from parallel.checkpoint import load_decoder
from parallel.kernels import triton_sampling
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.sampling import TokenChoice, rank_in_torch
from parallel.mesh import Mesh
from parallel.random_model import write_random_model
from workers import model_runner
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.plan import NewSequence, ScheduledSequence
from workers.request import SamplingParams

variants = set()


class Noted:
    def __init__(self, kernel):
        self._kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **constants):
            dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
            variants.add((self._kernel.fn.__name__, *dtypes, *constants.items()))
            self._kernel[grid](*args, **constants)

        return launch


for name in ("_find_largest", "_edit", "_merge_largest", "_cut", "_gather", "_limit"):
    setattr(triton_sampling, name, Noted(getattr(triton_sampling, name)))
choice = TokenChoice(
    triton_sampling.choose_in_triton, triton_sampling.find_in_triton, rank_in_torch, triton_sampling.edit_in_triton
)
model_runner.select_sampling = lambda *_: choice
model = dict(model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
model |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, eos_token_id=2)
with tempfile.TemporaryDirectory() as folder:
    write_random_model(Path(folder), model, 0, torch.float32)
    decoder = load_decoder(
        Path(folder), mesh=Mesh.single(), device=torch.device("cpu"), dtype=torch.float16, kernels=ReferenceKernels()
    )
config = EngineConfig(
    model="",
    kernels="reference",
    max_cudagraph_capture_size=0,
    cache=CacheConfig(num_blocks=10),
    scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
)
type(decoder).finds_largest = type(decoder).draws = property(lambda self: {is_parallel})
runner = model_runner.ModelRunner(decoder, mesh=Mesh.single(), device=StandIn(), config=config)
runner.allocate(10)
rehearsed = variants.copy()
limits = dict(), dict(top_p=0.5, top_k=3), dict(min_p=0.1)
edits = dict(), dict(min_tokens=1)
for number, (temperature, limit, edit, logprobs) in enumerate(product((0.0, 0.7), limits, edits, (None, 2))):
    sampling = SamplingParams(temperature=temperature, logprobs=logprobs, **limit, **edit)
    new = NewSequence(0, [1, 3], 2, sampling, [2])
    assert runner.run(make_plan(number, [], [new], [ScheduledSequence(0, 0, 2, [], [0], True)])) is not None
    assert variants == rehearsed, (sampling, variants - rehearsed)
"""


@pytest.mark.parametrize("is_parallel", [False, True])
def test_every_way_to_sample_is_compiled_before_the_first_request(is_parallel: bool) -> None:
    """Of a rank alone, and of one that looks through its part of the logits: else all wait for the first of a kind."""
    interpret(_WAYS_TO_SAMPLE.replace("{is_parallel}", str(is_parallel)))


_DECODER = """
import tempfile
from pathlib import Path
import torch
from helpers.graph_cases import check_decoder
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.cuda_graphs import GraphedLayers, Recording


def call_again(run, memory):
    result = run()

    def replay():
        for to, tensor in zip(result, run()):
            to.copy_(tensor)

    return Recording(replay, result, memory)


class Kernels(CudaKernels):
    def compile_layers(self, run, axis):
        assert isinstance(super().compile_layers(run, axis), GraphedLayers)
        return GraphedLayers(run, call_again, attention=self._cut_attention, records_chunks=self.records_chunks)


for records_chunks in (False, True):
    kernels = Kernels(torch.device("cpu"))
    kernels.records_chunks = records_chunks
    with tempfile.TemporaryDirectory() as folder:
        decoder = check_decoder(kernels, Path(folder), torch.device("cpu"), tolerance=1e-4)
    assert len(decoder._run._graphs) == 3 + 3
    assert sum(bucket.is_in_pieces for bucket in decoder._run._graphs) == (0 if records_chunks else 3)
"""


def test_a_decoder_whose_steps_are_filled_up_is_right_when_interpreted() -> None:
    interpret(_DECODER)


_COMPILE = """
import re
from pathlib import Path
from helpers.compiled_launches import compiling, launch_all
from parallel.kernels import triton_launch

with compiling(90, 227 << 10) as compiled:
    launch_all()
files = Path(triton_launch.__file__).parent.glob("triton_*.py")
launched = {name for file in files for name in re.findall(r"^ +(\\w+)\\[[^]]+\\]\\(", file.read_text(), re.MULTILINE)}
assert compiled == launched, compiled ^ launched
"""


def test_every_launch_compiles_for_an_h200_and_fits_in_its_shared_memory() -> None:
    run_with_triton(_COMPILE)


_COMPILE_ATTENTION = """
from helpers.compiled_launches import compiling, launch_largest_attention

with compiling({capability}, {shared_kb} << 10):
    launch_largest_attention()
"""


@pytest.mark.parametrize(("capability", "shared_kb"), [(80, 163), (89, 99)])
def test_largest_attention_compiles_for_gpus_with_less_shared_memory(capability: int, shared_kb: int) -> None:
    run_with_triton(_COMPILE_ATTENTION.replace("{capability}", str(capability)).replace("{shared_kb}", str(shared_kb)))
