"""What a router decides is decided again in the same way, and not with other settings."""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from weft.recording import Recorder, Recording

from bench.simulation.replay import replay_file
from router.config import AdmissionConfig, BreakerConfig, PolicyName, PrefixPolicyConfig, RouterConfig
from router.errors import OverloadedError
from router.policy import ReplicaView, RouteRequest
from router.prefix_index import ReplicaId
from router.prefix_policy import make_policy
from router.recording import Entered, Left, Routed, RouterCall, RouterRecording, RouterSetup, record_router


def view(rng: random.Random, name: str) -> ReplicaView:
    return ReplicaView(
        replica_id=ReplicaId(name),
        num_requests=rng.randrange(3),
        num_pending_tokens=rng.choice((0, 0, 100)),
        num_cached_blocks=rng.choice((0, 0, 4)),
        block_size=16,
    )


def record_choices(path: Path, name: PolicyName, num: int = 200) -> None:
    """Let two models' policies choose by turns, with ties that are drawn."""
    rng = random.Random(3)
    config = RouterConfig(control="x:1", policy=name)
    recorder = Recorder(path, max_bytes=1 << 24)
    recording = record_router(config, recorder)
    seeds = {"a": 11, "b": 12}
    policies = {
        model: recording.policy(model, seed, make_policy(name, config.prefix, random.Random(seed)))
        for model, seed in seeds.items()
    }
    for i in range(num):
        hashes = [rng.randbytes(16) for _ in range(rng.randrange(6))]
        request = RouteRequest(num_tokens=len(hashes) * 16 + 3, block_hashes=hashes)
        policies["ab"[i % 2]].choose(request, [view(rng, each) for each in "xyz"])
    recorder.close()


def frames_in(path: Path) -> list[RouterCall]:
    recording = Recording(path)
    recording.read_header(RouterSetup)
    frames = list(recording.read_frames(RouterCall))
    recording.close()
    return frames


def rewrite(path: Path, **changes: Any) -> None:
    """Change the header."""
    recording = Recording(path)
    header = msgspec.structs.replace(recording.read_header(RouterSetup), **changes)
    frames = list(recording.read_frames(RouterCall))
    recording.close()
    path.unlink()
    recorder = Recorder(path, max_bytes=1 << 24)
    recorder.begin("router", header)
    for frame in frames:
        recorder.write(frame)
    recorder.close()


@pytest.mark.parametrize("name", PolicyName)
def test_choices_are_made_again(tmp_path: Path, name: PolicyName) -> None:
    record_choices(tmp_path / "file", name)
    outcome = replay_file(tmp_path / "file")
    assert outcome.difference is None
    assert outcome.calls == {"policy": 2, "route": 200}


def test_choice_of_another_policy_is_named(tmp_path: Path) -> None:
    record_choices(tmp_path / "file", PolicyName.PREFIX_AFFINITY)
    rewrite(tmp_path / "file", prefix=PrefixPolicyConfig(request_cost_tokens=0, cold_credit_tokens=0))
    difference = replay_file(tmp_path / "file").difference
    assert difference is not None
    assert difference.kind == "route"
    assert difference.place.startswith("choice.")


def test_candidates_and_hashes_are_in_the_file(tmp_path: Path) -> None:
    record_choices(tmp_path / "file", PolicyName.ROUND_ROBIN, num=3)
    routes = [frame for frame in frames_in(tmp_path / "file") if isinstance(frame, Routed)]
    assert [[each.replica_id for each in route.replicas] for route in routes] == [["x", "y", "z"]] * 3
    assert [route.choice.replica_id for route in routes] == ["x", "x", "y"], "each model has its own turns"


def test_breakers_open_and_close_again(tmp_path: Path) -> None:
    rng = random.Random(5)
    recorder = Recorder(tmp_path / "file", max_bytes=1 << 24)
    setup = RouterSetup(
        router_id="r",
        policy=PolicyName.ROUND_ROBIN,
        prefix=PrefixPolicyConfig(),
        breaker=BreakerConfig(max_failures=2, open_s=1.0, max_open_s=3.0),
        admission=AdmissionConfig(),
    )
    now_s = 100.0
    recording = RouterRecording(setup, recorder, clock=lambda: now_s)
    breakers = [recording.breaker(ReplicaId(name)) for name in "ab"]
    answers = []
    for _ in range(300):
        now_s += rng.uniform(0, 0.8)
        breaker = rng.choice(breakers)
        answers.append(breaker.allows(now_s))
        if answers[-1]:
            breaker.begin(now_s)
            match rng.randrange(4):
                case 0:
                    breaker.succeed()
                case 1:
                    breaker.release()
                case _:
                    breaker.fail(now_s)
    recorder.close()
    assert {True, False} == set(answers)
    assert replay_file(tmp_path / "file").difference is None
    rewrite(tmp_path / "file", breaker=BreakerConfig(max_failures=3, open_s=1.0, max_open_s=3.0))
    difference = replay_file(tmp_path / "file").difference
    assert difference is not None
    assert (difference.kind, difference.place) == ("breaker call", "open_until_s")
    assert difference.now == "None"


def test_places_are_given_again(tmp_path: Path) -> None:
    rng = random.Random(9)
    now_s = 0.0
    recorder = Recorder(tmp_path / "file", max_bytes=1 << 24)
    setup = RouterSetup(
        router_id="r",
        policy=PolicyName.ROUND_ROBIN,
        prefix=PrefixPolicyConfig(),
        breaker=BreakerConfig(),
        admission=AdmissionConfig(max_in_flight=2, max_queued=3),
    )
    places = RouterRecording(setup, recorder, clock=lambda: now_s).places()
    entered: list[int] = []
    for _ in range(400):
        now_s += rng.expovariate(1)
        if entered and rng.random() < 0.5:
            places.leave(entered.pop(rng.randrange(len(entered))), now_s)
        else:
            with suppress(OverloadedError):
                entered.append(places.enter())
                if rng.random() < 0.9:
                    places.start(entered[-1])
        assert places.num_in_flight <= 2
        assert places.num_in_flight + places.num_queued == len(entered) <= 5
    recorder.close()
    frames = frames_in(tmp_path / "file")
    assert any(isinstance(frame, Entered) and frame.ticket is None for frame in frames), "somebody was refused"
    assert any(isinstance(frame, Left) and frame.following for frame in frames), "somebody waited"
    assert replay_file(tmp_path / "file").difference is None
    rewrite(tmp_path / "file", admission=AdmissionConfig(max_in_flight=3, max_queued=2))
    difference = replay_file(tmp_path / "file").difference
    assert difference is not None
    assert (difference.kind, difference.place) == ("start", "is_in_flight")
