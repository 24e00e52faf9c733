"""Each rank reads its own slices and no more; what is wrong with a checkpoint is said by file and tensor."""

import json
import re
import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.read_weights import read_weights
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel import checkpoint
from parallel import decoder as decoder_module
from parallel.checkpoint import load_decoder
from parallel.decoder import Decoder
from parallel.description import DecoderDescription
from parallel.dtypes import DTYPES, checkpoint_dtype, resolve_dtype
from parallel.errors import CheckpointError, ConfigError
from parallel.families.registry import describe_model, family_of
from parallel.kernels.base import ExpertWeights
from parallel.kernels.linears import PackedExperts, PackedLinear
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.select import choose_dtype
from parallel.mesh import Axis, Mesh
from parallel.weight_index import PICKLED, SAFETENSORS
from parallel.weight_reads import OpenFiles, WeightRead

CPU = torch.device("cpu")
SINGLE_FILE, INDEX_FILE = SAFETENSORS.single, SAFETENSORS.index


def _mesh(tp_rank: int = 0, tp: int = 1, stage: int = 0, pp: int = 1) -> Mesh:
    """A place in a mesh whose other ranks do not exist: enough to load, which takes no collective."""
    return Mesh(tp=Axis(size=tp, rank=tp_rank), pp=Axis(size=pp, rank=stage))


