import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import rank_actor, spares
from cluster.spares import SpareKind, code_id, leave_spares, prepare, spare_options, take_spare

KIND = SpareKind(num_threads=2, lifetime_s=600.0)


class Store:
    """Ray's key-value store, in memory."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def _internal_kv_list(self, prefix: bytes, *, namespace: bytes) -> list[bytes]:
        return sorted(key for key in self.keys if key.startswith(prefix))

    def _internal_kv_put(self, key: bytes, value: bytes, *, namespace: bytes) -> None:
        self.keys.add(key)

    def _internal_kv_del(self, key: bytes, *, del_by_prefix: bool = False, namespace: bytes) -> None:
        self.keys -= set(self._internal_kv_list(key, namespace=namespace)) if del_by_prefix else {key}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store of a node n, in whose process nothing is imported."""
    store = Store()
    monkeypatch.setattr(spares, "internal_kv", store)
    monkeypatch.setattr(spares.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n"))
    monkeypatch.setattr(rank_actor, "import_engine", lambda rank: None)
    monkeypatch.setenv("WEFT_SPARE", KIND.name)
    yield store
    take_spare()


def options(*, num_ranks: int = 1, node: str = "n", kind: SpareKind = KIND) -> dict[str, object]:
    return spare_options(node, kind, num_ranks=num_ranks)


def test_ranks_become_spares_where_enough_of_their_kind_wait(store: Store) -> None:
    assert options() == {}
    prepare()
    assert options() == {"runtime_env": {"env_vars": KIND.variables}}
    assert options(num_ranks=2) == {}
    assert options(node="m") == {}
    assert options(kind=SpareKind(num_threads=1, lifetime_s=600.0)) == {}


def test_taken_spare_is_not_counted_any_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_SOON_S", 0.0)
    other = spares._prefix("n", KIND.name) + f"1/{time.time() + 600:.0f}".encode()
    store.keys.add(other)
    prepare()
    assert options(num_ranks=2)
    take_spare()
    assert store.keys == {other}


def test_rank_that_had_to_be_started_makes_the_notes_of_dead_spares_go(store: Store) -> None:
    dead = spares._prefix("n", KIND.name) + f"1/{time.time() + 600:.0f}".encode()
    other = spares._prefix("m", KIND.name) + f"1/{time.time() + 600:.0f}".encode()
    store.keys |= {dead, other}
    prepare()
    take_spare()
    assert store.keys == {other}


def test_spare_that_is_about_to_end_is_not_counted(store: Store) -> None:
    store.keys.add(spares._prefix("n", KIND.name) + f"1/{time.time() - 1:.0f}".encode())
    assert options() == {}


def test_process_with_other_code_is_no_spare(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SPARE", f"{'0' * 16}-2-600")
    prepare()
    assert not store.keys


def test_import_that_fails_does_not_end_the_process(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: int) -> None:
        raise ImportError("no torch")

    monkeypatch.setattr(rank_actor, "import_engine", fail)
    prepare()
    assert not store.keys


def test_code_has_another_id_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scheduler.py"
    monkeypatch.setattr(spares, "_folders", lambda package: [tmp_path])

    def id_of(text: str) -> str:
        file.write_text(text)
        code_id.cache_clear()
        return code_id()

    try:
        assert id_of("a = 1") == id_of("a = 1") != id_of("a = 2")
    finally:
        monkeypatch.undo()
        code_id.cache_clear()


def test_process_of_a_spare_is_told_its_threads_and_finds_this_code() -> None:
    variables = KIND.variables
    assert (variables["OMP_NUM_THREADS"], variables["WEFT_SPARE"]) == ("2", KIND.name)
    assert str(Path(spares.__file__).parents[1]) in variables["PYTHONPATH"].split(os.pathsep)


def test_ray_that_starts_nothing_ahead_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> list[dict[str, object]]:
        raise RuntimeError("not connected")

    monkeypatch.setattr(spares.ray, "nodes", nodes)
    leave_spares(["n"], KIND)
