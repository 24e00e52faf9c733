"""The operator's commands against a controller that says what a test wants."""

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cluster import FakeClock
from rich.console import Console
from weft.v1 import control_pb2

from cluster.cli import app
from cluster.config import build_spec, load_cluster_file
from cluster.control_client import ControlClient
from cluster.errors import ClusterConfigError, ControllerError, ServiceStoppedError
from cluster.log_reader import LogReader, LogSource, read_piece
from cluster.models import PACKAGED
from cluster.operate import (
    apply_file,
    drain_target,
    is_as_wanted,
    parse_settings,
    roll_model,
    scale_model,
    stop_service,
    this_node,
)
from cluster.patience import Patience
from cluster.preflight import check_model
from cluster.show_logs import LineSplitter, show_logs
from cluster.wanted import apply

READY, STARTING = control_pb2.GROUP_STATE_READY, control_pb2.GROUP_STATE_STARTING
FAILED = control_pb2.GROUP_STATE_FAILED


def model(*groups: tuple[int, control_pb2.GroupState.ValueType], wanted: int = 2) -> control_pb2.ModelStatus:
    return control_pb2.ModelStatus(
        name="m",
        wanted_replicas=wanted,
        revision=2,
        groups=[
            control_pb2.GroupStatus(
                group_id=f"m-{index}", replica_id=f"m-{index}.1", state=state, revision=revision, detail="why"
            )
            for index, (revision, state) in enumerate(groups)
        ],
    )


@dataclass
class FakeClient:
    """A controller's end whose statuses follow each other."""

    statuses: list[control_pb2.ModelStatus | BaseException] = field(default_factory=list)
    changes: list[control_pb2.Change] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    pieces: list[list[control_pb2.LogChunk] | BaseException] = field(default_factory=list)
    stops: list[BaseException | None] = field(default_factory=list)
    is_stopping: bool = False

    def shut_down(self, grace_s: float) -> None:
        self.calls.append(grace_s)
        if (error := self.stops.pop(0)) is not None:
            raise error

    def status(self) -> control_pb2.GetStatusResponse:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(status, BaseException):
            raise status
        controller = control_pb2.ControllerStatus(stopping=self.is_stopping)
        return control_pb2.GetStatusResponse(models=[status], controller=controller)

    def apply(self, settings: Mapping[str, Any], *, dry_run: bool) -> Sequence[control_pb2.Change]:
        self.calls.append((settings, dry_run))
        return self.changes

    def scale(self, model: str, replicas: int) -> int:
        self.calls.append((model, replicas))
        return 1

    def rollout(self, model: str, settings: Mapping[str, Any], *, undo: bool) -> control_pb2.RolloutResponse:
        self.calls.append((model, settings, undo))
        change = control_pb2.Change(kind=control_pb2.CHANGE_KIND_ROLLOUT, name=model, details=["a: 1 -> 2"])
        return control_pb2.RolloutResponse(change=change, revision=2)

    def drain(self, target: str, *, grace_s: float | None, undo: bool) -> control_pb2.DrainResponse:
        self.calls.append((target, grace_s, undo))
        return control_pb2.DrainResponse(replica_ids=["m-0.1"], node_id="" if target.startswith("m-") else "n1")

    def read_logs(self, target: str, offsets: Mapping[str, int], *, tail_bytes: int) -> control_pb2.ReadLogsResponse:
        self.calls.append(dict(offsets))
        piece = self.pieces.pop(0)
        if isinstance(piece, BaseException):
            raise piece
        return control_pb2.ReadLogsResponse(chunks=piece, stopping=self.is_stopping)

    @property
    def client(self) -> ControlClient:
        return cast(ControlClient, self)


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(out: io.StringIO) -> Console:
    return Console(file=out, width=200)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.operate._POLL_S", 0.0)
    monkeypatch.setattr("cluster.patience._RETRY_S", 0.0)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (model((2, READY), (2, READY)), True),
        (model((2, READY)), False),
        (model((2, READY), (1, READY)), False),
        (model((2, READY), (2, STARTING)), False),
        (model((2, READY), (2, READY), (1, READY)), False),
        (model(wanted=0), True),
    ],
)
def test_model_is_as_wanted_when_nothing_is_left_to_do(status: control_pb2.ModelStatus, expected: bool) -> None:
    assert is_as_wanted(status) is expected


