"""`weft serve` in the foreground, around a service that is not there."""

import errno
import io
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from weft.v1 import control_pb2

from cluster import signals
from cluster.config import build_spec
from cluster.detach import serve_in_background
from cluster.errors import ControllerError, StartError, StoppedAtStartError
from cluster.serve import print_addresses, tell_slowness, watch_service
from cluster.signals import Interrupts, signals_as_interrupts

SPEC = build_spec({"ray": {"address": "127.0.0.1:1"}, "router": {"unready_s": 8.0, "grace_s": 30.0}})
ANY_PORTS = {"router": {"port": 0, "http_port": 0, "metrics_port": 0}, "controller": {"port": 0, "metrics_port": 0}}


class InterruptedService:
    """Somebody presses Ctrl-C while it serves, and again while it stops."""

    control_address, spec, was_taken_over = "127.0.0.1:50050", SPEC, False

    def __init__(self) -> None:
        self.graces_s: list[float] = []

    def wait_ready(self, *, on_status: Callable[[control_pb2.GetStatusResponse], None]) -> None:
        on_status(self.status())

    def status(self) -> control_pb2.GetStatusResponse:
        return control_pb2.GetStatusResponse()

    def is_alive(self) -> bool:
        return True

    def wait_stopped(self, timeout_s: float) -> bool:
        raise KeyboardInterrupt

    def shut_down(self, grace_s: float) -> None:
        self.graces_s.append(grace_s)
        raise KeyboardInterrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # these tests too may run under nohup
    try:
        with signals_as_interrupts(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_signals_of_one_moment_are_one_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now_s))
    with signals_as_interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        now_s = 100.4
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        now_s = 100.6
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


class LostInterruptService(InterruptedService):
    """A signal comes in a callback of the garbage collector: before it is READY, or while it serves."""

    def __init__(self, *, comes_early: bool) -> None:
        super().__init__()
        self.comes_early = comes_early
        self.num_looks = 0

    def wait_ready(self, *, on_status: Callable[[control_pb2.GetStatusResponse], None]) -> None:
        if self.comes_early:
            self._lose_interrupt()
        super().wait_ready(on_status=on_status)
        assert not self.comes_early, "it was to end here"

    def wait_stopped(self, timeout_s: float) -> bool:
        self.num_looks += 1
        assert self.num_looks == 1, "it was to end here"
        self._lose_interrupt()
        return False

    def shut_down(self, grace_s: float) -> None:
        self.graces_s.append(grace_s)

    def _lose_interrupt(self) -> None:
        referred = type("Referred", (), {})()
        reference = weakref.ref(referred, lambda reference: signal.raise_signal(signal.SIGTERM))
        del referred
        assert reference() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("comes_early", [True, False])
def test_a_signal_that_a_callback_of_the_garbage_collector_loses_ends_the_service(comes_early: bool) -> None:
    service = LostInterruptService(comes_early=comes_early)
    with signals_as_interrupts() as interrupts, pytest.raises(KeyboardInterrupt) if comes_early else nullcontext():
        watch_service(service, Console(file=io.StringIO()), interrupts, stays=True)
    assert service.graces_s == [38.0]


def test_a_closed_terminal_ends_nothing_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_interrupt_ends_the_wait_for_requests_in_flight() -> None:
    service, out = InterruptedService(), io.StringIO()
    watch_service(service, Console(file=out), Interrupts(), stays=True)
    assert service.graces_s == [38.0]
    assert out.getvalue().endswith("Stopping ...\nStopped.\n")


class OrphanedService(InterruptedService):
    """Its controller dies when it has said that all is READY."""

    has_controller = True

    def status(self) -> control_pb2.GetStatusResponse:
        if not self.has_controller:
            raise ControllerError("no controller answers")
        self.has_controller = False
        return control_pb2.GetStatusResponse(models=[control_pb2.ModelStatus(name="m", wanted_replicas=2)])


def test_controller_that_dies_when_all_is_ready_ends_nothing() -> None:
    service, out = OrphanedService(), io.StringIO()
    watch_service(service, Console(file=out), Interrupts(), stays=True)
    assert out.getvalue().startswith("Serving m: 2 replicas\n")
    assert service.graces_s == [38.0], "it was watched until Ctrl-C"


class SlowService(InterruptedService):
    """Somebody presses Ctrl-C while it comes up."""

    def wait_ready(self, *, on_status: Callable[[control_pb2.GetStatusResponse], None]) -> None:
        raise KeyboardInterrupt


