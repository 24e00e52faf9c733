"""What a service does where Ray is not as it should be; the rest is in the end-to-end tests."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayActorError

from cluster import service as service_module
from cluster.awaited import Awaited
from cluster.config import ClusterSpec, build_spec
from cluster.errors import ControllerError, StartError, StoppedAtStartError
from cluster.saved_state import SavedState, encode
from cluster.service import Service, _take_over
from cluster.signals import signals_as_interrupts
from cluster.started_settings import encode_spec


class SilentClient:
    """A controller that never answers: its call ends when the channel is closed."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def shut_down(self, grace_s: float) -> None:
        assert self.is_closed.wait(60)
        raise ControllerError("the call was cancelled")

    def close(self) -> None:
        self.is_closed.set()


def test_who_interrupts_a_shut_down_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(service_module, "has_local_ray_died", interrupt)
    client = SilentClient()
    service = Service.__new__(Service)
    service.client = client  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        service.shut_down(60.0)
    assert not client.is_closed.is_set()
    client.close()


def test_shut_down_waits_for_nobody_where_a_local_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "has_local_ray_died", lambda: True)
    client = SilentClient()
    service = Service.__new__(Service)
    service.client = client  # type: ignore[assignment]
    service.shut_down(60.0)
    assert client.is_closed.is_set()


class RestartingClient(SilentClient):
    """Nobody answers the first calls: the controller is between two lives."""

    def __init__(self, num_lost: int) -> None:
        super().__init__()
        self.num_lost = num_lost

    def shut_down(self, grace_s: float) -> None:
        self.num_lost -= 1
        if self.is_closed.is_set():
            raise RuntimeError("closed")
        if self.num_lost >= 0:
            raise ControllerError("no controller answers")


UNENDED = SimpleNamespace(remote=lambda: SimpleNamespace(future=Future))
"""Of a controller: that it has been stopped."""


def stop_while_restarting(
    monkeypatch: pytest.MonkeyPatch, client: RestartingClient, end: Callable[[Future[None]], None] | None = None
) -> None:
    looks: list[None] = []

    def look() -> bool:
        looks.append(None)
        if end is not None and len(looks) == 3:
            end(stopped)
        return False

    monkeypatch.setattr("cluster.patience._RETRY_S", 0.001)
    monkeypatch.setattr(service_module, "_POLL_S", 0.005)
    monkeypatch.setattr(service_module, "_STOPPED_TIMEOUT_S", 0.0)
    monkeypatch.setattr(service_module, "has_local_ray_died", look)
    service = Service.__new__(Service)
    service.client = client  # type: ignore[assignment]
    stopped: Future[None] = Future()
    service._stopped = Awaited(stopped)
    try:
        service.shut_down(60.0)
    finally:
        client.close()


def test_stop_of_a_service_whose_controller_is_between_two_lives_is_told_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = RestartingClient(num_lost=5)
    stop_while_restarting(monkeypatch, client)
    assert client.num_lost == -1
    assert capsys.readouterr().err == "no controller answers (asked again for 30 s)\n"


def test_stop_ends_with_a_successor_that_has_finished_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_while_restarting(monkeypatch, RestartingClient(num_lost=10**6), lambda stopped: stopped.set_result(None))


def test_stop_of_a_service_whose_controller_died_for_good_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ControllerError, match="the controller died"):
        stop_while_restarting(
            monkeypatch, RestartingClient(num_lost=10**6), lambda stopped: stopped.set_exception(RayActorError())
        )


@pytest.mark.parametrize(
    ("end", "error", "reason"),
    [
        (None, StoppedAtStartError, "the service was stopped before it was ready"),
        (RayActorError(), StartError, "the controller died before the service was ready"),
    ],
)
def test_who_waits_for_a_service_is_told_how_it_ended(
    end: Exception | None, error: type[StartError], reason: str
) -> None:
    service = Service.__new__(Service)
    stopped: Future[None] = Future()
    service._stopped = Awaited(stopped)
    if end is None:
        stopped.set_result(None)
    else:
        stopped.set_exception(end)
    with pytest.raises(StartError, match=reason) as raised:
        service.wait_ready()
    assert raised.type is error


def test_the_end_of_a_service_is_waited_for_by_a_clock_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(refs: list[object], *, timeout: float) -> None:
        raise AssertionError("it lasts an hour where the clock is set back by an hour, and hears no signal")

    stopped: Future[None] = Future()
    controller = SimpleNamespace(stopped=SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: stopped)))
    monkeypatch.setattr(service_module, "ray", SimpleNamespace(wait=wait, get=wait))
    spec = build_spec({"models": [{"path": "weft-tiny"}]})
    service = Service(control_address="127.0.0.1:1", spec=spec, controller=controller)
    assert service.is_alive()
    assert not service.wait_stopped(0.0)
    stopped.set_result(None)
    assert not service.is_alive()
    assert service.wait_stopped(60.0)
    service.client.close()