def test_wait_lasts_until_the_model_is_as_wanted(console: Console, out: io.StringIO) -> None:
    fake = FakeClient(statuses=[model((2, READY)), model((2, READY), (2, STARTING)), model((2, READY), (2, READY))])
    scale_model(fake.client, "m", 2, console, wait_s=5.0)
    assert len(fake.statuses) == 1
    assert out.getvalue().splitlines()[0] == "m: 1 -> 2 replicas"
    assert out.getvalue().splitlines()[-1] == "As wanted."


def test_brackets_of_a_name_are_no_style(console: Console, out: io.StringIO) -> None:
    named = model((2, READY), (2, READY), (2, FAILED))
    named.name, named.groups[2].detail = "m[/v2]", "no [/file]"
    client = FakeClient(statuses=[named]).client
    scale_model(client, "m[/v2]", 2, console, wait_s=None)
    roll_model(client, "m[/v2]", [], console, undo=False, wait_s=None)
    drain_target(client, "m[/v2]", console, grace_s=None, undo=True, wait_s=None)
    told = ("m[/v2]: 1 -> 2 replicas", "m[/v2] goes to revision 2", "m[/v2] takes groups again")
    assert all(line in out.getvalue().splitlines() for line in told)
    drain_target(client, "m-0", console, grace_s=None, undo=False, wait_s=None)
    assert "has failed: no [/file]" in out.getvalue()


def test_number_set_by_hand_is_where_a_model_goes_on_that_scales_by_itself(console: Console, out: io.StringIO) -> None:
    scaled = model((2, READY))
    scaled.autoscaling.max_replicas = 4
    scale_model(FakeClient(statuses=[scaled]).client, "m", 2, console, wait_s=None)
    assert out.getvalue().splitlines() == [
        "m: 1 -> 2 replicas",
        "It scales from 0 to 4 by itself, and goes on from this number.",
    ]


def test_wait_ends_with_the_group_that_cannot_start(console: Console) -> None:
    fake = FakeClient(statuses=[model((2, READY), (2, FAILED))])
    with pytest.raises(ControllerError, match="m-1 cannot start: why"):
        roll_model(fake.client, "m", ["a=2"], console, undo=False, wait_s=5.0)


def test_wait_ends_when_the_service_is_stopped_by_another(console: Console) -> None:
    fake = FakeClient(statuses=[model((2, READY))], is_stopping=True)
    with pytest.raises(ControllerError, match="the service is stopping"):
        scale_model(fake.client, "m", 2, console, wait_s=5.0)


@pytest.mark.parametrize("groups", [(), ((1, READY),)])
def test_wait_ends_when_the_model_is_removed_by_another(
    console: Console, groups: tuple[tuple[int, control_pb2.GroupState.ValueType], ...]
) -> None:
    removed = model(*groups, wanted=0)
    removed.revision = 0
    with pytest.raises(ControllerError, match="m is no longer served: others have removed it"):
        scale_model(FakeClient(statuses=[removed]).client, "m", 0, console, wait_s=5.0)
    removed.name = "another one"
    with pytest.raises(ControllerError, match="m is no longer served"):
        roll_model(FakeClient(statuses=[removed]).client, "m", [], console, undo=False, wait_s=5.0)


def test_wait_ends_when_another_number_is_wanted_and_only_tells_it_of_a_model_that_scales_by_itself(
    console: Console, out: io.StringIO
) -> None:
    status = model((2, READY), wanted=1)
    with pytest.raises(ControllerError, match="others have changed m from 2 replicas to 1"):
        scale_model(FakeClient(statuses=[status]).client, "m", 2, console, wait_s=5.0)
    status.autoscaling.max_replicas = 4
    scale_model(FakeClient(statuses=[status]).client, "m", 2, console, wait_s=5.0)
    assert out.getvalue().splitlines()[-2:] == ["As wanted.", "It has scaled itself from 2 to 1 replicas."]
    scale_model(FakeClient(statuses=[status]).client, "m", 1, console, wait_s=5.0)
    assert out.getvalue().splitlines()[-1] == "As wanted."


def test_group_that_failed_before_the_rollout_does_not_end_the_wait(console: Console, out: io.StringIO) -> None:
    fake = FakeClient(statuses=[model((1, FAILED), (2, STARTING)), model((2, READY), (2, READY))])
    roll_model(fake.client, "m", ["a=2"], console, undo=False, wait_s=5.0)
    assert out.getvalue().splitlines()[-1] == "As wanted."


