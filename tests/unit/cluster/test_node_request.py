"""What Ray's autoscaler is asked for: until it has heard of each change, and nothing for ever."""

import logging
from collections.abc import Sequence

import pytest
from ray.exceptions import RayError

from cluster import node_request
from cluster.node_request import NodeRequest

GPU = {"GPU": 2.0, "CPU": 0.02}


class Ray:
    """Its autoscaler."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, float]]] = []
        self.error: Exception | None = None
        self.num_failures = 0
        """Calls that fail yet."""

    def __call__(self, bundles: Sequence[dict[str, float]]) -> None:
        if self.error is not None:
            raise self.error
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("the head is being restarted")
        self.asked.append(list(bundles))


async def test_room_is_asked_for_once_and_taken_back() -> None:
    ray = Ray()
    request = NodeRequest(ray, is_successor=False)
    await request.want([])
    assert ray.asked == [], "nobody else's request is taken back"
    for bundles in ([GPU], [GPU], [GPU, GPU], [], []):
        await request.want(bundles)
    assert ray.asked == [[GPU], [GPU, GPU], []]


async def test_successor_takes_back_what_its_predecessor_may_have_asked_for() -> None:
    ray = Ray()
    request = NodeRequest(ray, is_successor=True)
    await request.want([])
    await request.want([])
    assert ray.asked == [[]]


@pytest.mark.parametrize("error", [RayError("the head is away"), RuntimeError("Ray is not initialized yet")])
async def test_ray_that_does_not_listen_stops_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    ray = Ray()
    ray.error = error
    request = NodeRequest(ray, is_successor=False)
    with caplog.at_level(logging.WARNING, logger="cluster.node_request"):
        for _ in range(3):
            await request.want([GPU])
    assert [record.getMessage() for record in caplog.records] == [f"Ray was not asked for nodes: {error}"]
    ray.error = None
    await request.want([])
    assert ray.asked == [[]]


@pytest.mark.parametrize("bundles", [[], [GPU, GPU]])
async def test_ray_that_did_not_listen_is_told_again(bundles: list[dict[str, float]]) -> None:
    ray = Ray()
    request = NodeRequest(ray, is_successor=False)
    await request.want([GPU])
    ray.num_failures = 1
    for _ in range(3):
        await request.want(bundles)
    assert ray.asked == [[GPU], bundles]


async def test_what_was_asked_for_is_asked_for_again_where_its_withdrawal_may_have_been_heard() -> None:
    ray = Ray()
    request = NodeRequest(ray, is_successor=False)
    await request.want([GPU])
    ray.num_failures = 1
    await request.want([])
    await request.want([GPU])
    assert ray.asked == [[GPU], [GPU]]


async def test_request_is_taken_back_at_the_end_though_ray_does_not_listen_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_request, "_RETRY_S", 0.0)
    ray = Ray()
    request = NodeRequest(ray, is_successor=False)
    await request.want([GPU])
    ray.num_failures = 2
    await request.close()
    assert ray.asked == [[GPU], []]
    ray.error = RayError("the head is away")
    await request.want([GPU])
    await request.close()  # has an end