def test_ray_keeps_nothing_for_the_lives_of_a_controller_that_other_code_could_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[object] = []
    actor = SimpleNamespace(options=lambda **_: actor, remote=lambda *values: given.extend(values))
    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(
        service_module, "ray", SimpleNamespace(remote=lambda kind: actor, get_runtime_context=lambda: context)
    )
    service_module._create_controller(build_spec({}), is_local=True, log_level="warning")
    assert [type(value) for value in given] == [bytes, str, float]


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        (b'{"control_port": 1', "what the one before has saved cannot be read: Input data was truncated"),
        (b'{"control_port": "x"}', "what the one before has saved cannot be read: Expected `int | null`"),
        (encode(SavedState(control_port=1)), "it hangs, or ends again and again"),
        (None, "it hangs, or ends again and again"),
    ],
)
def test_a_controller_that_never_answers_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, saved: bytes | None, reason: str
) -> None:
    def get(ref: object, *, timeout: float) -> None:
        raise GetTimeoutError(f"{timeout}")

    actor = SimpleNamespace(start=SimpleNamespace(remote=object))
    monkeypatch.setattr(service_module, "ray", SimpleNamespace(get_actor=lambda name: actor, get=get))
    monkeypatch.setattr(service_module, "RayStateStore", lambda: SimpleNamespace(load=lambda: saved))
    monkeypatch.setattr(service_module, "logs_folder", lambda: "/tmp/ray/session/logs")
    with pytest.raises(StartError) as refused:
        _take_over(build_spec({}))
    assert f"has not answered within 90 s: {reason}" in str(refused.value)
    assert str(refused.value).endswith("; on its node it logs to /tmp/ray/session/logs")


@pytest.mark.parametrize(
    ("settings", "grace_s"),
    [
        (encode_spec(build_spec({"router": {"grace_s": 300.0}})), 300.0),
        (b"of other code", 5.0),
        (b"", 5.0),
    ],
)
def test_a_service_that_is_taken_over_keeps_what_it_was_started_with(
    monkeypatch: pytest.MonkeyPatch, settings: bytes, grace_s: float
) -> None:
    calls = SimpleNamespace(remote=lambda: ("127.0.0.1:1", False))
    controller = SimpleNamespace(start=calls, stopped=UNENDED)
    ray = SimpleNamespace(get_actor=lambda name: controller, get=lambda answer, *, timeout: answer)
    saved = encode(SavedState(settings=settings))
    monkeypatch.setattr(service_module, "ray", ray)
    monkeypatch.setattr(service_module, "RayStateStore", lambda: SimpleNamespace(load=lambda: saved))
    service = _take_over(build_spec({"router": {"grace_s": 5.0}}))
    assert service is not None
    service.client.close()
    assert (service.spec.router.grace_s, service.was_taken_over) == (grace_s, True)


def test_a_service_whose_controller_tells_only_its_address_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "RayStateStore", lambda: SimpleNamespace(load=lambda: None))
    calls = SimpleNamespace(remote=lambda: "127.0.0.1:1")  # as code of before answers, after a `git pull` under it
    controller = SimpleNamespace(start=calls, stopped=UNENDED)
    ray = SimpleNamespace(get_actor=lambda name: controller, get=lambda answer, *, timeout: answer)
    monkeypatch.setattr(service_module, "ray", ray)
    service = _take_over(build_spec({}))
    assert service is not None
    service.client.close()
    assert (service.control_address, service.was_taken_over) == ("127.0.0.1:1", True)


class StoppedController:
    """A controller whose service was stopped: it has its name until it has been looked for `num_looks` times."""

    def __init__(self, num_looks: int) -> None:
        self.num_left = num_looks
        self.stopped = SimpleNamespace(remote=object)

    def find(self, name: str) -> "StoppedController":
        if not self.num_left:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        self.num_left -= 1
        return self


