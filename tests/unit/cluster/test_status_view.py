"""What a status of the service means, and how it is told to people and programs."""

import io
import json

import pytest
from rich.console import Console
from rich.text import Text
from weft.v1 import control_pb2

from cluster.readiness import first_failure, is_ready
from cluster.status_view import ChangeView, StartView, print_status, status_as_dict, tables_console

READY = control_pb2.GROUP_STATE_READY


def status_with(state: control_pb2.GroupState.ValueType, *, router_alive: bool) -> control_pb2.GetStatusResponse:
    group = control_pb2.GroupStatus(group_id="m-0", state=state, detail="why")
    return control_pb2.GetStatusResponse(
        models=[control_pb2.ModelStatus(name="m", groups=[group])],
        routers=[control_pb2.RouterStatus(router_id="router-0", alive=router_alive)],
    )


def test_service_is_ready_when_groups_and_routers_are() -> None:
    assert is_ready(status_with(READY, router_alive=True))
    assert not is_ready(status_with(READY, router_alive=False))
    assert not is_ready(status_with(control_pb2.GROUP_STATE_STARTING, router_alive=True))
    stopping = status_with(READY, router_alive=True)
    stopping.routers[0].draining = True
    assert not is_ready(stopping)


def test_first_failure_names_the_group_and_the_reason() -> None:
    assert first_failure(status_with(control_pb2.GROUP_STATE_FAILED, router_alive=True)) == "m-0: why"
    assert first_failure(status_with(READY, router_alive=False)) is None


def test_status_for_programs_holds_every_field() -> None:
    told = json.loads(json.dumps(status_as_dict(status_with(READY, router_alive=True))))
    assert told["models"][0]["groups"][0]["state"] == "GROUP_STATE_READY"
    assert told["models"][0]["groups"][0]["seconds_in_state"] == 0