def test_service_that_was_stopped_before_it_was_ready_was_no_success() -> None:
    service = SlowService()
    with pytest.raises(KeyboardInterrupt):
        watch_service(service, Console(file=io.StringIO()), Interrupts(), stays=True)
    assert service.graces_s == [38.0]


class ReadyService(InterruptedService):
    """Somebody presses Ctrl-C just when it is ready."""

    @property
    def control_address(self) -> str:  # type: ignore[override]
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [SlowService, ReadyService])
@pytest.mark.parametrize(("was_taken_over", "graces_s"), [(False, [38.0]), (True, [])])
def test_interrupt_of_who_does_not_stay_is_no_success_and_ends_only_what_it_began(
    kind: type[InterruptedService], was_taken_over: bool, graces_s: list[float]
) -> None:
    service = kind()
    service.was_taken_over = was_taken_over
    with pytest.raises(KeyboardInterrupt):
        watch_service(service, Console(file=io.StringIO()), Interrupts(), stays=False)
    assert service.graces_s == graces_s


class StoppedService(InterruptedService):
    """Somebody calls `weft stop` while it comes up."""

    def wait_ready(self, *, on_status: Callable[[control_pb2.GetStatusResponse], None]) -> None:
        raise StoppedAtStartError("the service was stopped before it was ready")

    def is_alive(self) -> bool:
        return False


def test_stop_by_another_while_it_comes_up_is_an_error_only_for_who_does_not_stay() -> None:
    service, out = StoppedService(), io.StringIO()
    watch_service(service, Console(file=out), Interrupts(), stays=True)
    assert (out.getvalue(), service.graces_s) == ("Stopped before it was ready.\n", [])
    with pytest.raises(StartError, match="the service was stopped before it was ready"):
        watch_service(service, Console(file=out), Interrupts(), stays=False)


class FailedService(InterruptedService):
    """One of its groups cannot start; it watches until somebody presses Ctrl-C."""

    def __init__(self, *, was_taken_over: bool) -> None:
        super().__init__()
        self.was_taken_over = was_taken_over
        self.num_looks = 0

    def wait_ready(self, *, on_status: Callable[[control_pb2.GetStatusResponse], None]) -> None:
        raise StartError("m-1: no such tensor")

    def wait_stopped(self, timeout_s: float) -> bool:
        self.num_looks += 1
        if self.num_looks > 2:
            raise KeyboardInterrupt
        return False

    def shut_down(self, grace_s: float) -> None:
        self.graces_s.append(grace_s)


def test_service_that_does_not_come_up_is_ended() -> None:
    service = FailedService(was_taken_over=False)
    with pytest.raises(StartError, match="no such tensor"):
        watch_service(service, Console(file=io.StringIO()), Interrupts(), stays=True)
    assert (service.graces_s, service.num_looks) == ([0.0], 0)


@pytest.mark.parametrize("was_taken_over", [False, True])
def test_service_that_another_has_stopped_before_it_was_ready_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, was_taken_over: bool
) -> None:
    service = FailedService(was_taken_over=was_taken_over)
    monkeypatch.setattr(service, "is_alive", lambda: False)
    with pytest.raises(StartError, match="no such tensor"):
        watch_service(service, Console(file=io.StringIO()), Interrupts(), stays=True)
    assert (service.graces_s, service.num_looks) == ([], 0)


def test_failed_group_of_a_service_that_was_taken_over_is_told_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", "cluster.serve")
    service = FailedService(was_taken_over=True)
    watch_service(service, Console(file=io.StringIO()), Interrupts(), stays=True)
    assert (service.graces_s, service.num_looks) == ([38.0], 3), "it was watched until Ctrl-C"
    assert [record.getMessage() for record in caplog.records] == [
        "not all of the service that was taken over is ready: m-1: no such tensor"
    ]


def test_failed_group_of_a_service_that_was_taken_over_is_an_error_for_who_does_not_stay() -> None:
    service = FailedService(was_taken_over=True)
    with pytest.raises(StartError, match="no such tensor"):
        watch_service(service, Console(file=io.StringIO()), Interrupts(), stays=False)
    assert service.graces_s == [], "it goes on"


