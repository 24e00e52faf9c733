"""Tokenizers of folders that only the controller has."""

import threading
from pathlib import Path

import grpc
import pytest
from helpers.cluster import write_tokenizer
from helpers.fake_control import FakeControl
from helpers.fake_replica import FakeReplica
from helpers.polling import poll, until
from helpers.router_harness import router_config, running_router
from weft.v1 import inference_pb2 as pb

from cluster.models import PACKAGED
from router.errors import ModelFilesError
from router.model_files import TokenizerLoader
from router.model_text import ModelText
from router.tokenizer import ModelTokenizer

TEXT = "Once upon a time"
FOLDER = PACKAGED["weft-tiny"]


async def test_router_elsewhere_reads_the_tokenizer_that_the_controller_has() -> None:
    async with (
        FakeControl(files={"/tiny": FOLDER}) as control,
        running_router(router_config(control=control.address), load_tokenizer=None) as router,
    ):
        control.set_replicas({})
        await until(lambda: control.files_asked == ["/tiny"])
        for _ in range(2):
            answer = await router.stub.Tokenize(pb.TokenizeRequest(model="tiny", text=TEXT), timeout=20)
            assert tuple(answer.token_ids) == ModelTokenizer.from_folder(FOLDER).encode(TEXT)
    assert control.files_asked == ["/tiny"], "once, and kept"


async def test_first_request_is_served_while_the_controller_is_away() -> None:
    async with FakeReplica("a") as a:
        control = FakeControl(files={"/tiny": FOLDER})
        await control.start()
        control.set_replicas({"a": a.address})
        async with running_router(router_config(control=control.address), load_tokenizer=None) as router:
            await poll(router.is_ready, True)
            await control.stop()
            answer = await router.stub.Tokenize(pb.TokenizeRequest(model="tiny", text=TEXT), timeout=20)
    assert tuple(answer.token_ids) == ModelTokenizer.from_folder(FOLDER).encode(TEXT)


async def test_router_that_stops_waits_for_no_files(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeControl() as control:
        control.gives_files = False
        control.set_replicas({})
        async with running_router(router_config(control=control.address), load_tokenizer=None):
            await until(lambda: control.files_asked == ["/tiny"])
            (loading,) = [thread for thread in threading.enumerate() if thread.name.startswith("tokenizer-load")]
        await until(lambda: not loading.is_alive())  # the process ends no sooner
    assert not [record for record in caplog.records if "cannot be loaded" in record.getMessage()]


async def test_client_is_told_which_files_are_missing() -> None:
    async with (
        FakeControl() as control,
        running_router(router_config(control=control.address), load_tokenizer=None) as router,
    ):
        control.set_replicas({})
        await router.wait_ready(0)
        with pytest.raises(grpc.aio.AioRpcError, match="/tiny cannot be read on this machine, and the") as error:
            await router.stub.Tokenize(pb.TokenizeRequest(model="tiny", text=TEXT), timeout=20)
    assert error.value.code() is grpc.StatusCode.INTERNAL


async def test_folder_without_a_tokenizer_is_named_as_the_controller_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with (
        FakeControl(files={"/tiny": tmp_path}) as control,
        running_router(router_config(control=control.address), load_tokenizer=None) as router,
    ):
        control.set_replicas({})
        await router.wait_ready(0)
        with pytest.raises(grpc.aio.AioRpcError, match="/tiny has no tokenizer; looked for"):
            await router.stub.Tokenize(pb.TokenizeRequest(model="tiny", text=TEXT), timeout=20)


def test_folder_that_is_here_is_read_here() -> None:
    load = TokenizerLoader(router_config(control="127.0.0.1:1"))
    assert load(ModelText(path=str(FOLDER))).encode(TEXT)
    for path in ("/nowhere", f"/{300 * 'x'}"):  # the second cannot be looked at, as what is in the home of another user
        with pytest.raises(ModelFilesError, match="did not give its files: UNAVAILABLE"):
            load(ModelText(path=path))
    with pytest.raises(ModelFilesError, match="/nowhere has no tokenizer"):
        TokenizerLoader(router_config("127.0.0.1:1"))(ModelText(path="/nowhere"))


def test_folder_that_has_other_files_than_the_replicas_is_not_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "one")
    load = TokenizerLoader(router_config("127.0.0.1:1"))
    digest = ModelTokenizer.from_folder(tmp_path).digest
    assert load(ModelText(path=str(tmp_path), digest=digest)).digest == digest
    write_tokenizer(tmp_path, "two")
    with pytest.raises(ModelFilesError, match="has another tokenizer, chat template or generation config than when"):
        load(ModelText(path=str(tmp_path), digest=digest))
    assert load(ModelText(path=str(tmp_path), digest=f"0{digest}")), "of a version that makes it otherwise"