def test_who_starts_a_service_waits_for_the_controller_of_one_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, serving = StoppedController(3), StoppedController(3)
    for controller, is_done in ((stopped, True), (serving, False)):
        ray = SimpleNamespace(
            get_actor=controller.find,
            wait=lambda refs, *, timeout, is_done=is_done: (refs, []) if is_done else ([], refs),
        )
        monkeypatch.setattr(service_module, "ray", ray)
        service_module._wait_for_end_of_stopped()
    assert (stopped.num_left, serving.num_left) == (0, 2)


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_a_controller_began_for_a_start_that_is_interrupted_is_stopped(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    graces_s: list[float] = []

    class Client:
        def __init__(self, address: str, *, tls: None) -> None:
            assert address == "h:1"

        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def shut_down(self, grace_s: float) -> None:
            graces_s.append(grace_s)

    ray = SimpleNamespace(get=lambda ref, *, timeout: ("h:1", goes_on), wait=lambda refs, *, timeout: (refs, []))
    monkeypatch.setattr(service_module, "ray", ray)
    monkeypatch.setattr(service_module, "ControlClient", Client)
    controller = SimpleNamespace(stopped=SimpleNamespace(remote=object))
    service_module._stop_what_began(controller, object(), None)
    assert graces_s == ([] if goes_on else [0.0])


def test_a_controller_that_did_not_start_has_begun_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(ref: object, *, timeout: float) -> None:
        raise RayActorError

    monkeypatch.setattr(service_module, "ray", SimpleNamespace(get=get))
    service_module._stop_what_began(object(), object(), None)


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("127.0.0.1:1", ["join_ray", "_wait_for_end_of_stopped", "_stop_what_began", "kill", "leave_ray"]),
        (None, ["start_local_ray", "leave_ray"]),
    ],
)
def test_start_waits_for_the_one_before_and_stops_what_it_began_where_that_would_stay(
    monkeypatch: pytest.MonkeyPatch, address: str | None, wanted: list[str]
) -> None:
    calls: list[str] = []

    def interrupt(ref: object) -> None:
        raise KeyboardInterrupt

    def note(name: str) -> Callable[..., None]:
        return lambda *args, **options: calls.append(name)

    for name in ("start_local_ray", "join_ray", "_wait_for_end_of_stopped", "_stop_what_began", "leave_ray"):
        monkeypatch.setattr(service_module, name, note(name))
    controller = SimpleNamespace(start=SimpleNamespace(remote=lambda **_: object()))
    monkeypatch.setattr(service_module, "check_spec", lambda spec: spec)
    monkeypatch.setattr(service_module, "_create_controller", lambda spec, **options: controller)
    context = SimpleNamespace(runtime_env={})
    ray = SimpleNamespace(get_runtime_context=lambda: context, get=interrupt, kill=note("kill"))
    monkeypatch.setattr(service_module, "ray", ray)
    with pytest.raises(KeyboardInterrupt):
        Service.start(build_spec({"ray": {"address": address}}))
    assert calls == wanted


def test_a_controller_that_is_made_as_a_signal_comes_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, stopped = SimpleNamespace(start=SimpleNamespace(remote=lambda **_: object())), []

    def create(spec: ClusterSpec, *, is_local: bool, log_level: str) -> SimpleNamespace:
        signal.raise_signal(signal.SIGTERM)
        return controller

    for name in ("check_spec", "join_ray", "leave_ray", "_wait_for_end_of_stopped"):
        monkeypatch.setattr(service_module, name, lambda spec=None, **options: spec)
    monkeypatch.setattr(service_module, "_create_controller", create)
    monkeypatch.setattr(service_module, "_stop_what_began", lambda began, *_: stopped.append(began))
    context = SimpleNamespace(runtime_env={})
    ray = SimpleNamespace(get_runtime_context=lambda: context, kill=lambda actor: stopped.append(actor))
    monkeypatch.setattr(service_module, "ray", ray)
    with signals_as_interrupts(), pytest.raises(KeyboardInterrupt):
        Service.start(build_spec({"ray": {"address": "127.0.0.1:1"}}))
    assert stopped == [controller, controller]


@pytest.mark.parametrize(("name", "address"), [("join_ray", "127.0.0.1:1"), ("start_local_ray", None)])
def test_ray_is_left_where_the_start_is_interrupted_right_after_it(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str | None
) -> None:
    def interrupt(*address: str, log_to_driver: bool) -> None:
        raise KeyboardInterrupt

    left = []
    monkeypatch.setattr(service_module, name, interrupt)
    monkeypatch.setattr(service_module, "leave_ray", lambda: left.append(True))
    monkeypatch.setattr(service_module, "check_spec", lambda spec: spec)
    with pytest.raises(KeyboardInterrupt):
        Service.start(build_spec({"ray": {"address": address}}))
    assert left == [True]


def test_only_a_name_that_is_taken_is_told_as_another_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(spec: ClusterSpec, *, is_local: bool, log_level: str) -> None:
        raise error

    for name in ("check_spec", "join_ray", "leave_ray", "_wait_for_end_of_stopped"):
        monkeypatch.setattr(service_module, name, lambda spec=None, **options: spec)
    monkeypatch.setattr(service_module, "_create_controller", create)
    context = SimpleNamespace(runtime_env={})
    monkeypatch.setattr(service_module, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    spec = build_spec({"ray": {"address": "127.0.0.1:1"}})
    error: Exception = ActorAlreadyExistsError("the name is taken")
    with pytest.raises(StartError, match="this Ray cluster has a Weft already; allowed: one"):
        Service.start(spec)
    error = ValueError("of something else")
    with pytest.raises(ValueError, match="of something else"):
        Service.start(spec)
