"""Errors of Ray become one line that says who ended and why."""

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from cluster.ray_errors import in_a_line

_DEAD = "The actor is dead because its worker process has died. Worker exit type: "


def _died(message: str, *, pid: int = 4711) -> ActorDiedError:
    context = ActorDiedErrorContext(
        error_message=message, actor_id=b"\1" * 16, class_name="RankActor", pid=pid, ray_namespace="weft"
    )
    return ActorDiedError(context)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            f"{_DEAD}SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of "
            "file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage",
            "its process (pid 4711) ended without a word: killed, as by the kernel when memory runs out, or crashed",
        ),
        (
            f"{_DEAD}NODE_OUT_OF_MEMORY Worker exit detail: the node was low on memory\nand more",
            "the node was low on memory",
        ),
        (
            "The actor is dead because its node has died. Node Id: ab",
            "The actor is dead because its node has died. Node Id: ab",
        ),
    ],
)
def test_death_of_an_actor_is_told_by_its_cause(message: str, told: str) -> None:
    assert in_a_line(_died(message)) == told


def test_process_without_a_pid_is_told_without_it() -> None:
    assert in_a_line(_died(f"{_DEAD}SYSTEM_ERROR Worker exit detail: x", pid=0)).startswith("its process ended without")


def test_error_in_an_actor_is_told_by_the_last_line_of_its_traceback() -> None:
    error = RayTaskError("f", "Traceback:\n  here\nValueError: 7 is odd\n", ValueError("7 is odd"))
    assert in_a_line(error) == "ValueError: 7 is odd"
    assert in_a_line(ActorDiedError(error)) == "ValueError: 7 is odd"


def test_other_errors_are_told_by_their_first_line() -> None:
    assert in_a_line(GetTimeoutError("the head is busy\nsee its log")) == "the head is busy"
    assert in_a_line(GetTimeoutError("")) == "GetTimeoutError"
