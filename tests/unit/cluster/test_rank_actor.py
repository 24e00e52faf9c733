import asyncio
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster import rank_actor
from cluster.models import PACKAGED
from cluster.rank_actor import RankActor
from cluster.rank_values import NodeShare, Outcome, RankPlace, RankSpec
from cluster.revision_files import RevisionText, digest_files
from parallel.errors import DeviceError
from parallel.random_model import write_random_model
from router.tls import InnerTls
from workers.config import CacheConfig, EngineConfig, ParallelConfig
from workers.errors import GroupFailedError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Codes that the process would have ended with; what a rank changes in its process is undone."""
    codes: list[int] = []
    interval_s = sys.getswitchinterval()
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(rank_actor, "_EXIT_DELAY_S", 0.0)
    monkeypatch.setattr(rank_actor, "configure_logging", lambda level: None)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")
    yield codes
    sys.setswitchinterval(interval_s)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_random_model(folder, CONFIG, 0, torch.float32, PACKAGED["weft-tiny"])
    return folder


def actor(
    folder: Path, *, inner_tls: InnerTls | None = None, text: RevisionText | None = None, **settings: object
) -> RankActor:
    engine = EngineConfig(model=str(folder), device="cpu", cache=CacheConfig(num_blocks=8), **settings)  # type: ignore[arg-type]
    share = NodeShare(num_ranks=1, num_cpus=1.0)
    return RankActor(
        RankSpec(replica_id="m-0.1", model="m", rank=0, engine=engine, node_share=share, inner_tls=inner_tls, text=text)
    )


async def run(rank: RankActor) -> Outcome:
    outcome = await asyncio.wait_for(rank.run("", 0), 300)  # the first may have to compile the kernels
    await asyncio.sleep(0.01)  # the end of the process is due after the answer
    return outcome


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def with_a_wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(31)
    save_file(tensors, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def with_another_family(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_a_tensor, ("has no tensor model.layers.1.mlp.up_proj.weight", "[64, 32]")),
        (with_a_wrong_shape, ("model.norm.weight has shape [31]; expected [32]",)),
        (cut_short, ("model.safetensors is not a complete safetensors file",)),
        (without_a_tokenizer, ("tokenizer.json",)),
        (gone, ("is no folder here",)),
        (with_another_family, ("model_type is 'mamba'; supported:", "llama")),
    ],
)
async def test_model_that_cannot_be_served_is_refused_and_the_process_ends(
    folder: Path, exits: list[int], spoil: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    spoil(folder)
    outcome = await run(actor(folder))
    assert outcome.is_refusal
    assert all(word in outcome.message for word in words), outcome.message
    assert "\n" not in outcome.message
    assert exits == [1]


async def test_setting_that_contradicts_the_model_is_refused(folder: Path, exits: list[int]) -> None:
    outcome = await run(actor(folder, max_context=65))
    assert outcome.is_refusal
    assert "max_context is 65" in outcome.message
    assert exits == [1]


async def test_group_without_its_other_ranks_fails_but_may_be_tried_again(
    folder: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.rank.JOIN_TIMEOUT_S", 0.2)
    rank = actor(folder, parallel=ParallelConfig(tensor_parallel=2))
    await rank.open_rendezvous()
    outcome = await run(rank)
    assert not outcome.is_refusal
    assert outcome.message.startswith("rank 0: ")
    assert exits == [1]


async def test_rank_whose_kernels_could_not_be_compiled_tells_why(
    folder: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: torch.dtype) -> Path:
        raise DeviceError("no C++ compiler")

    monkeypatch.setattr("parallel.kernels.cpu_native.build_for", refuse)
    rank = actor(folder)
    monkeypatch.setattr(rank, "_place", lambda: RankPlace(node="10.0.0.0", pid=1))
    ended = asyncio.create_task(run(rank))
    await asyncio.wait_for(rank.ready(), 60)
    assert (await rank.report()).slowness == "no C++ compiler"
    rank._on_sigterm()
    await ended


async def test_rank_whose_engine_fails_ends_its_process(
    folder: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = actor(folder)
    ended = asyncio.create_task(run(rank))
    await asyncio.wait_for(rank.ready(), 60)
    assert rank._replica is not None
    rank._replica._on_failure(RuntimeError("rank 1 is gone"))
    outcome = await ended
    assert (outcome.message, outcome.is_refusal) == ("rank 0: rank 1 is gone", False)
    assert exits == [1]


async def test_rank_whose_leader_is_lost_ends_its_process_whatever_it_waits_for(
    folder: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def follow_group(*_: object, on_lost: Callable[[GroupFailedError], object], **__: object) -> None:
        on_lost(GroupFailedError("rank 1 lost its leader"))
        may_end.wait(300)

    monkeypatch.setattr("workers.rank.follow_group", follow_group)
    rank = actor(folder)
    rank._spec = replace(rank._spec, rank=1)
    outcome = await run(rank)
    may_end.set()
    assert (outcome.message, outcome.is_refusal) == ("rank 1: rank 1 lost its leader", False)
    assert exits == [1]


@pytest.mark.parametrize(("is_expected", "level"), [(True, logging.INFO), (False, logging.WARNING)])
async def test_rank_that_is_sent_sigterm_warns_of_it_where_nobody_said_that_its_end_is_wanted(
    folder: Path, exits: list[int], caplog: pytest.LogCaptureFixture, is_expected: bool, level: int
) -> None:
    caplog.set_level(logging.INFO, "cluster.rank_actor")
    rank = actor(folder)
    ended = asyncio.create_task(run(rank))
    await asyncio.wait_for(rank.ready(), 60)
    if is_expected:
        await rank.expect_end()
    rank._on_sigterm()
    assert (await ended).message == "rank 0: was told to end by SIGTERM"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (level, "rank 0 of m-0.1 was sent SIGTERM"),
        (level, "rank 0 of m-0.1 ends: was told to end by SIGTERM"),
    ]
    assert exits == [1]


async def test_rank_without_its_tls_files_says_so_before_it_loads_and_may_be_tried_again(
    folder: Path, exits: list[int]
) -> None:
    tls = InnerTls(cert_file="/none/tls.crt", key_file="/none/tls.key", ca_file="/none/ca.crt")
    rank = actor(folder, inner_tls=tls)
    outcome = await run(rank)
    message = "rank 0: the TLS file /none/tls.crt cannot be read: No such file or directory"
    assert (outcome.message, outcome.is_refusal) == (message, False)
    assert await rank.progress() == 0
    assert exits == [1]


async def test_a_folder_that_was_changed_in_place_is_refused(folder: Path, exits: list[int]) -> None:
    text = RevisionText(path=str(folder), max_context=64, files=digest_files(folder))
    shutil.rmtree(folder)
    write_random_model(folder, CONFIG, 1, torch.float32, PACKAGED["weft-tiny"])
    outcome = await run(actor(folder, text=text))
    assert outcome.is_refusal
    assert f"{folder} on " in outcome.message
    assert "has another config, tokenizer or weights than when the revision was wanted" in outcome.message
    assert exits == [1]


@pytest.mark.usefixtures("exits")
async def test_rank_begins_where_the_folder_that_the_service_was_started_in_is_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    actor(folder)
    assert os.getcwd() == "/", "where torch can be imported"
