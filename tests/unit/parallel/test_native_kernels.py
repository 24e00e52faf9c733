"""The compiled kernels: built once, with a clear error where they cannot be, and with results that no split changes."""

import errno
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.largest_outputs import check_drawn, check_largest, check_sifted
from helpers.paged_layout import make_layout, meta_of_one, without_unseen_blocks
from helpers.sampling_cases import make_draws, make_edits

from parallel.description import Activation
from parallel.errors import DeviceError
from parallel.host_memory import HugePages
from parallel.kernels.base import AttentionParams
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.cpu_sampling import make_native_choice
from parallel.kernels.linears import Search, Sift
from parallel.kernels.native import build
from parallel.kernels.native.heads_linear import NativeHeadsLinear, can_pack_heads
from parallel.kernels.native.library import Operations, Programs, load_programs
from parallel.kernels.native.packed_linear import NativeLinear, NativeTable, can_pack, can_pack_in_place
from parallel.kernels.native.tape import Recorder
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.select import multiplies, select_kernels

CPU = torch.device("cpu")
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""What a result may be off in its dtype, of itself: a little more than half a unit in the last place."""
LEAST = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 2**-24}
"""The same where it is too small for that."""


@pytest.fixture(scope="module")
def programs(library: Path) -> Programs:
    return load_programs(library) or pytest.skip("this CPU has no packed products")


@pytest.fixture
def dot_products(operations: Operations) -> None:
    """Only with them do chunks and single tokens take the same way."""
    if not operations.has_dot_products(32, False):
        pytest.skip("this CPU has no dot products of such numbers")


@pytest.mark.parametrize("window", [None, 300])
def test_attention_is_the_same_bit_for_bit_alone_together_and_on_more_threads(
    operations: Operations, dtype: torch.dtype, window: int | None
) -> None:
    spans = [(1, 1500), (1, 33), (1, 256), (1, 257), *[(1, 40 + row) for row in range(20)], (9, 600)]
    layout = make_layout(spans, num_kv_heads=4, head_dim=32, block_size=16, dtype=dtype)
    cache, meta = layout.cache, layout.meta
    q = torch.randn(meta.query_starts_host[-1], 8, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    params = AttentionParams(scale=0.2, sliding_window=window)
    together = NativeCpuKernels(operations, None, 1).attention(q, cache, meta, params)
    for num_threads in (2, 5):
        assert torch.equal(NativeCpuKernels(operations, None, num_threads).attention(q, cache, meta, params), together)
    for row in range(4):
        single = NativeCpuKernels(operations, None, 2).attention(
            q[row : row + 1], cache, meta_of_one(meta, row), params
        )
        assert torch.equal(single, together[row : row + 1])


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_sequences_have_in_common_is_read_once_and_changes_no_bit(
    operations: Operations, dtype: torch.dtype, has_bias: bool
) -> None:
    """40 sequences over two prefixes of 700 tokens, of which some have all and some a part."""
    layout = make_layout(
        [(1, 701 + 3 * row) for row in range(40)], num_kv_heads=2, head_dim=32, block_size=16, dtype=dtype
    )
    meta, tables = layout.meta, layout.meta.block_tables
    for row in range(40):
        shared = (16, 43, 32)[row % 3] if row > 36 else 43  # blocks; a partition has 16
        tables[row, :shared] = tables[0 if row < 20 else 20, :shared]
    q = torch.randn(40, 6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = torch.randn(6, 900, generator=torch.Generator().manual_seed(1)) if has_bias else None
    params = AttentionParams(scale=0.2, key_bias_NP=bias, is_bias_by_distance=has_bias)
    together = NativeCpuKernels(operations, None, 1).attention(q, layout.cache, meta, params)
    assert torch.equal(NativeCpuKernels(operations, None, 3).attention(q, layout.cache, meta, params), together)
    expected = ReferenceKernels().attention(q, layout.cache, meta, params)
    torch.testing.assert_close(together, expected, rtol=2e-2, atol=1e-5 if dtype is torch.float32 else 2e-2)
    for row in range(40):
        alone = NativeCpuKernels(operations, None, 2).attention(
            q[row : row + 1], layout.cache, meta_of_one(meta, row), params
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.usefixtures("dot_products")
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_heads", [2, 14])
def test_chunks_together_have_the_bits_they_have_alone(
    operations: Operations, dtype: torch.dtype, num_heads: int, window: int | None
) -> None:
    """Chunks over a prefix of 592 tokens, of which some have all and one a part, and a long one that is cut."""
    spans = [(20, 620), (33, 630), (5, 600), (7, 607), (700, 700)]
    layout = make_layout(spans, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    meta, tables = layout.meta, layout.meta.block_tables
    for row, shared in enumerate((37, 37, 20)):
        tables[row, :shared] = tables[0, :shared]
    q = torch.randn(meta.query_starts_host[-1], num_heads, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    params = AttentionParams(scale=0.125, sliding_window=window)
    together = NativeCpuKernels(operations, None, 1).attention(q, layout.cache, meta, params)
    assert torch.equal(NativeCpuKernels(operations, None, 5).attention(q, layout.cache, meta, params), together)
    expected = ReferenceKernels().attention(q, layout.cache, meta, params)
    torch.testing.assert_close(together, expected, rtol=2e-2, atol=2e-2)
    for row, (start, stop) in enumerate(pairwise(meta.query_starts_host)):
        alone = NativeCpuKernels(operations, None, 2).attention(
            q[start:stop], layout.cache, meta_of_one(meta, row), params
        )
        assert torch.equal(alone, together[start:stop])


@pytest.mark.usefixtures("dot_products")
@pytest.mark.parametrize(
    ("group", "head_dim"),
    [*[(1, head_dim) for head_dim in (32, 64, 96, 128, 160)], (2, 64), (4, 128), (7, 64), (13, 32), (17, 32)],
)
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (64, None), (12, None), (16, 70)])
def test_a_row_has_the_bits_it_has_among_others(
    operations: Operations, dtype: torch.dtype, group: int, head_dim: int, block_size: int, window: int | None
) -> None:
    """One row a key-value head, and a few, go other ways than many: the last tokens of a sequence as one chunk, and
    one by one."""
    num_tokens, num_heads = 5, 3 * group
    spans = [*[(1, 296 + token) for token in range(num_tokens)], (num_tokens, 300)]
    layout = make_layout(spans, num_kv_heads=3, head_dim=head_dim, block_size=block_size, dtype=dtype)
    meta, tables = layout.meta, layout.meta.block_tables
    tables[:num_tokens] = tables[num_tokens]
    q = torch.randn(2 * num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    q[num_tokens:] = q[:num_tokens]
    params = AttentionParams(scale=0.2, sliding_window=window)
    chunk = NativeCpuKernels(operations, None, 1).attention(q, layout.cache, meta, params)[num_tokens:]
    expected = ReferenceKernels().attention(q, layout.cache, meta, params)[num_tokens:]
    for num_threads in (1, 2):
        for row in range(num_tokens):
            alone = NativeCpuKernels(operations, None, num_threads).attention(
                q[row : row + 1], layout.cache, meta_of_one(meta, row), params
            )
            torch.testing.assert_close(alone[0], expected[row], rtol=2e-2, atol=2e-2)
            assert torch.equal(alone[0], chunk[row])


@pytest.mark.usefixtures("dot_products")
@pytest.mark.parametrize("num_heads", [2, 8])
@pytest.mark.parametrize(("window", "block_size"), [(41, 16), (300, 12)])
def test_a_window_that_begins_anywhere_changes_no_bit(
    operations: Operations, dtype: torch.dtype, num_heads: int, window: int, block_size: int
) -> None:
    """Each token of a chunk sees from another one on; enough of them that a sum in another order would show."""
    num_tokens, first = 400, 300
    spans = [*[(1, first + token + 1) for token in range(num_tokens)], (num_tokens, first + num_tokens)]
    layout = make_layout(spans, num_kv_heads=2, head_dim=64, block_size=block_size, dtype=dtype)
    layout.meta.block_tables[:] = layout.meta.block_tables[num_tokens].clone()
    meta = without_unseen_blocks(layout.meta, window, block_size=block_size)
    q = torch.randn(num_tokens, num_heads, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    params = AttentionParams(scale=0.2, sliding_window=window)
    kernels = NativeCpuKernels(operations, None, 2)
    chunk = kernels.attention(q, layout.cache, meta_of_one(meta, num_tokens), params)
    for token in range(num_tokens):
        alone = kernels.attention(q[token : token + 1], layout.cache, meta_of_one(meta, token), params)
        assert torch.equal(alone[0], chunk[token])


@pytest.mark.parametrize("activation", Activation)
def test_activations_are_as_fine_as_their_dtype(
    operations: Operations, dtype: torch.dtype, activation: Activation
) -> None:
    """Relative to the result, also where that is near to 0: a sigmoid, or a part of the normal distribution."""
    x = torch.linspace(-6.0, 6.0, 3001).to(dtype)
    exact = x.double()
    factors = {
        Activation.SILU: torch.sigmoid(exact),
        Activation.GELU_TANH: torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3)),
        Activation.GELU: torch.special.erfc(exact / -(2**0.5)) / 2,
        Activation.RELU: (exact > 0).double(),
    }
    expected = (exact * factors[activation]).float()
    for num_threads in (1, 2):
        kernels = NativeCpuKernels(operations, None, num_threads)
        actual = kernels.activated(activation)(x.clone().expand(20, -1).contiguous())
        for row in (actual[0], actual[19]):
            torch.testing.assert_close(row.float(), expected, rtol=max(5e-6, ROUNDING[dtype]), atol=LEAST[dtype])


def test_numbers_of_16_bits_are_read_and_rounded_exactly(operations: Operations, dtype: torch.dtype) -> None:
    """All that there are, one by one and in vectors: products of two, of one and a factor, and none."""
    if dtype is torch.float32:
        pytest.skip("there are too many")
    generator, kernels = torch.Generator().manual_seed(0), NativeCpuKernels(operations, None, 1)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = every[every.isfinite()]
    others = numbers[torch.randperm(len(numbers), generator=generator)]
    product = kernels.gated(Activation.RELU)(torch.cat((numbers, others))[None])
    assert torch.equal(product[0], (numbers.float().relu() * others.float()).to(dtype))
    factors = torch.rand(1, len(numbers), generator=generator).mul_(-30).exp2_()
    heads, nothing = torch.cat((numbers, torch.zeros_like(numbers))).view(1, 1, -1), torch.zeros_like(factors)
    turned, _ = kernels.rotary(heads.clone(), heads.clone(), factors, nothing, is_interleaved=False)
    assert torch.equal(turned[0, 0, : len(numbers)], (numbers.float() * factors[0]).to(dtype))
    kept = kernels.activated(Activation.RELU)(every.clone()[None])[0]
    torch.testing.assert_close(kept, torch.where(every < 0, 0, every), rtol=0, atol=0, equal_nan=True)
    _, kept = kernels.add_rms_norm(torch.zeros(1, 1 << 16, dtype=dtype), every.clone()[None], every, 1e-5)
    torch.testing.assert_close(kept[0], every, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norms_far_from_zero(operations: Operations, dtype: torch.dtype, has_bias: bool) -> None:
    """The variance of numbers with a large mean is that of what is left without it."""
    generator = torch.Generator().manual_seed(0)
    x = (100 + torch.randn(90, 768, generator=generator)).to(dtype)
    weight, bias = (torch.randn(768, generator=generator).to(dtype) for _ in range(2))
    expected = ReferenceKernels().layer_norm(x, weight, bias if has_bias else None, 1e-5)
    results = [
        NativeCpuKernels(operations, None, num_threads).layer_norm(x, weight, bias if has_bias else None, 1e-5)
        for num_threads in (1, 2)
    ]
    assert torch.equal(*results)
    tolerance = max(5e-4, 2 * ROUNDING[dtype])  # the mean of float32, added up one by one, as without vectors
    torch.testing.assert_close(results[0], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 3, 5, 16, 17, 33, 64, 65, 100, 700])
@pytest.mark.parametrize(("num_out", "num_in", "has_bias"), [(512, 96, True), (336, 1056, False), (48, 352, True)])
def test_products_with_packed_matrices(
    programs: Programs, num_rows: int, num_out: int, num_in: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = (
        torch.randn(*shape, generator=generator).to(programs.dtype) for shape in ((num_out, num_in), (num_out,))
    )
    x = torch.randn(num_rows, num_in + 8, generator=generator).to(programs.dtype)[:, :num_in]  # rows that are not dense
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert can_pack(weight, programs)
    for num_threads in (1, 2):
        linear = NativeLinear(
            *(weight.clone(), bias if has_bias else None, programs, Recorder(), num_threads), memory=HugePages()
        )
        torch.testing.assert_close(linear(x).double(), expected, rtol=ROUNDING[programs.dtype], atol=2e-2)


@pytest.mark.parametrize(
    ("shape", "is_packed", "is_packed_in_place"),
    [
        ((512, 32), True, True),
        ((528, 32), True, False),  # the last panel is not whole
        ((520, 32), False, False),
        ((512, 48), False, False),
        ((480, 32), False, False),  # small
    ],
)
def test_matrices_that_the_products_do_not_take_are_not_packed(
    programs: Programs, shape: tuple[int, int], is_packed: bool, is_packed_in_place: bool
) -> None:
    weight = torch.zeros(shape, dtype=programs.dtype)
    assert can_pack(weight, programs) == is_packed
    assert can_pack_in_place(*shape, programs.dtype, programs) == is_packed_in_place
    assert not can_pack(weight.T.contiguous().T, programs)
    assert not can_pack(weight.double(), programs)
    assert not can_pack_in_place(*shape, programs.dtype, None)


@pytest.mark.parametrize(
    ("num_out", "num_in"),
    [(2560, 64), (2576, 64), (592, 2624)],
    ids=["past-the-caches", "rows-not-on-cache-lines", "sums-in-parts"],
)
def test_a_large_product_has_the_bits_of_its_rows(programs: Programs, num_out: int, num_in: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator).to(programs.dtype)
    x = torch.randn(900, num_in, generator=generator).to(programs.dtype)
    linear = NativeLinear(weight, None, programs, Recorder(), 2, memory=HugePages())
    together = linear(x)
    for num_rows in (17, 1, 3):
        assert torch.equal(together[:102], torch.cat([linear(rows) for rows in x[:102].split(num_rows)]))


@pytest.mark.parametrize("num_tokens", [1, 4, 40, 300])
def test_heads_have_the_bits_of_a_product_of_their_own(programs: Programs, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 96, 544, generator=generator).to(programs.dtype)
    x = torch.randn(num_tokens, 3, 160, generator=generator).to(programs.dtype)[..., :96]
    alone = [
        NativeLinear(each.T.contiguous(), None, programs, Recorder(), 1, memory=HugePages())(x[:, head])
        for head, each in enumerate(weight)
    ]
    for num_threads in (1, 3):
        assert can_pack_heads(weight, programs)
        heads = NativeHeadsLinear(weight.clone(), programs, Recorder(), num_threads, memory=HugePages())
        assert torch.equal(heads(x), torch.stack(alone, 1))


@pytest.mark.parametrize("num_rows", [1, 5, 17, 33, 65, 200])
def test_the_largest_of_a_product_with_a_matrix_as_it_lies(
    operations: Operations, dtype: torch.dtype, num_rows: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 104, generator=generator).to(dtype)[:, :96]  # rows that are not dense
    for num_out in (2096, 544):
        weight = torch.randn(num_out, 96, generator=generator).to(dtype)
        for num_threads in (1, 3):
            check_largest(NativeCpuKernels(operations, None, num_threads).pack_head(weight, None, is_shared=True), x)


@pytest.mark.parametrize(("num_out", "num_in"), [(4128, 96), (608, 2624)])
def test_a_table_is_laid_out_where_it_is_and_gives_its_rows(
    programs: Programs, library: Path, num_out: int, num_in: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator).to(programs.dtype)
    x = torch.randn(200, num_in + 8, generator=generator).to(programs.dtype)[:, :num_in]  # rows that are not dense
    indices = torch.tensor([0, 15, 16, 31, 32, num_out - 1, 0, *range(100, 300)])
    for num_threads in (1, 3):
        table = NativeTable(weight.clone(), programs, num_threads, memory=HugePages())
        assert torch.equal(table.rows(indices), weight[indices])
        assert torch.equal(
            table.rows(torch.tensor([-1, 7, num_out])), weight[[0, 7, 0]] * torch.tensor([[0], [1], [0]])
        )
        assert len(table.rows(indices[:0])) == 0
        together = table(x)
        assert together.dtype is torch.float32
        torch.testing.assert_close(together, x.float() @ weight.float().T, rtol=1e-4, atol=1e-3)
        for num_rows in (1, 3, 33):
            assert torch.equal(together, torch.cat([table(rows) for rows in x.split(num_rows)]))
        for rows in (x[:1], x[:33], x):
            check_largest(table, rows)
            noise = make_draws(len(rows), [*range(0, len(rows), 2)]).noise
            check_drawn(table, rows, Search(noise), make_native_choice(library))


@pytest.mark.parametrize("num_rows", [1, 3, 12, 40, 150])
@pytest.mark.parametrize("kind", ["random", "close", "equal", "spread", "no-number"])
def test_what_few_rows_of_a_table_search_is_exact(programs: Programs, library: Path, kind: str, num_rows: int) -> None:
    if programs.make_screen is None:
        pytest.skip("this CPU has no products in 8 bits")
    num_out, num_in = 6016, 416
    noise, choice = make_draws(num_rows, [*range(0, num_rows, 3), num_rows - 1]).noise, make_native_choice(library)
    numbers, edits = np.arange(num_rows, dtype=np.int32) % 20 + 1, make_edits(num_rows, num_out, num_in**0.5)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(num_out, num_in, generator=generator)
        x = torch.randn(num_rows, num_in, generator=generator)
        match kind:
            case "close":  # outputs that only many digits tell apart
                weight = weight[:1] + weight * 2**-7
            case "equal":
                weight = weight[torch.randint(0, 40, (num_out,), generator=generator)]
            case "spread":  # some inputs and outputs are much larger than the rest
                weight *= (
                    torch.randn(num_out, 1, generator=generator).exp() * torch.randn(num_in, generator=generator).exp()
                )
                x *= torch.randn(num_in, generator=generator).mul(2).exp()
            case "no-number":
                weight[4000, 3], x[num_rows - 1, 5] = torch.inf, torch.nan
        weight, x = weight.to(programs.dtype), x.to(programs.dtype)
        for num_threads in (1, 3):
            table = NativeTable(weight.clone(), programs, num_threads, memory=HugePages())
            check_largest(table, x)
            check_drawn(table, x, Search(noise), choice)
            if num_rows <= table.most_edited_rows:
                check_drawn(table, x, Search(noise, edits), choice)
                check_drawn(table, x, Search(None, edits), choice)
            if num_rows <= programs.most_screened_rows:
                for sift in (Sift(noise, numbers), Sift(noise, numbers, edits)):
                    is_left_out = check_sifted(table, x, sift)
                    assert kind != "random" or is_left_out.float().mean() > 0.5


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("is_of_weight", [True, False], ids=["weight", "x"])
def test_what_8_bits_lose_is_allowed_for(programs: Programs, is_of_weight: bool, num_rows: int) -> None:
    """All that is lost of one output, the largest, has one sign; of the second largest nothing is lost."""
    if programs.make_screen is None:
        pytest.skip("this CPU has no products in 8 bits")
    num_in = 32
    signs = torch.randn(num_in, generator=torch.Generator().manual_seed(0)).sign()
    coarse = 191 / 128 * signs  # a unit and nearly a half
    coarse[0] = 127.0  # units
    weight, x = torch.zeros(96, num_in), signs.clone()
    if is_of_weight:
        weight[70], x[0] = coarse, 0.0
        weight[5] = 190 / 128 * signs
        weight[5, 0] = 0.0
    else:
        weight[70], x = signs, coarse.clone()
        weight[70, 0] = 0.0
        weight[5, 0] = 93 / 256
    x = x.expand(num_rows, -1).contiguous().to(programs.dtype)
    table = NativeTable(weight.to(programs.dtype), programs, 1, memory=HugePages())
    first, second = table(x)[0, [70, 5]].tolist()
    assert 0 < first - second < 0.02 * first, "they are close"
    assert check_largest(table, x).tolist() == [70] * num_rows
    for number in (1, 2):
        check_sifted(table, x, Sift(make_draws(num_rows, []).noise, np.full(num_rows, number, np.int32)))


def test_a_table_is_sifted_where_few_panels_may_have_what_is_wanted(programs: Programs) -> None:
    if programs.make_screen is None:
        pytest.skip("this CPU has no products in 8 bits")
    table = NativeTable(torch.ones(32 * 48, 32).to(programs.dtype), programs, 1, memory=HugePages())
    most = programs.most_sifted_rows
    for numbers, is_sifted in (([3], True), ([4], False), ([1, 2], True), ([2, 2], False)):
        sift = Sift(make_draws(len(numbers), []).noise, np.array(numbers, np.int32))
        assert table.can_sift(sift) == is_sifted, numbers
    large = NativeTable(torch.ones(32 * 16 * (most + 1), 32).to(programs.dtype), programs, 1, memory=HugePages())
    for num_rows, is_sifted in ((most, True), (most + 1, False)):
        assert large.can_sift(Sift(make_draws(num_rows, []).noise, np.ones(num_rows, np.int32))) == is_sifted


def test_a_table_reads_a_copy_of_half_its_size_for_few_rows(programs: Programs) -> None:
    if programs.make_screen is None:
        pytest.skip("this CPU has no products in 8 bits")
    table = NativeTable(torch.ones(64, 128).to(programs.dtype), programs, 1, memory=HugePages())
    most = programs.most_screened_rows
    spared = 64 * (128 * programs.dtype.itemsize - 128 - 16)
    assert [table.spared_bytes(num) for num in (0, 1, most, most + 1)] == [0, spared, spared, 0]


def test_the_largest_of_rows_that_several_shares_have_is_exact(programs: Programs) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(num, 4096, generator=generator).to(programs.dtype) for num in (1056, 300))
    check_largest(NativeTable(weight, programs, 2, memory=HugePages()), x)


@pytest.mark.parametrize("num_rows", [1, 5, 17, 33, 65, 700])
@pytest.mark.parametrize(("num_out", "num_in", "has_bias"), [(4128, 96, True), (2064, 1056, False), (592, 2624, False)])
def test_the_largest_of_a_product_with_a_packed_matrix(
    programs: Programs, num_rows: int, num_out: int, num_in: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = (
        torch.randn(*shape, generator=generator).to(programs.dtype) for shape in ((num_out, num_in), (num_out,))
    )
    x = torch.randn(num_rows, num_in + 8, generator=generator).to(programs.dtype)[:, :num_in]
    for num_threads in (1, 3):
        linear = NativeLinear(
            *(weight.clone(), bias if has_bias else None, programs, Recorder(), num_threads), memory=HugePages()
        )
        check_largest(linear, x)


def test_the_first_of_equal_outputs_is_the_largest_and_what_is_not_finite_is_told(programs: Programs) -> None:
    num_out, num_in, most = 1040, 64, [777, 300, 301, 1039]
    weight = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(0)).to(programs.dtype)
    weight[most] = 8.0  # times 64 ones
    bias = torch.zeros(num_out).to(programs.dtype)
    x = torch.ones(4, num_in).to(programs.dtype)
    x[1] = 0  # all outputs are equal, whatever their sign
    x[2, 5] = torch.nan
    x[3, 5] = torch.inf  # times numbers of either sign
    for bias_of_one, expected in ((0.0, [300, 0, -1, -1]), (torch.nan, [-1] * 4), (torch.inf, [-1] * 4)):
        bias[900] = bias_of_one
        linear = NativeLinear(weight.clone(), bias.clone(), programs, Recorder(), 2, memory=HugePages())
        assert check_largest(linear, x).tolist() == expected
    nothing = NativeLinear(
        weight.clone(), torch.full_like(bias, -torch.inf), programs, Recorder(), 2, memory=HugePages()
    )
    assert check_largest(nothing, x[:2]).tolist() == [-1, -1]


@pytest.mark.parametrize(("num_out", "is_in_place"), [(96, True), (80, False)])
def test_a_weight_is_packed_in_its_own_place_where_panels_are_whole(
    operations: Operations, programs: Programs, num_out: int, is_in_place: bool
) -> None:
    kernels = NativeCpuKernels(operations, programs, 2)
    weight = kernels.empty_linear(num_out, 256, programs.dtype)
    original = torch.randn(num_out, 256, generator=torch.Generator().manual_seed(0)).to(programs.dtype)
    linear = kernels.pack_linear(weight.copy_(original), None)
    assert isinstance(linear, NativeLinear)
    assert (linear._packed.data_ptr() == weight.data_ptr()) == is_in_place
    per_lane, steps = 4 // programs.dtype.itemsize, 256 * programs.dtype.itemsize // 64
    outputs = torch.cat((original, torch.zeros(-num_out % 32, 256).to(programs.dtype)))
    outputs = outputs.view(-1, 2, 16, steps, 16, per_lane)
    orders = [(0, 3, 1, 4, 2, 5), (0, 3, 4, 1, 2, 5)]  # in tiles; without them, by lines
    if programs.dtype is torch.float16:
        orders = [(0, 3, 4, 1, 5, 2)]
    assert any(torch.equal(linear._packed, outputs.permute(order).flatten()) for order in orders)


def test_auto_takes_them_on_a_cpu(operations: Operations) -> None:
    kernels = select_kernels(CPU, torch.bfloat16)
    assert isinstance(kernels, NativeCpuKernels)
    assert (kernels.name, kernels.attention_backend) == ("cpu-native", "native")


def test_without_a_compiler_auto_falls_back_and_native_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ())
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    kernels = select_kernels(CPU, torch.bfloat16)
    assert isinstance(kernels, CpuKernels)
    assert kernels.slowness.startswith("no C++ compiler")
    assert kernels.slowness in caplog.text
    assert not select_kernels(CPU, torch.bfloat16, "cpu").slowness, "it is what was asked for"
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler"):
        select_kernels(CPU, torch.bfloat16, "cpu-native")
    assert not multiplies(CPU, torch.bfloat16)


def test_a_machine_where_nothing_can_be_written_is_told_and_auto_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match=r"cannot be kept: .*Not a directory, and .*; allowed: a home folder"):
        build.build_library()
    assert isinstance(select_kernels(CPU, torch.bfloat16), CpuKernels)
    assert "compiled kernels cannot be kept" in caplog.text
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(DeviceError, match="weft cannot be written to: Permission denied"):
        build.build_library()


def test_own_products_are_told_by_what_was_compiled(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.kernels.select.build_for", lambda _: library)
    own = load_programs(library) is not None
    assert multiplies(CPU, torch.float16) is multiplies(CPU, torch.float16, "cpu-native") is own
    assert not multiplies(CPU, torch.float16, "cpu")
    assert not multiplies(torch.device("cuda"), torch.float16)