def test_wait_that_lasts_too_long_ends_and_says_how_groups_are(console: Console) -> None:
    fake = FakeClient(statuses=[model((2, READY), (2, STARTING))])
    with pytest.raises(ControllerError, match="not as wanted within 0 s: m-0 ready, m-1 starting"):
        scale_model(fake.client, "m", 2, console, wait_s=0.0)


def test_drain_waits_until_the_replica_is_gone_only(console: Console, out: io.StringIO) -> None:
    gone = model((2, READY), (2, STARTING))
    gone.groups[0].replica_id = "m-0.2"
    fake = FakeClient(statuses=[model((2, READY), (2, READY)), gone])
    drain_target(fake.client, "m-0", console, grace_s=3.0, undo=False, wait_s=5.0)
    assert fake.calls == [("m-0", 3.0, False)]
    lines = out.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("leaving: m-0.1", "Drained.")


LOST = ControllerError("no controller answers")


def test_wait_goes_on_with_the_successor_of_a_controller_that_dies_meanwhile(
    console: Console, out: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    rolling, done = model((1, READY), (2, STARTING)), model((2, READY), (2, READY))
    roll_model(
        FakeClient(statuses=[LOST, rolling, LOST, LOST, done]).client, "m", [], console, undo=False, wait_s=600.0
    )
    assert out.getvalue().splitlines()[-1] == "As wanted."
    assert capsys.readouterr().err == "no controller answers (asked again for 30 s)\n" * 2


def test_drain_and_its_wait_go_on_with_the_successor_of_a_controller_that_dies(
    console: Console, out: io.StringIO
) -> None:
    gone = model((2, READY), (2, STARTING))
    gone.groups[0].replica_id = "m-0.2"
    fake = FakeClient(statuses=[LOST, model((2, READY), (2, READY)), LOST, gone])
    drain_target(fake.client, "m-0", console, grace_s=None, undo=False, wait_s=600.0)
    assert out.getvalue().splitlines()[-1] == "Drained."


def test_wait_ends_in_time_where_no_controller_comes_back(console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeClient(statuses=[model((1, READY), (2, STARTING)), LOST])
    with pytest.raises(ControllerError, match="no controller answers"):
        roll_model(fake.client, "m", [], console, undo=False, wait_s=0.05)
    assert capsys.readouterr().err == "no controller answers (asked again for 0 s)\n"


def test_drain_of_a_node_tells_how_it_is_undone(console: Console, out: io.StringIO) -> None:
    client = FakeClient(statuses=[model((2, READY), (2, READY))]).client
    drain_target(client, "10.0.0.7", console, grace_s=None, undo=False, wait_s=None)
    assert out.getvalue().splitlines() == [
        "leaving: m-0.1",
        "10.0.0.7 takes no groups until: weft drain 10.0.0.7 --undo",
    ]


@pytest.mark.parametrize("leaving", [False, True])
def test_drain_tells_of_a_successor_that_has_failed(leaving: bool, console: Console, out: io.StringIO) -> None:
    after_rollout = model((1, READY), (2, FAILED))
    after_rollout.groups[1].leaving = leaving
    client = FakeClient(statuses=[after_rollout]).client
    drain_target(client, "m-0", console, grace_s=None, undo=False, wait_s=None)
    told = [] if leaving else ["nothing takes the place: m-1 has failed: why"]
    assert out.getvalue().splitlines() == ["leaving: m-0.1", *told]


def test_stop_goes_on_with_the_successor_of_a_controller_that_dies_meanwhile() -> None:
    lost = ControllerError("no controller answers")
    fake, told, clock = FakeClient(statuses=[model()], stops=[lost, lost, None]), list[str](), FakeClock()
    stop_service(fake.client, 3.0, Patience(told.append, sleep=clock.advance, clock=clock))
    assert (fake.calls, len(told)) == ([3.0, 3.0, 3.0], 1)


def test_apply_tells_each_change(console: Console, out: io.StringIO, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"models: [{{path: {tmp_path}, name: m}}]\nhost: 0.0.0.0\n")
    changes = [
        control_pb2.Change(kind=control_pb2.CHANGE_KIND_ADD, name="m", details=["1 x"]),
        control_pb2.Change(kind=control_pb2.CHANGE_KIND_REMOVE, name="n"),
        control_pb2.Change(kind=control_pb2.CHANGE_KIND_IGNORED, name="host"),
    ]
    fake = FakeClient(changes=changes)
    apply_file(fake.client, file, console, dry_run=True, wait_s=None)
    assert fake.calls[0][0]["models"][0]["path"] == str(tmp_path)
    assert out.getvalue().splitlines() == ["+ add m", "    1 x", "- remove n", "! ignored, read at start only: host"]


def test_wait_of_apply_ends_when_others_want_another_thing_of_one_of_its_models(
    console: Console, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"models: [{{path: {tmp_path}, name: m, replicas: 2}}]\n")
    other = model((2, READY), wanted=1)
    with pytest.raises(ControllerError, match="others have changed m from 2 replicas to 1"):
        apply_file(FakeClient(statuses=[other]).client, file, console, dry_run=False, wait_s=5.0)
    other.name = "another one"
    with pytest.raises(ControllerError, match="m is no longer served: others have removed it"):
        apply_file(FakeClient(statuses=[other]).client, file, console, dry_run=False, wait_s=5.0)


def test_wait_of_apply_leaves_a_model_that_scales_by_itself_its_number(
    console: Console, out: io.StringIO, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"models: [{{path: {tmp_path}, name: m, replicas: 2, max_replicas: 4, autoscaling: {{}}}}]\n")
    scaled = model((2, READY), wanted=1)
    scaled.autoscaling.max_replicas = 4
    apply_file(FakeClient(statuses=[scaled]).client, file, console, dry_run=False, wait_s=5.0)
    assert out.getvalue().splitlines()[-1] == "As wanted."


def test_apply_of_the_file_that_is_served_changes_nothing(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PACKAGED["weft-tiny"], tmp_path / "tiny-v1")
    for link in ("current", "weft-tiny"):
        (tmp_path / link).symlink_to("tiny-v1")
    file = tmp_path / "cluster.yaml"
    file.write_text("models: [{path: current}, {path: weft-tiny}, {name: other}]\n")
    monkeypatch.chdir(tmp_path)
    served = [check_model(model) for model in build_spec(load_cluster_file(file)).models]
    fake = FakeClient()
    apply_file(fake.client, file, console, dry_run=False, wait_s=None)
    monkeypatch.chdir("/")  # of the controller
    sent = [check_model(model) for model in build_spec(fake.calls[0][0]).models]
    assert [model.name for model in served] == ["current", "weft-tiny", "other"]
    assert apply(apply({}, served)[0], sent)[1] == []


def test_faulty_file_is_refused_before_anybody_is_asked(console: Console, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: [{pth: x}]\n")
    with pytest.raises(ClusterConfigError, match="unknown key"):
        apply_file(FakeClient().client, file, console, dry_run=False, wait_s=None)


def test_file_without_models_is_refused(console: Console, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    for text, message in (("", "an empty file"), ("host: 127.0.0.1\n", "no models; allowed: a file that names every")):
        file.write_text(text)
        with pytest.raises(ClusterConfigError, match=message):
            apply_file(FakeClient().client, file, console, dry_run=False, wait_s=None)


def test_settings_are_nested_and_read_as_yaml(tmp_path: Path) -> None:
    texts = ["cache.num_blocks=512", "dtype=float32", "cache.enable_prefix_caching=false", f"path={tmp_path}/."]
    assert parse_settings(texts) == {
        "cache": {"num_blocks": 512, "enable_prefix_caching": False},
        "dtype": "float32",
        "path": str(tmp_path),
    }
    with pytest.raises(ClusterConfigError, match="--set is 'dtype'; allowed"):
        parse_settings(["dtype"])
    with pytest.raises(ClusterConfigError, match=r"--set cache\.num_blocks: cache is 2 by another --set; allowed"):
        parse_settings(["cache=2", "cache.num_blocks=512"])
    with pytest.raises(ClusterConfigError, match=r"--set cache: cache is \{'num_blocks': 512\} by another"):
        parse_settings(["cache.num_blocks=512", "cache={block_size: 32}"])
    for value in ("2024-99-99", "9" * 5000, "[" * 5000):
        with pytest.raises(ClusterConfigError, match="allowed: a YAML value"):
            parse_settings([f"dtype={value}"])


def chunk(name: str, data: bytes, end: int, *, has_more: bool = False) -> control_pb2.LogChunk:
    return control_pb2.LogChunk(name=name, data=data, next_offset=end, has_more=has_more)


def test_logs_are_told_line_by_line_with_the_name_of_their_process() -> None:
    fake = FakeClient(
        pieces=[
            [chunk("a", b"of a line\nsecond\nthi", 100), chunk("b", b":job_id:01\nfirst\n", 17, has_more=True)],
            [chunk("a", b"rd\nlast", 107), chunk("b", b"", 17)],
        ]
    )
    lines: list[str] = []
    show_logs(fake.client, "", follows=False, tail_bytes=10, tell=lines.append)
    assert lines == ["a | second", "b | first", "a | third", "a | last"]
    assert fake.calls == [{}, {"a": 100, "b": 17}]


def test_logs_are_followed_through_a_restart_of_the_controller(capsys: pytest.CaptureFixture[str]) -> None:
    away = ControllerError("no controller answers")
    fake = FakeClient(
        pieces=[
            [chunk("m-0.1/0", b"first\nsec", 109), chunk("controller/1", b"old\n", 4)],
            away,
            away,
            [chunk("controller/2", b"new\n", 4)],  # it has not adopted the rank yet
            [chunk("m-0.1/0", b"ond\n", 113), chunk("controller/2", b"", 4)],
            KeyboardInterrupt(),
        ]
    )
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        show_logs(fake.client, "", follows=True, tail_bytes=10, tell=lines.append, sleep=lambda _: None)
    assert lines == ["controller/1 | old", "controller/2 | new", "m-0.1/0 | second"]
    assert capsys.readouterr().err == "no controller answers (asked again for 30 s)\n"
    assert fake.calls[3:5] == [
        {"m-0.1/0": 109, "controller/1": 4},
        {"m-0.1/0": 109, "controller/1": 4, "controller/2": 4},
    ]


def test_logs_that_are_followed_end_with_the_service() -> None:
    pieces = [[chunk("a", b"last words\n", 11)], ControllerError("no controller answers")]
    fake = FakeClient(pieces=pieces, is_stopping=True)
    lines: list[str] = []
    with pytest.raises(ServiceStoppedError, match="the service has stopped"):
        show_logs(fake.client, "", follows=True, tail_bytes=10, tell=lines.append, sleep=lambda _: None)
    assert lines == ["a | last words"]
    assert len(fake.calls) == 2


def test_lines_of_logs_that_are_followed_reach_a_pipe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(pipe))  # keeps what it is not told to hand on
    fake = FakeClient(pieces=[[chunk("a", b"first\n", 6)]])
    seen: list[bytes] = []

    def sleep(_: float) -> None:
        seen.append(pipe.getvalue())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_logs(fake.client, "", follows=True, tail_bytes=10, sleep=sleep)
    assert seen == [b"a | first\n"]


def test_logs_that_are_not_followed_fail_with_the_controller() -> None:
    fake = FakeClient(pieces=[[chunk("a", b"", 1, has_more=True)], ControllerError("no controller answers")])
    with pytest.raises(ControllerError, match="no controller answers"):
        show_logs(fake.client, "", follows=False, tail_bytes=10, tell=print)


@pytest.mark.parametrize(
    ("tail_bytes", "told"),
    [(99, ["one", "two", "three"]), (11, ["two", "three"]), (10, ["two", "three"]), (9, ["three"]), (0, [])],
)
def test_tail_of_a_log_has_the_lines_that_begin_in_it(tail_bytes: int, told: list[str], tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    lines: list[str] = []

    def read(target: str, offsets: Mapping[str, int], *, tail_bytes: int) -> control_pb2.ReadLogsResponse:
        piece = read_piece(str(path), None, tail_bytes, 100)
        assert piece is not None
        return control_pb2.ReadLogsResponse(chunks=[chunk("a", piece.data, piece.next_offset)])

    client = cast(ControlClient, SimpleNamespace(read_logs=read))
    show_logs(client, "", follows=False, tail_bytes=tail_bytes, tell=lines.append)
    assert lines == [f"a | {line}" for line in told]


def test_log_that_begins_while_others_are_followed_is_told_whole(tmp_path: Path) -> None:
    looks: list[list[str]] = [["early"], ["early", "late"]]
    offsets: list[dict[str, int]] = []
    lines: list[str] = []
    for name in looks[1]:
        (tmp_path / name).write_bytes(b"one\ntwo\n")

    def read(target: str, known: Mapping[str, int], *, tail_bytes: int) -> control_pb2.ReadLogsResponse:
        offsets.append(dict(known))
        pieces = {name: read_piece(str(tmp_path / name), known.get(name), tail_bytes, 100) for name in looks.pop(0)}
        chunks = [chunk(name, piece.data, piece.next_offset) for name, piece in pieces.items() if piece]
        return control_pb2.ReadLogsResponse(chunks=chunks)

    def sleep(_: float) -> None:
        if not looks:
            raise KeyboardInterrupt

    client = cast(ControlClient, SimpleNamespace(read_logs=read))
    with pytest.raises(KeyboardInterrupt):
        show_logs(client, "", follows=True, tail_bytes=4, tell=lines.append, sleep=sleep)
    assert lines == ["early | two", "late | one", "late | two"]
    assert offsets == [{}, {"early": 8}]


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(("tail_bytes", "told"), [(99, ["one", "two"]), (4, ["two"]), (0, [])])
def test_tail_of_a_log_that_could_not_be_read_at_first_is_told_when_it_can(
    tail_bytes: int, told: list[str], follows: bool, tmp_path: Path
) -> None:
    (tmp_path / "silent").write_bytes(b"one\ntwo\n")
    looks = 0

    def read(target: str, known: Mapping[str, int], *, tail_bytes: int) -> control_pb2.ReadLogsResponse:
        nonlocal looks
        looks += 1
        long = chunk("long", b"", looks)
        if looks == 1:
            long.has_more = True
            return control_pb2.ReadLogsResponse(chunks=[long], unread=["silent"])
        piece = read_piece(str(tmp_path / "silent"), known.get("silent"), tail_bytes, 100)
        assert piece is not None
        return control_pb2.ReadLogsResponse(chunks=[long, chunk("silent", piece.data, piece.next_offset)])

    def sleep(_: float) -> None:
        if looks > 5:
            raise KeyboardInterrupt

    lines: list[str] = []
    client = cast(ControlClient, SimpleNamespace(read_logs=read))
    with pytest.raises(KeyboardInterrupt) if follows else nullcontext():
        show_logs(client, "", follows=follows, tail_bytes=tail_bytes, tell=lines.append, sleep=sleep)
    assert lines == [f"silent | {line}" for line in told]


def test_logs_that_cannot_be_read_are_told_of_whenever_they_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    unread = [["m-0.1/0", "m-0.1/1"], ["m-0.1/1"], ["m-0.1/1"], ["m-0.1/0"], []]
    answers = [control_pb2.ReadLogsResponse(chunks=[chunk("a", b"one\n", 4)], unread=names) for names in unread]
    client = cast(ControlClient, SimpleNamespace(read_logs=lambda target, offsets, *, tail_bytes: answers.pop(0)))

    def sleep(_: float) -> None:
        if not answers:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_logs(client, "", follows=True, tail_bytes=4, tell=[].append, sleep=sleep)
    told = [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == ["not read: m-0.1/0, m-0.1/1", "not read: m-0.1/0"]


def test_line_that_is_cut_is_left_out_though_it_comes_in_pieces() -> None:
    splitter = LineSplitter(is_cut=True)
    assert splitter.add(b"end of") == splitter.add(b" a") == []
    assert splitter.add(b" line\nwhole\n") == ["whole"]


def test_line_that_never_ends_is_told_in_parts() -> None:
    splitter = LineSplitter()
    assert splitter.add(b"x" * 70_000) == ["x" * 70_000]
    assert splitter.add(b"y") == []
    assert splitter.end() == ["y"]


def test_piece_of_a_log_begins_before_its_end_or_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    piece = read_piece(str(path), None, 4, 8)
    assert piece is not None
    assert (piece.data, piece.next_offset, piece.has_more) == (b"6789", 10, False)
    piece = read_piece(str(path), 8, 4, 8)
    assert piece is not None
    assert piece.data == b"89"
    piece = read_piece(str(path), 2, 4, 3)
    assert piece is not None
    assert (piece.data, piece.next_offset, piece.has_more) == (b"234", 5, True)
    assert read_piece(str(tmp_path / "none"), None, 4, 8) is None


async def test_logs_of_other_nodes_are_read_there_and_dead_ones_stay_known(tmp_path: Path) -> None:
    asked: list[str] = []

    async def read_remote(source: LogSource, offset: int | None, tail_bytes: int, max_bytes: int) -> None:
        asked.append(source.name)

    reader = LogReader("here", read_remote)
    for number in range(300):
        names = frozenset({"m", f"m-{number}"})
        source = LogSource(name=f"m-{number}.1/0", belongs_to=names, node_id="there", path="/log")
        reader.note([source, LogSource(name="controller", belongs_to=frozenset(), node_id="here", path="/none")])
    assert await reader.read("m-299", {}, 10) == {"m-299.1/0": None}
    assert asked == ["m-299.1/0"]
    assert "m-0" not in reader.names
    assert {"controller", "m-100.1/0"} <= set(reader.names)


def test_logs_of_all_that_lives_are_known_however_many_these_are() -> None:
    def of(group: int) -> list[LogSource]:
        names = frozenset({f"m-{group}"})
        return [LogSource(name=f"m-{group}.1/{n}", belongs_to=names, node_id="n", path="/log") for n in range(8)]

    reader = LogReader("n")
    reader.note([source for group in range(80) for source in of(group)])
    assert {"m-0", "m-79"} <= set(reader.names)
    reader.note(of(0))
    assert {"m-0", "m-79"} <= set(reader.names)
    assert len(reader.names) == (8 + 1) + (256 + 256 // 8), "of the dead, those at the end"


class NodesClient(FakeClient):
    """A controller of nodes at some addresses."""

    def __init__(self, *addresses: str) -> None:
        super().__init__()
        self.addresses = addresses

    def status(self) -> control_pb2.GetStatusResponse:
        return control_pb2.GetStatusResponse(nodes=[control_pb2.NodeStatus(address=each) for each in self.addresses])


def test_this_node_is_the_one_whose_address_this_machine_has() -> None:
    assert this_node(NodesClient("203.0.113.1", "127.0.0.7", "127.0.0.7").client) == "127.0.0.7"
    with pytest.raises(ControllerError, match=r"none of 203\.0\.113\.1, 203\.0\.113\.2 is on this machine"):
        this_node(NodesClient("203.0.113.1", "203.0.113.2").client)
    with pytest.raises(ControllerError, match=r"127\.0\.0\.7, 127\.0\.0\.8 are on this machine; allowed"):
        this_node(NodesClient("127.0.0.8", "127.0.0.7").client)


@pytest.mark.parametrize("arguments", [["drain"], ["drain", ""], ["drain", "m-0", "--this-node"]])
def test_drain_wants_one_target(arguments: list[str]) -> None:
    with pytest.raises(ClusterConfigError, match="a REPLICA or NODE, or --this-node; allowed: one of the two"):
        app(arguments, standalone_mode=False)


@pytest.mark.parametrize("flags", [["--grace", "0"], ["--wait"]])
def test_undone_drain_takes_no_time(flags: list[str]) -> None:
    with pytest.raises(ClusterConfigError, match=r"--undo: nothing leaves .* allowed: without --grace and --wait"):
        app(["drain", "10.0.0.7", "--undo", *flags], standalone_mode=False)


def test_drain_of_this_node_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[str] = []
    monkeypatch.setattr("cluster.operate.this_node", lambda client: "127.0.0.7")
    monkeypatch.setattr("cluster.operate.drain_target", lambda client, target, console, **how: drained.append(target))
    app(["drain", "--this-node"], standalone_mode=False)
    app(["drain", "m-0"], standalone_mode=False)
    assert drained == ["127.0.0.7", "m-0"]


def test_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    app(["--version"], standalone_mode=False)
    assert capsys.readouterr().out == f"weft {metadata.version('weft')}\n"


def test_status_and_stop_ask_the_controller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = control_pb2.GetStatusResponse(models=[control_pb2.ModelStatus(name="m")])
    graces: list[float] = []
    monkeypatch.setattr("cluster.control_client.ControlClient.status", lambda self: status)
    monkeypatch.setattr("cluster.control_client.ControlClient.shut_down", lambda self, grace: graces.append(grace))
    app(["status", "--json"], standalone_mode=False)
    assert [model["name"] for model in json.loads(capsys.readouterr().out)["models"]] == ["m"]
    app(["status"], standalone_mode=False)
    assert not capsys.readouterr().out.startswith("{")
    app(["stop", "--grace", "3"], standalone_mode=False)
    assert (graces, capsys.readouterr().out) == ([3.0], "Stopped.\n")