def _decoder(description: DecoderDescription, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(description, mesh=mesh, device=CPU, dtype=dtype, kernels=ReferenceKernels())


def _load(folder: Path, mesh: Mesh | None = None) -> tuple[Decoder, int]:
    decoder = _decoder(describe_model(folder), mesh or _mesh())
    return decoder, read_weights(decoder, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def _rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of the single file, or remove them."""
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    (folder / SINGLE_FILE).unlink()  # the tensors are mapped from it
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def _shard(folder: Path, num_shards: int = 3) -> None:
    """Turn the single file into several with an index."""
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    weight_map = {}
    for i in range(num_shards):
        file = f"part-{i}.safetensors"
        part = dict(list(tensors.items())[i::num_shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", ["llama", "llama-bias", "llama-tied", "qwen2", "qwen3"])
def test_every_parameter_gets_its_tensor(name: str) -> None:
    folder = tiny_model(name)
    tensors = load_file(folder / SINGLE_FILE)

    decoder, num_bytes = _load(folder)

    family = family_of(decoder.description)
    for parameter in decoder.sharded_parameters():
        for piece in parameter.pieces:
            assert torch.equal(parameter.target(piece), tensors[family.tensor_name(piece.source)])
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-bias"])
def test_each_of_two_ranks_reads_about_half_the_bytes(name: str) -> None:
    folder = tiny_model(name)
    full = sum(tensor.nbytes for tensor in load_file(folder / SINGLE_FILE).values())

    read = [_load(folder, _mesh(tp_rank=rank, tp=2))[1] for rank in range(2)]

    # norms and the biases of row-parallel layers are read by both
    assert all(full * 0.49 < num_bytes < full * 0.52 for num_bytes in read)
    assert sum(read) >= full


def test_ranks_hold_disjoint_halves_that_make_the_whole() -> None:
    folder = tiny_model("llama")
    tensors = load_file(folder / SINGLE_FILE)
    family = family_of(describe_model(folder))
    parts: dict[str, list[Tensor]] = {}

    for rank in range(2):
        decoder, _ = _load(folder, _mesh(tp_rank=rank, tp=2))
        for parameter in decoder.sharded_parameters():
            for piece in parameter.pieces:
                parts.setdefault(piece.source, []).append(parameter.target(piece))

    for dim, source in ((0, "layers.1.attention.k.weight"), (1, "layers.2.mlp.down.weight"), (0, "embedding.weight")):
        assert torch.equal(torch.cat(parts[source], dim), tensors[family.tensor_name(source)])


def test_stages_read_only_their_layers() -> None:
    folder = tiny_model("llama")
    full = sum(tensor.nbytes for tensor in load_file(folder / SINGLE_FILE).values())

    first, first_bytes = _load(folder, _mesh(stage=0, pp=2))
    last, last_bytes = _load(folder, _mesh(stage=1, pp=2))

    def sources(decoder: Decoder) -> set[str]:
        return {piece.source for parameter in decoder.sharded_parameters() for piece in parameter.pieces}

    assert first_bytes + last_bytes == full
    assert sources(first).isdisjoint(sources(last))
    assert "embedding.weight" in sources(first)
    assert "head.weight" in sources(last)


def test_tied_head_on_another_stage_reads_the_embedding() -> None:
    folder = tiny_model("llama-tied")
    last, _ = _load(folder, _mesh(stage=1, pp=2))
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"]
    head = next(p for p in last.sharded_parameters() if p.pieces[0].source == "embedding.weight")
    assert torch.equal(head.target(head.pieces[0]), embedding)


def test_tied_embedding_is_found_under_the_name_of_the_head(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama-tied"), tmp_path / "model"))
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"]
    _rewrite(folder, **{"model.embed_tokens.weight": None, "lm_head.weight": embedding})

    decoder, _ = _load(folder)

    parameter = next(iter(decoder.sharded_parameters()))
    assert torch.equal(parameter.tensor, embedding)


def test_sharded_checkpoint_loads_as_the_single_file_does(folder: Path) -> None:
    single, single_bytes = _load(folder)
    _shard(folder)

    sharded, sharded_bytes = _load(folder)

    assert sharded_bytes == single_bytes
    for a, b in zip(single.sharded_parameters(), sharded.sharded_parameters(), strict=True):
        assert torch.equal(a.tensor, b.tensor)


@pytest.mark.parametrize("batch_bytes", [4, 400, 20000])
@pytest.mark.parametrize("rank", [0, 1])
def test_slices_read_in_small_parts_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, batch_bytes: int
) -> None:
    whole, whole_bytes = _load(folder, _mesh(tp_rank=rank, tp=2))
    monkeypatch.setattr("parallel.checkpoint._MAPPED_FRACTION", 0.0)
    monkeypatch.setattr("parallel.checkpoint._MIN_BATCH_BYTES", batch_bytes)

    parts, parts_bytes = _load(folder, _mesh(tp_rank=rank, tp=2))

    assert parts_bytes == whole_bytes
    for a, b in zip(whole.sharded_parameters(), parts.sharded_parameters(), strict=True):
        assert torch.equal(a.tensor, b.tensor)


@pytest.mark.parametrize("max_touched", [1, 20, 1000])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("dim", "part"), [(0, range(2, 5)), (1, range(2, 5)), (0, range(6, 6))])
def test_slices_are_cut_into_rows_that_touch_no_more_than_allowed(
    dim: int, part: range, is_transposed: bool, max_touched: int
) -> None:
    """Of columns whole rows; a rank may have no row."""
    wanted = torch.zeros(6, 8).narrow(dim, part.start, len(part))
    target = wanted.t() if is_transposed else wanted
    read = WeightRead(
        name="w", shape=(6, 8), dim=dim, start=part.start, stop=part.stop, target=target, is_transposed=is_transposed
    )
    parts = list(read.cut(max_touched))
    assert all(part.num_touched <= max(max_touched, 8) for part in parts)
    assert sum(part.num_touched for part in parts) == read.num_touched == 8 * len(wanted)
    assert sum(part.num_elements for part in parts) == wanted.numel()


@pytest.mark.parametrize(
    ("max_touched", "batches"),
    [
        (24, [("a", [16, 8]), ("a", [8]), ("a", [24]), ("a", [24]), ("b", [16]), ("b", [16])]),
        (1000, [("a", [16, 8, 8, 48]), ("b", [32])]),
        (4, [*[("a", [8])] * 10, *[("b", [8])] * 4]),  # less than a row
    ],
)
def test_a_reader_is_given_as_much_of_a_file_as_it_may_touch(
    max_touched: int, batches: list[tuple[str, list[int]]]
) -> None:
    def rows(count: int) -> WeightRead:
        return WeightRead(name="w", shape=(count, 8), dim=0, start=0, stop=count, target=torch.zeros(count, 8))

    plan = {Path("a"): [rows(2), rows(1), rows(1), rows(6)], Path("b"): [rows(4)]}
    given = checkpoint._batches(plan, max_touched)
    assert [(batch.file.name, [part.num_touched for part in batch.reads]) for batch in given] == batches


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_to_the_dtype_asked_for(folder: Path, stored: torch.dtype) -> None:
    weight = load_file(folder / SINGLE_FILE)["model.norm.weight"].to(stored)
    _rewrite(folder, **{"model.norm.weight": weight})

    decoder = _decoder(describe_model(folder), _mesh(), torch.bfloat16)
    read_weights(decoder, folder)

    norm = next(p for p in decoder.sharded_parameters() if p.pieces[0].source == "final_norm.weight")
    assert norm.tensor.dtype == torch.bfloat16
    assert torch.equal(norm.tensor, weight.to(torch.bfloat16))


def test_progress_grows_to_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.checkpoint._MIN_BATCH_BYTES", 1 << 12)
    seen: list[float] = []

    load_decoder(
        folder, mesh=_mesh(), device=CPU, dtype=torch.float32, kernels=ReferenceKernels(), progress=seen.append
    )

    assert len(seen) > 10
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1] == 1.0


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_next_parts_are_read_while_one_is_laid_out_as_far_as_memory_allows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    monkeypatch.setattr("parallel.checkpoint._MAX_BEGUN", 0.9 if is_allowed else 0.0)
    copied: list[str] = []
    is_copied = threading.Event()
    copy, lay_out = WeightRead.copy, checkpoint._lay_out
    seen_first: list[bool] = []

    def noting_copy(read: WeightRead, file: Path, opened: OpenFiles) -> int:
        num_bytes = copy(read, file, opened)
        copied.append(read.name)
        if ".layers.0." in read.name:
            is_copied.set()
        return num_bytes

    def waiting_lay_out(finish: Callable[[], None]) -> None:
        if not seen_first:  # the embedding
            seen_first.append(is_copied.wait(30.0 if is_allowed else 0.0))
            assert any("layers.0" in name for name in copied) == is_allowed
        lay_out(finish)

    monkeypatch.setattr(WeightRead, "copy", noting_copy)
    monkeypatch.setattr("parallel.checkpoint._lay_out", waiting_lay_out)
    load_decoder(folder, mesh=_mesh(), device=CPU, dtype=torch.float32, kernels=ReferenceKernels())
    assert seen_first == [is_allowed]


class _CopyingKernels(ReferenceKernels):
    """Lays out copies of all matrices."""

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        return super().pack_linear(weight_OI.clone(), bias_O)

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        return super().pack_head(weight_VE.clone(), bias_V, is_shared=is_shared)

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        into_XJE, down_XEI = weights.into_XJE.clone(), weights.down_XEI.clone()
        return super().pack_experts(replace(weights, into_XJE=into_XJE, down_XEI=down_XEI))


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral", "qwen2_moe"])
def test_weights_that_the_kernels_have_copied_are_let_go(name: str) -> None:
    folder = tiny_model(name)
    decoder = Decoder(describe_model(folder), mesh=_mesh(), device=CPU, dtype=torch.float32, kernels=_CopyingKernels())
    memory = {
        parameter.pieces[0].source: weakref.ref(parameter.tensor.untyped_storage())
        for parameter in decoder.sharded_parameters()
        if parameter.tensor.dim() == 2
    }
    assert all(get() is not None for get in memory.values())

    checkpoint.load_weights(decoder, folder)

    assert [name for name, get in memory.items() if get() is not None] == ["embedding.weight"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_converted_a_few_at_a_time_are_the_same(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bf16 from float32; of gpt2 transposed, of mixtral some of the experts."""
    description, mesh = describe_model(tiny_model(name)), _mesh(tp_rank=rank, tp=2)
    exact, converted = (_decoder(description, mesh, dtype) for dtype in (torch.float32, torch.bfloat16))
    read_weights(exact, tiny_model(name))
    monkeypatch.setattr("parallel.weight_reads._CONVERTED_ELEMENTS", 100)
    read_weights(converted, tiny_model(name))
    for a, b in zip(exact.sharded_parameters(), converted.sharded_parameters(), strict=True):
        assert torch.equal(a.tensor.to(b.tensor.dtype), b.tensor)


@pytest.mark.parametrize("max_context", [0, 257])
def test_context_beyond_that_of_the_model_is_refused(folder: Path, max_context: int) -> None:
    with pytest.raises(ConfigError, match=f"max_context is {max_context}; allowed by the model: 1 to 256"):
        load_decoder(
            folder, mesh=_mesh(), device=CPU, dtype=torch.float32, kernels=ReferenceKernels(), max_context=max_context
        )


@pytest.mark.parametrize("max_context", [1, 100, 256])
def test_shorter_context_is_served(folder: Path, max_context: int) -> None:
    decoder = load_decoder(
        folder, mesh=_mesh(), device=CPU, dtype=torch.float32, kernels=ReferenceKernels(), max_context=max_context
    )
    assert decoder.description.max_context == max_context


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def test_missing_tensor_is_named(folder: Path) -> None:
    _rewrite(folder, **{Q_PROJ: None})
    with pytest.raises(CheckpointError, match=rf"{folder} has no tensor {Q_PROJ}; expected with shape \[64, 64\]"):
        _load(folder)


def test_wrong_shape_is_named(folder: Path) -> None:
    _rewrite(folder, **{Q_PROJ: torch.zeros(64, 32)})
    with pytest.raises(
        CheckpointError, match=rf"{SINGLE_FILE}: tensor {Q_PROJ} has shape \[64, 32\]; expected \[64, 64\]"
    ):
        _load(folder)


def test_transposed_tensor_is_named(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    _rewrite(folder, **{name: torch.zeros(64, 96)})
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[64, 96\]; expected \[96, 64\]"):
        _load(folder)


class _NoMemory(ReferenceKernels):
    """Kernels on a machine without room for a linear layer."""

    def empty_linear(self, num_out: int, num_in: int, dtype: torch.dtype) -> Tensor:
        raise RuntimeError(f"no memory for {num_out} x {num_in}")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_attention_heads": 16, "head_dim": 1 << 24}, CheckpointError, r"expected \[268435456, 64\]"),
        ({"vocab_size": 1 << 30}, CheckpointError, r"embed_tokens.weight has shape \[320, 64\]; expected \[1073741824"),
        ({"num_hidden_layers": 4}, CheckpointError, "no tensor model.layers.3"),
        ({"max_position_embeddings": 1 << 30}, RuntimeError, "no memory for 64 x 64"),
    ],
)
def test_a_model_that_has_no_room_may_be_another_than_the_config_says(
    folder: Path, changes: dict[str, int], error: type[Exception], message: str
) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    peers = Mesh(tp=Axis(size=2, rank=1, group=object(), local=object()), pp=Axis())  # type: ignore[arg-type]

    with pytest.raises(error, match=message):
        load_decoder(folder, mesh=peers, device=CPU, dtype=torch.float32, kernels=_NoMemory())


@pytest.mark.parametrize(
    ("name", "table", "changes", "error", "message"),
    [
        ("llama", "LayerRotations", {}, ConfigError, "for tables of 256 positions; allowed: a smaller max_context"),
        ("bloom", "key_bias", {}, ConfigError, "for tables of 2048 positions; allowed: a smaller max_context"),
        ("llama", "LayerRotations", {"num_hidden_layers": 4}, CheckpointError, "no tensor model.layers.3"),
    ],
)
def test_a_context_for_whose_tables_there_is_no_memory_is_told_where_all_else_is_right(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    table: str,
    changes: dict[str, int],
    error: type[Exception],
    message: str,
) -> None:
    folder = Path(shutil.copytree(tiny_model(name), tmp_path / "model"))
    _set_config(folder, **changes)
    make = getattr(decoder_module, table)

    def refuse(*args: Any, device: torch.device) -> object:
        if args[-1] > 1:  # max_context
            raise RuntimeError("can't allocate memory\nat some place")
        return make(*args, device=device)

    monkeypatch.setattr(decoder_module, table, refuse)

    with pytest.raises(error, match=message):
        load_decoder(folder, mesh=_mesh(), device=CPU, dtype=torch.float32, kernels=ReferenceKernels())


@pytest.mark.parametrize(("dtype", "name"), [(torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_dtype_that_is_no_weight_is_named(folder: Path, dtype: torch.dtype, name: str) -> None:
    _rewrite(folder, **{Q_PROJ: torch.zeros(64, 64).to(dtype)})
    with pytest.raises(CheckpointError, match=rf"tensor {Q_PROJ} has dtype {name}; allowed: F64, F32, F16, BF16"):
        _load(folder)


DAMAGED = {
    "gpt2": ("transformer.h.1.mlp.c_fc.weight", [32, 128]),  # stored transposed
    "falcon": ("transformer.h.0.self_attention.query_key_value.weight", [64, 32]),  # fused
    "gemma2": ("model.layers.1.pre_feedforward_layernorm.weight", [32]),
}


@pytest.mark.parametrize("is_pickled", [False, True])
@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("damage", ["missing", "renamed", "transposed", "dtype"])
def test_damaged_tensor_of_any_layout_is_named(tmp_path: Path, name: str, damage: str, is_pickled: bool) -> None:
    folder = Path(shutil.copytree(tiny_model(name), tmp_path / "model"))
    tensor, shape = DAMAGED[name]
    weight = load_file(folder / SINGLE_FILE)[tensor]
    assert list(weight.shape) == shape
    match damage:
        case "missing":
            _rewrite(folder, **{tensor: None})
            message = rf"{folder} has no tensor {tensor}; expected with shape {shape}"
        case "renamed":
            _rewrite(folder, **{tensor: None, tensor + "s": weight})
            message = rf"{folder} has no tensor {tensor}; expected with shape {shape}"
        case "transposed":
            weight = weight.t().contiguous() if weight.dim() == 2 else weight[None]
            _rewrite(folder, **{tensor: weight})
            message = rf"tensor {tensor} has shape {list(weight.shape)}; expected {shape}"
        case _:
            _rewrite(folder, **{tensor: weight.to(torch.int32)})
            message = rf"tensor {tensor} has dtype I32; allowed: F64, F32, F16, BF16"
    if is_pickled:
        torch.save(load_file(folder / SINGLE_FILE), folder / PICKLED.single)
        (folder / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=message.replace("[", r"\[").replace("]", r"\]")):
        _load(folder)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon", "phi3", "bloom", "internlm2", "stablelm-12b"])
def test_ranks_read_their_slices_of_fused_tensors_only(name: str) -> None:
    folder = tiny_model(name)
    tensors = load_file(folder / SINGLE_FILE)
    full = sum(tensor.nbytes for tensor in tensors.values())
    # norms, positions and the biases of row-parallel layers are read by both
    shared = sum(t.nbytes for key, t in tensors.items() if t.dim() == 1 or "wpe" in key)

    read = [_load(folder, _mesh(tp_rank=rank, tp=2))[1] for rank in range(2)]

    assert full <= sum(read) <= full + shared
    assert abs(read[0] - read[1]) <= shared


@pytest.mark.parametrize("batch_bytes", [4, 400])
@pytest.mark.parametrize("name", ["gpt2", "falcon"])
def test_fused_slices_read_in_small_parts_are_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, batch_bytes: int
) -> None:
    whole, _ = _load(tiny_model(name), _mesh(tp_rank=1, tp=2))
    monkeypatch.setattr("parallel.checkpoint._MAPPED_FRACTION", 0.0)
    monkeypatch.setattr("parallel.checkpoint._MIN_BATCH_BYTES", batch_bytes)
    parts, _ = _load(tiny_model(name), _mesh(tp_rank=1, tp=2))
    for a, b in zip(whole.sharded_parameters(), parts.sharded_parameters(), strict=True):
        assert torch.equal(a.tensor, b.tensor)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("gpt2", "transformer.", ""),
        ("opt", "model.decoder.", "decoder."),
        ("gemma3", "language_model.model.", "model.language_model."),
    ],
)
def test_names_without_their_usual_beginning_are_found(tmp_path: Path, name: str, old: str, new: str) -> None:
    folder = Path(shutil.copytree(tiny_model(name), tmp_path / "model"))
    expected, _ = _load(folder)
    tensors = {key.replace(old, new): value for key, value in load_file(folder / SINGLE_FILE).items()}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})

    decoder, _ = _load(folder)

    for a, b in zip(expected.sharded_parameters(), decoder.sharded_parameters(), strict=True):
        assert torch.equal(a.tensor, b.tensor)