class ChangingService(InterruptedService):
    """A router of it dies while it serves; then somebody presses Ctrl-C."""

    num_looks = 0

    def status(self) -> control_pb2.GetStatusResponse:
        router = control_pb2.RouterStatus(router_id="router-0", alive=self.num_looks < 2)
        return control_pb2.GetStatusResponse(routers=[router])

    def wait_stopped(self, timeout_s: float) -> bool:
        self.num_looks += 1
        if self.num_looks > 2:
            raise KeyboardInterrupt
        return False


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_service_goes_on_where_nothing_can_be_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "cluster.serve")
    service = ChangingService()
    watch_service(service, Console(file=FullDisk()), Interrupts(), stays=True)
    assert service.graces_s == [38.0], "it has served until it was stopped"
    assert [record.getMessage() for record in caplog.records] == [
        "output is lost: No space left on device; the service goes on"
    ]


def test_log_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def know_none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"file/x\.log cannot be written: .*; allowed: another --log-file"):
        serve_in_background(ANY_PORTS, Console(), log_level="warning", log_file=tmp_path / "file" / "x.log")
    monkeypatch.setattr(Path, "home", know_none)
    with pytest.raises(StartError, match="this user has no home folder for the log; allowed: --log-file"):
        serve_in_background(ANY_PORTS, Console(), log_level="warning")


def test_folder_of_logs_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels are loaded from it."""

    def begin_no_process(*_: object, **__: object) -> None:
        raise OSError("none here")

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("cluster.detach.subprocess.Popen", begin_no_process)
    with pytest.raises(OSError, match="none here"):
        serve_in_background(ANY_PORTS, Console(), log_level="warning")
    assert (tmp_path / ".cache" / "weft").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["subprocess.Popen", "_wait_ready"])
def test_sigterm_ends_the_process_in_the_background_too(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    process = SimpleNamespace(
        stdin=io.BytesIO(), terminate=lambda: calls.append("terminate"), wait=lambda: calls.append("wait")
    )

    def be_told_to_end(*_: object, **__: object) -> SimpleNamespace:
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr("cluster.detach.subprocess.Popen", lambda *args, **options: process)
    monkeypatch.setattr("cluster.detach._wait_ready", lambda *args: pytest.fail("nothing was raised"))
    monkeypatch.setattr(f"cluster.detach.{place}", be_told_to_end)
    with pytest.raises(KeyboardInterrupt):
        serve_in_background(ANY_PORTS, Console(), log_level="warning", log_file=tmp_path / "log")
    assert calls == ["terminate", "wait"]


def test_address_that_routers_share_is_told_once() -> None:
    out = io.StringIO()
    routers = [
        control_pb2.RouterStatus(grpc_address="h:1", http_address="h:2", metrics_address=metrics)
        for metrics in ("h:3", "h:4")
    ]
    status = control_pb2.GetStatusResponse(routers=routers)
    print_addresses(Console(file=out), status, "h:5", None, has_https=False, stays=True)
    assert out.getvalue().splitlines() == [
        "  gRPC        h:1",
        "  OpenAI HTTP http://h:2/v1",
        "  metrics     http://h:3/metrics",
        "  metrics     http://h:4/metrics",
        "  control     h:5",
        "Stop it with `weft stop --control h:5` or Ctrl-C.",
    ]


def test_addresses_are_told_as_they_are() -> None:
    out = io.StringIO()
    router = control_pb2.RouterStatus(grpc_address="[fd00::2]:1", http_address="[fd00::2]:2")
    status = control_pb2.GetStatusResponse(routers=[router], metrics_address="[fd00::2]:3")
    print_addresses(Console(file=out), status, "[fd00::2]:4", None, has_https=True, stays=False)
    assert out.getvalue().splitlines() == [
        "  gRPC        [fd00::2]:1",
        "  OpenAI HTTP https://[fd00::2]:2/v1",
        "  control     [fd00::2]:4",
        "  Prometheus  http://[fd00::2]:3/targets",
        "Stop it with `weft stop --control '[fd00::2]:4'`.",
    ]


def test_groups_that_compute_slower_than_they_could_are_told_with_each_reason_once() -> None:
    out = io.StringIO()
    ready, starting = control_pb2.GROUP_STATE_READY, control_pb2.GROUP_STATE_STARTING
    groups = [
        control_pb2.GroupStatus(group_id="m-0", state=ready, detail="node b is slow"),
        control_pb2.GroupStatus(group_id="m-1", state=ready),
        control_pb2.GroupStatus(group_id="m-2", state=starting, detail="loading the model"),
        control_pb2.GroupStatus(group_id="m-3", state=ready, detail="node b is slow"),
    ]
    tell_slowness(
        Console(file=out), control_pb2.GetStatusResponse(models=[control_pb2.ModelStatus(name="m", groups=groups)])
    )
    assert out.getvalue() == "Warning: m-0, m-3: node b is slow\n"
