"""Groups are measured one after the other, each with the memory of the one before."""

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from bench import idle_time
from workers.config import EngineConfig


class FakeEngine:
    """Refers to itself, as layers do that have recorded steps."""

    def __init__(self) -> None:
        self.itself = self

    def close(self) -> None:
        pass


def test_a_group_is_gone_before_the_next_one_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each takes most of the memory."""
    built: list[Any] = []

    def build(config: EngineConfig, **options: Any) -> FakeEngine:
        assert all(engine() is None for engine in built)
        engine = FakeEngine()
        built.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(sys, "argv", ["idle_time", "--tensor-parallel", "1", "--async", "auto,on,off"])
    monkeypatch.setattr(idle_time, "find_model", lambda name: None)
    monkeypatch.setattr(idle_time, "_config", lambda *_, **__: SimpleNamespace(parallel=SimpleNamespace(world_size=1)))
    monkeypatch.setattr(idle_time, "build_engine", build)
    numbers = {"idle_share": 0.1, "idle_ms": 1.0, "busy_ms": 9.0, "tokens_per_s": 1.0}
    monkeypatch.setattr(idle_time, "_measure", lambda *_: numbers)
    idle_time.main()
    assert len(built) == 3
