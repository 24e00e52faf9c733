"""A pool of worker processes for distributed tests, started once per pytest session.

Take the session fixture `gloo_pool` (tests/distributed/conftest.py) and give it a function of module level:

    def sum_ranks(mesh: Mesh, offset: int) -> float:          # runs in every rank; rank 0 is a worker too
        return float(all_reduce(torch.tensor([mesh.tp.rank + offset]), mesh.tp))

    def test_all_ranks_get_the_sum(gloo_pool: GlooPool) -> None:
        assert gloo_pool.run(sum_ranks, 1, tp=2, pp=1) == [3.0, 3.0]         # results in rank order

- `run(function, *args, tp=, pp=)` makes a fresh gloo world of tp * pp ranks for the call and passes its Mesh first.
- `call(function, *args, ranks=)` leaves torch.distributed alone and passes the rank first; for code that makes its own.
- Functions, arguments and results are pickled by name or by value: no lambdas, no local functions. Test files need not
  be importable. A worker imports a test file once a session.
- An exception in a rank becomes a `RankFailedError` here, with the traceback of every rank that failed.
- After `timeout_s` the stacks of hung ranks go to stderr, the ranks are killed, and RankFailedError is raised; the next
  call starts new ones.
- `may_die=True`: a rank whose process ends gives `None` instead of an error.

Workers have one torch thread each, and exit with the pytest process.
"""

import faulthandler
import functools
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple

POOL_SIZE = 4

_PRELOADED = ["pytest", "torch", "workers.rank"]
"""Imported once, in the process from which workers are forked; where that fails, by each of them."""


class RankFailedError(AssertionError):
    """A rank raised, died or did not answer in time."""


class _World(NamedTuple):
    """Where a call's ranks meet: a fresh name on the pool's store."""

    port: int
    name: str
    tp: int
    pp: int


class _Task(NamedTuple):
    module_name: str
    module_file: str
    payload: bytes
    """Pickled (function, args)."""
    world: _World | None
    timeout_s: float


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class GlooPool:
    """Runs functions on 1 to 4 ranks; see the module's docstring."""

    def __init__(self, size: int = POOL_SIZE) -> None:
        self._workers: list[_Worker | None] = [None] * size
        self._store: Any = None
        self._num_calls = 0

    def __enter__(self) -> "GlooPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in range(len(self._workers)):
            self._kill(rank)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        tp: int = 1,
        pp: int = 1,
        timeout_s: float = 60,
        may_die: bool = False,
    ) -> list[Any]:
        """Call `function(mesh, *args)` on tp * pp ranks of a new gloo world; return the results in rank order."""
        self._num_calls += 1
        world = _World(port=self._store_port(), name=f"call{self._num_calls}", tp=tp, pp=pp)
        return self._submit(function, args, world, tp * pp, timeout_s, may_die)

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 1,
        timeout_s: float = 60,
        may_die: bool = False,
    ) -> list[Any]:
        """Call `function(rank, *args)` on workers without torch.distributed; return the results in rank order."""
        return self._submit(function, args, None, ranks, timeout_s, may_die)

    def _submit(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        world: _World | None,
        num_ranks: int,
        timeout_s: float,
        may_die: bool,
    ) -> list[Any]:
        if num_ranks > len(self._workers):
            raise ValueError(f"{num_ranks} ranks asked for; the pool has {len(self._workers)}")
        task = _Task(function.__module__, inspect.getfile(function), pickle.dumps((function, args)), world, timeout_s)
        for rank in range(num_ranks):
            self._worker(rank).connection.send((rank, task))
        return self._gather(num_ranks, timeout_s, may_die)

    def _gather(self, num_ranks: int, timeout_s: float, may_die: bool) -> list[Any]:
        results: list[Any] = [None] * num_ranks
        failures: dict[int, str] = {}
        waiting = {self._worker(rank).connection: rank for rank in range(num_ranks)}
        deadline_s = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    is_error, payload = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._kill(rank)
                    if not may_die:
                        failures[rank] = "the process died"
                    continue
                if is_error:
                    failures[rank] = payload
                else:
                    results[rank] = pickle.loads(payload)
        for rank in waiting.values():
            self._kill(rank)
            failures[rank] = f"no answer within {timeout_s} s (its stack is on stderr)"
        if failures:
            raise RankFailedError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return results

    def _store_port(self) -> int:
        if self._store is None:
            from torch._C._distributed_c10d import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers[rank]
        if worker is None or not worker.process.is_alive():
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True, name=f"gloo-pool-{rank}")
            process.start()
            theirs.close()
            worker = self._workers[rank] = _Worker(process, ours)
        return worker

    def _kill(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker is not None:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
            self._workers[rank] = None


def _serve(connection: Connection, path: list[str]) -> None:
    """Answer tasks until the pool's side of the pipe closes. Runs in the worker."""
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    while True:
        try:
            rank, task = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(max(task.timeout_s - 1, 0.1))
        answer: tuple[bool, bytes | str]
        try:
            answer = False, pickle.dumps(_perform(rank, task))
        except BaseException:
            answer = True, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)


def _perform(rank: int, task: _Task) -> Any:
    _import_file(task.module_name, task.module_file)
    function, args = pickle.loads(task.payload)
    gc.collect()  # groups of earlier calls, whose threads wake up ten times a second for as long as they live
    gc.freeze()  # a group that ends collects garbage: it need not look through all modules, which takes 0.25 s
    if task.world is None:
        return function(rank, *args)
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from parallel.mesh import Mesh

    world = task.world
    timeout = timedelta(seconds=task.timeout_s)
    store = PrefixStore(world.name, _connect(world.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.tp * world.pp, timeout=timeout)
    try:
        mesh = Mesh.from_world(tensor_parallel=world.tp, pipeline_parallel=world.pp, timeout_s=task.timeout_s)
        return function(mesh, *args)
    finally:
        dist.destroy_process_group()


@functools.cache
def _connect(port: int) -> Any:
    """The pool's store. One connection per worker: with many, every 44th was answered only after 5 s."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False)


def _import_file(name: str, file: str) -> None:
    """Make the module importable under the name that pytest gave it, so that its functions unpickle."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