def test_changes_of_a_running_service_are_told_once() -> None:
    out = io.StringIO()
    view = ChangeView(Console(file=out, width=200))
    for state, alive in ((READY, True), (READY, True), (control_pb2.GROUP_STATE_PENDING, True), (READY, False)):
        view.show(status_with(state, router_alive=alive))
    last = status_with(READY, router_alive=False)
    last.controller.restarts, last.controller.pid = 1, 4711
    view.show(last)
    lines = [line.split(" ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines == [
        "m-0: pending: why",
        "m-0: ready as ",
        "router-0: not alive",
        "controller: restarted 1 times, now with pid 4711",
    ]
    del last.models[:]
    view.show(last)
    assert "m-0" not in view._told, "a group that has gone is not kept as long as the service runs"


def test_model_that_scales_by_itself_tells_its_bounds_and_why() -> None:
    status = status_with(READY, router_alive=True)
    autoscaling = status.models[0].autoscaling
    autoscaling.max_replicas = 4
    changes = io.StringIO()
    view = ChangeView(Console(file=changes, width=100))
    view.show(status)
    autoscaling.last_change, autoscaling.seconds_since_change = "0 -> 1: 1 requests wait for the first replica", 7
    view.show(status)
    out = io.StringIO()
    print_status(Console(file=out, width=100), status)
    assert "0 of 0 (0 to 4)" in out.getvalue()
    assert "m: 0 -> 1: 1 requests wait for the first replica, 7 s ago" in out.getvalue()
    autoscaling.last_change = ""  # of the next controller
    view.show(status)
    assert changes.getvalue().endswith("m: 0 -> 1: 1 requests wait for the first replica (scales from 0 to 4)\n")


def test_start_is_told_line_by_line_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with StartView(Console(file=out, width=200)) as view:
        for state in (control_pb2.GROUP_STATE_STARTING, control_pb2.GROUP_STATE_STARTING, READY):
            view.show(status_with(state, router_alive=True))
    assert out.getvalue().splitlines() == ["m-0: starting: why", "m-0: ready"]


def test_start_is_a_bar_that_follows_each_group_on_a_terminal() -> None:
    status = status_with(control_pb2.GROUP_STATE_STARTING, router_alive=True)
    out = io.StringIO()
    with StartView(Console(file=out, width=100, force_terminal=True)) as view:
        for progress in (0.0, 0.75):
            status.models[0].groups[0].progress = progress
            view.show(status)
    drawn = Text.from_ansi(out.getvalue()).plain
    assert " 75% starting: why" in drawn


def test_status_fits_and_tells_reasons() -> None:
    out = io.StringIO()
    print_status(Console(file=out, width=80), status_with(control_pb2.GROUP_STATE_FAILED, router_alive=False))
    assert all(word in out.getvalue() for word in ("m-0", "failed", "why", "router-0", "not alive"))
    assert max(map(len, out.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("restarts", "is_stopping", "line"),
    [
        (0, False, "Weft 1.2, controller up 1 h 2 min"),
        (2, True, "Weft 1.2, controller up 1 h 2 min, restarted 2 times; the service is stopping"),
    ],
)
def test_status_tells_how_long_the_controller_lives(restarts: int, is_stopping: bool, line: str) -> None:
    status = control_pb2.GetStatusResponse(version="1.2", uptime_s=3725)
    status.controller.restarts, status.controller.stopping = restarts, is_stopping
    out = io.StringIO()
    print_status(Console(file=out, width=80), status)
    assert out.getvalue().splitlines()[0] == line


def test_status_tells_replicas_by_their_ids_and_which_nodes_are_drained() -> None:
    status = status_with(READY, router_alive=True)
    status.models[0].groups[0].replica_id = "m-0.3"
    status.nodes.add(address="10.0.0.1", cpus=8, free_cpus=7.98, drained=True)
    status.nodes.add(address="10.0.0.2", cpus=8, free_cpus=7.98)
    out = io.StringIO()
    print_status(Console(file=out, width=120), status)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["m-0.3", "ready"] in [line[:2] for line in lines]
    free = ["7.98", "of", "8", "0", "of", "0", "-"]
    assert lines[-2:] == [["10.0.0.1", *free, "drained"], ["10.0.0.2", *free]]


def test_status_tells_the_last_failure_of_what_runs_again() -> None:
    status = status_with(READY, router_alive=True)
    for process in (status.models[0].groups[0], status.routers[0]):
        process.detail, process.restarts = "", 1
        process.last_failure.reason, process.last_failure.seconds_ago = "rank 0: killed", 90.0
    out = io.StringIO()
    print_status(Console(file=out, width=80), status)
    assert "m-0: failed 1 min ago: rank 0: killed" in out.getvalue()
    assert out.getvalue().count("failed 1 min ago: rank 0: killed") == 2
    status.models[0].groups[0].detail = "starts again in 1 s: rank 0: killed"
    out = io.StringIO()
    print_status(Console(file=out, width=80), status)
    assert out.getvalue().count("rank 0: killed") == 2, "once for each"


def test_nothing_is_folded_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    status = status_with(READY, router_alive=True)
    ranks = [control_pb2.RankStatus(rank=rank, node="10.0.0.1", pid=4_000_000 + rank) for rank in range(16)]
    status.models[0].groups[0].ranks.extend(ranks)
    print_status(tables_console(), status)
    assert ", ".join(str(rank.pid) for rank in ranks) in capsys.readouterr().out


def test_a_models_row_tells_its_revision_and_how_many_groups_are_of_older_ones() -> None:
    def row(revision: int, *of_groups: int) -> list[str]:
        groups = [control_pb2.GroupStatus(revision=of, tensor_parallel=2, pipeline_parallel=1) for of in of_groups]
        model = control_pb2.ModelStatus(
            name="m", path="/m", revision=revision, groups=groups, ready_replicas=1, wanted_replicas=2
        )
        out = io.StringIO()
        print_status(Console(file=out, width=200), control_pb2.GetStatusResponse(models=[model]))
        return out.getvalue().splitlines()[2].split()

    assert row(3, 3) == ["m", "1", "of", "2", "3", "2", "x", "1", "/m"]
    assert row(3, 3, 2, 1) == ["m", "1", "of", "2", "3", "(2", "older)", "2", "x", "1", "/m"]
    assert row(0, 3) == ["m", "1", "of", "2", "removed", "2", "x", "1", "/m"]


def test_status_tells_that_the_service_stops() -> None:
    for stopping in (False, True):
        out = io.StringIO()
        status = control_pb2.GetStatusResponse(controller=control_pb2.ControllerStatus(stopping=stopping))
        print_status(Console(file=out, width=80), status)
        assert ("the service is stopping" in out.getvalue().splitlines()[0]) is stopping


def test_router_that_finishes_its_requests_is_told_to_drain_and_to_have_ended() -> None:
    status = status_with(READY, router_alive=True)
    out = io.StringIO()
    view = ChangeView(Console(file=out, width=80))
    view.show(status)
    status.routers[0].draining, status.routers[0].detail = True, "finishes its requests"
    view.show(status)
    assert out.getvalue().endswith(" router-0: draining: finishes its requests\n")
    stopped = status_with(control_pb2.GROUP_STATE_STOPPED, router_alive=False)
    stopped.models[0].groups[0].detail = ""
    view.show(stopped)
    assert [line.split(" ", 1)[1] for line in out.getvalue().splitlines()[-2:]] == [
        "m-0: stopped", "router-0: not alive"
    ]  # fmt: skip
    out = io.StringIO()
    print_status(Console(file=out, width=80), status)
    lines = out.getvalue().splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("router-0")] == [["router-0", "draining"]]
    assert "  router-0: finishes its requests" in lines


def test_brackets_of_names_are_no_style() -> None:
    status = status_with(READY, router_alive=True)
    model, name = status.models[0], "m[/v2][fp8]"
    model.name, model.path, model.groups[0].group_id, model.groups[0].replica_id = name, f"/{name}", name, name
    status.routers[0].router_id = name
    status.nodes.add(address=name, accelerator=name)
    out = io.StringIO()
    print_status(Console(file=out, width=160), status)
    assert out.getvalue().count(name) >= 6
    with StartView(Console(file=io.StringIO(), width=160, force_terminal=True)) as view:
        view.show(status)


def test_ipv6_addresses_are_shown_whole() -> None:
    ranks = [control_pb2.RankStatus(rank=rank, node="fd00::2", pid=70 + rank) for rank in range(2)]
    group = control_pb2.GroupStatus(group_id="m-0", state=READY, ranks=ranks, address="[fd00::2]:7000")
    status = control_pb2.GetStatusResponse(
        models=[control_pb2.ModelStatus(name="m", groups=[group])],
        routers=[control_pb2.RouterStatus(router_id="router-0", grpc_address="[fd00::2]:50051")],
    )
    out = io.StringIO()
    print_status(Console(file=out, width=120), status)
    assert "[fd00::2]:70, 71" in out.getvalue()
    assert {"[fd00::2]:7000", "[fd00::2]:50051"} <= set(out.getvalue().split())


def test_state_that_only_a_newer_controller_knows_is_shown_by_its_number() -> None:
    out = io.StringIO()
    print_status(Console(file=out, width=80), status_with(99, router_alive=True))  # type: ignore[arg-type]
    assert "state 99" in out.getvalue()