def test_damage_is_found_before_anything_is_copied(folder: Path) -> None:
    _rewrite(folder, **{"lm_head.weight": torch.zeros(3)})
    decoder = _decoder(describe_model(folder), _mesh())
    for parameter in decoder.sharded_parameters():
        parameter.tensor.fill_(7.0)

    with pytest.raises(CheckpointError):
        read_weights(decoder, folder)

    assert all((parameter.tensor == 7.0).all() for parameter in decoder.sharded_parameters())


def test_readers_have_ended_where_loading_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would read files that are closed."""

    def fail(read: WeightRead, file: Path, opened: OpenFiles) -> int:
        raise CheckpointError(f"{file} has become shorter")

    monkeypatch.setattr(WeightRead, "copy", fail)
    with pytest.raises(CheckpointError, match="has become shorter"):
        _load(folder)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("weights")]


def _truncate(data: bytes) -> bytes:
    return data[:-100]


def _cut_in_header(data: bytes) -> bytes:
    return data[:50]


def _empty(data: bytes) -> bytes:
    return b""


def _garbage(data: bytes) -> bytes:
    return b"\xff" * len(data)


@pytest.mark.parametrize("damage", [_truncate, _cut_in_header, _empty, _garbage])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_corrupt_file_is_named(folder: Path, damage, is_sharded: bool) -> None:  # type: ignore[no-untyped-def]
    if is_sharded:
        _shard(folder)
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(CheckpointError, match=f"{file} is not a complete safetensors file"):
        _load(folder)


def test_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"{folder} has no weights; looked for {SINGLE_FILE}, {INDEX_FILE}, py"):
        _load(folder)


def test_weights_that_are_a_link_to_nowhere_are_named(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / SINGLE_FILE).symlink_to("../blobs/1")
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE} is a link to \.\./blobs/1, which is no file"):
        _load(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    _shard(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors does not exist, but model\.safetensors\.index"):
        _load(folder)


def test_tensor_that_is_not_where_the_index_says_is_named(folder: Path) -> None:
    _shard(folder)
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][Q_PROJ] = {"part-0.safetensors": "part-1.safetensors"}.get(
        index["weight_map"][Q_PROJ], "part-0.safetensors"
    )
    (folder / INDEX_FILE).write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match=rf"part-\d\.safetensors has no tensor {Q_PROJ}"):
        _load(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": null}']
)
def test_unreadable_index_is_named(folder: Path, content: str) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} is not an index"):
        _load(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "a" * 256, "\u00e4" * 128])
def test_index_can_name_files_beside_it_only(folder: Path, name: str) -> None:
    _shard(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {Q_PROJ: name}}))
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} names {re.escape(name)}; allowed: files beside it"):
        _load(folder)


def test_index_can_name_a_file_with_the_longest_of_names(folder: Path) -> None:
    name = "a" * 243 + ".safetensors"
    (folder / SINGLE_FILE).rename(folder / name)
    tensors = load_file(folder / name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    assert _load(folder)[1] == sum(tensor.nbytes for tensor in tensors.values())


class _FakeDevice:
    torch_device = torch.device("cpu")

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return {torch.bfloat16: torch.float16, torch.float16: torch.float32}.get(checkpoint_dtype, checkpoint_dtype)


def _any(_: torch.dtype) -> bool:
    return True


def _none(_: torch.dtype) -> bool:
    return False


def _set_config(folder: Path, **values: str | int | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    config |= values
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_dtype_is_what_the_device_makes_of_the_config(folder: Path, key: str) -> None:
    _set_config(folder, **{key: "bfloat16"})
    assert checkpoint_dtype(folder) == torch.bfloat16
    assert resolve_dtype("auto", folder, _FakeDevice(), multiplies=_none) == torch.float16  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_auto_dtype_stays_that_which_the_kernels_multiply_themselves(folder: Path, name: str) -> None:
    _set_config(folder, dtype=name)
    assert resolve_dtype("auto", folder, _FakeDevice(), multiplies=_any) == DTYPES[name]  # type: ignore[arg-type]


def test_dtype_is_chosen_by_what_the_kernels_multiply(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.kernels.select.multiplies", lambda *args: args[2] == "cpu-native")
    _set_config(folder, dtype="bfloat16")
    device = _FakeDevice()
    assert choose_dtype("auto", folder, device, "cpu-native") == torch.bfloat16  # type: ignore[arg-type]
    assert choose_dtype("auto", folder, device, "cpu") == torch.float16  # type: ignore[arg-type]


def test_auto_dtype_without_config_is_that_of_the_weights(folder: Path) -> None:
    _set_config(folder)
    assert checkpoint_dtype(folder) == torch.float32


def test_named_dtype_wins(folder: Path) -> None:
    assert resolve_dtype("bfloat16", folder, _FakeDevice(), multiplies=_none) == torch.bfloat16  # type: ignore[arg-type]


def test_unknown_dtypes_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8'; allowed: auto, float32, float16, bfloat16"):
        resolve_dtype("int8", folder, _FakeDevice(), multiplies=_none)  # type: ignore[arg-type]
    _set_config(folder, torch_dtype="float8")
    with pytest.raises(ConfigError, match=r"config\.json: torch_dtype is 'float8'; allowed: float32"):
        checkpoint_dtype(folder)
