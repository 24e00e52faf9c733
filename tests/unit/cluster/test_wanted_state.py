import asyncio
import json
from pathlib import Path

import pytest
from helpers.cluster import FakeClock, FakeRouter, Formations

from cluster.config import ClusterSpec, build_spec
from cluster.errors import ModelNotFoundError
from cluster.lifecycle import RestartPolicy
from cluster.rank_actor import Outcome
from cluster.wanted_state import WantedState

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def spec(folder: Path, *, replicas: int = 2, max_context: int | None = None) -> ClusterSpec:
    return build_spec(
        {"models": [{"path": str(folder), "name": "m", "replicas": replicas, "max_context": max_context}]}
    )


def state_of(spec: ClusterSpec, forms: Formations, router: FakeRouter) -> WantedState:
    return WantedState(
        spec, routers=[router], form=forms, changed=asyncio.Event(), policy=RestartPolicy(), clock=FakeClock()
    )


async def test_every_wanted_group_is_formed_once_however_often_it_is_reconciled(folder: Path) -> None:
    forms, router = Formations(), FakeRouter()
    state = state_of(spec(folder), forms, router)
    for _ in range(5):
        state.reconcile()
    assert [life.replica_id for life in forms.lives] == ["m-0.1", "m-1.1"]
    assert router.num_reconciled == 5


async def test_membership_names_only_ready_replicas(folder: Path) -> None:
    forms = Formations()
    state = state_of(spec(folder), forms, FakeRouter())
    state.reconcile()
    assert state.replicas() == []
    forms.lives[1].become_ready()
    assert [endpoint.replica_id for endpoint in state.replicas()] == ["m-1.1"]
    await forms.lives[1].end(Outcome(message="rank 0 died"))
    state.reconcile()
    assert state.replicas() == []
    assert len(forms.lives) == 3


async def test_one_failed_group_leaves_the_other_alone(folder: Path) -> None:
    forms = Formations()
    state = state_of(spec(folder), forms, FakeRouter())
    state.reconcile()
    forms.lives[0].become_ready()
    await forms.lives[1].end(Outcome(message="no", is_refusal=True))
    state.reconcile()
    assert [endpoint.replica_id for endpoint in state.replicas()] == ["m-0.1"]
    assert not forms.lives[0].was_cancelled


@pytest.mark.parametrize(("wanted", "told"), [(None, 256), (100, 100), (1000, 256)])
async def test_routers_are_told_the_context_that_is_served(folder: Path, wanted: int | None, told: int) -> None:
    state = state_of(spec(folder, max_context=wanted), Formations(), FakeRouter())
    assert [(model.name, model.max_context, model.path) for model in state.models()] == [("m", told, str(folder))]


async def test_shutdown_stops_routers_with_grace_then_groups(folder: Path) -> None:
    forms, router = Formations(), FakeRouter()
    state = state_of(spec(folder), forms, router)
    state.reconcile()
    for life in forms.lives:
        await life.begun.wait()
    forms.lives[0].become_ready()
    await state.shut_down(4.0)
    assert router.stopped_with_s == 4.0
    assert all(life.was_cancelled for life in forms.lives)
    assert state.is_stopped
    state.reconcile()
    assert len(forms.lives) == 2


async def test_model_that_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        state_of(spec(tmp_path / "none"), Formations(), FakeRouter())


async def test_status_tells_wanted_and_live_groups(folder: Path) -> None:
    state = state_of(spec(folder, replicas=3), Formations(), FakeRouter())
    state.reconcile()
    (model,) = state.model_statuses()
    assert (model.name, model.wanted_replicas, len(model.groups)) == ("m", 3, 3)
    assert [router.router_id for router in state.router_statuses()] == ["router-0"]
