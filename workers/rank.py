"""Forms a group: ranks meet at the leader's store, load their parts, agree on the cache, and follow plans to the end.

    leader                                   every other rank
    Rendezvous.open(): a store and its port
    lead_group                               follow_group
        plan endpoints into the store  --->      connect
        gather  <------------------------------  report       every rank is there
        torch.distributed                        torch.distributed
        choose the dtype                         choose the dtype
        gather, the least, proceed  <--------->  report       all take one that every device has
        look for what attends                    look for what attends
        gather, the least, proceed  <--------->  report       for each: all take the first that all have (CUDA)
        choose the kernels                       choose the kernels
        gather, the least, proceed  <--------->  report       all take compiled ones, or none
        load                                     load
        gather  <------------------------------  report       every rank has its weights
        choose the number of blocks              choose the number of blocks
        gather, the least, proceed  <--------->  report       all take the least
        allocate                                 allocate
        gather  <------------------------------  report       ready

An error on any rank goes to the leader over its connection and ends the group.
"""

import logging
import os
import platform
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from parallel.checkpoint import Progress, load_decoder
from parallel.device.base import Device
from parallel.device.select import select_device
from parallel.errors import DeviceError
from parallel.families.registry import describe_model
from parallel.kernels.base import Kernels
from parallel.kernels.choice import check_int8_cache
from parallel.kernels.inductor import InductorKernels
from parallel.kernels.native.cache import choose_triton_cache
from parallel.kernels.select import choose_dtype, has_attention, select_kernels
from parallel.mesh import Mesh
from parallel.one_shot import OneShotAllReduce
from workers.config import AttentionBackendName, EngineConfig
from workers.cores import threads_per_rank
from workers.errors import EngineConfigError, GroupFailedError
from workers.executor import Executor, GroupExecutor, LocalExecutor, explain
from workers.interfaces import choose_interfaces
from workers.model_runner import ModelRunner
from workers.overlap import StepExecution
from workers.plan import ModelOutput
from workers.stats import RankStats
from workers.transport import LeaderLink, RankLink

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0
"""How long the leader waits for every rank to be there."""
LOAD_TIMEOUT_S = 3600.0
"""How long the leader waits for every rank to read its weights; ranks that die meanwhile are noticed at once."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of ranks that want several the group takes the first: `auto` is a later one only on a device that has it, and a rank
that reads another's hidden states in a dtype of its own would go on with any numbers."""
_ATTENTION_BACKENDS: Sequence[AttentionBackendName] = ("flash-attention", "flashinfer", "triton")
"""In the order in which `auto` takes them."""

_Agree = Callable[[int], int]
"""Tells a number to the ranks of the group, each of which tells one at this point; returns the least of them."""


class Rendezvous:
    """Where the ranks of one formation of a group meet: a store in the leader's process."""

    def __init__(self, host: str, store: TCPStore) -> None:
        self.host = host
        """The leader's address, as other ranks reach it."""
        self.store = store

    @classmethod
    def open(cls, host: str = "127.0.0.1") -> "Rendezvous":
        """Listen on a free port of this address only."""
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = TCPStore(  # left to itself it would listen on every address
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return cls(host, store)

    @property
    def port(self) -> int:
        """The store's port."""
        return int(self.store.port)


def lead_group(
    config: EngineConfig,
    *,
    rendezvous: Rendezvous | None = None,
    progress: Progress | None = None,
    stats: RankStats | None = None,
) -> Executor:
    """Load the model as rank 0, wait for the other ranks, and return what executes plans on all of them.

    Args:
        config: the same on all ranks.
        rendezvous: where the others come; None when there are none.
        progress: called with the fraction of this rank's weights read so far.
        stats: where to note what this rank does.

    Raises:
        ModelError, EngineConfigError: this rank cannot use the model or the settings.
        GroupFailedError: another rank could not, died, or did not come.
    """
    if config.parallel.world_size == 1:
        _set_num_threads(config, num_local_ranks=1)
        runner = _load(config, Mesh.single(), int, progress, stats)  # `int`: one rank agrees with itself
        num_blocks = runner.choose_num_blocks()
        runner.allocate(num_blocks)
        return LocalExecutor(runner, num_blocks=num_blocks)
    if rendezvous is None:
        raise EngineConfigError(f"a group of {config.parallel.world_size} ranks needs a rendezvous")
    link = LeaderLink(rendezvous.host, range(1, config.parallel.world_size))
    try:
        return _lead(config, link, rendezvous, progress, stats)
    except Exception as error:
        failure = _blame(link, error)
        link.close(f"{type(failure).__name__}: {failure}")
        _leave(has_failed=True)
        if failure is error:
            raise
        raise failure from error


def follow_group(
    config: EngineConfig,
    *,
    rank: int,
    host: str,
    port: int,
    progress: Progress | None = None,
    stats: RankStats | None = None,
    on_lost: Callable[[GroupFailedError], object] = lambda _: None,
) -> None:
    """Be rank `rank` of the group whose leader's rendezvous is at (host, port), until the leader ends it.

    `progress` and `stats` are as in lead_group. `on_lost` is called in another thread where the leader is gone while
    this one waits within a step.

    Raises:
        GroupFailedError: the leader is gone or ended the group because it failed, or a plan is not the next one.
        CollectiveError: another rank is gone.
        ModelError, EngineConfigError: this rank cannot use the model or the settings.
    """
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S))
    endpoint = store.get(_endpoint_key(rank)).decode()
    try:
        with RankLink(endpoint, rank) as link:  # its last words come before the end of what ranks have in common
            link.report(0, JOIN_TIMEOUT_S)
            mesh = join_mesh(config, rank, host, store)
            agree: _Agree = partial(link.report, timeout_s=LOAD_TIMEOUT_S)
            runner = _load(config, mesh, agree, progress, stats)
            link.report(0, LOAD_TIMEOUT_S)
            runner.allocate(agree(runner.choose_num_blocks()))
            link.report(0, LOAD_TIMEOUT_S)
            with link.watched(on_lost):
                follow_plans(link, runner)
    except BaseException:
        _leave(has_failed=True)
        raise
    _leave(runner)


def follow_plans(link: RankLink, runner: ModelRunner) -> None:
    """Do this rank's part of every plan, and send its outputs.

    Of QUEUED steps the next, if that is planned, is started before the output of one is waited for.
    """
    started: deque[Callable[[], ModelOutput | None]] = deque()
    while (plan := link.receive_plan()) is not None:
        started.append(runner.start(runner.prepare(plan)))
        while started and (runner.execution is not StepExecution.QUEUED or not link.has_message()):
            output = started.popleft()()
            if output is not None:
                link.send_output(output)


def _lead(
    config: EngineConfig,
    link: LeaderLink,
    rendezvous: Rendezvous,
    progress: Progress | None,
    stats: RankStats | None,
) -> Executor:
    for rank, endpoint in link.endpoints.items():
        rendezvous.store.set(_endpoint_key(rank), endpoint)
    _meet(link, JOIN_TIMEOUT_S)
    mesh = join_mesh(config, 0, rendezvous.host, rendezvous.store)
    agree: _Agree = partial(_take_least, link)
    runner = _load(config, mesh, agree, progress, stats)
    _meet(link, LOAD_TIMEOUT_S)
    num_blocks = agree(runner.choose_num_blocks())
    runner.allocate(num_blocks)
    _meet(link, LOAD_TIMEOUT_S)
    logger.info("group of %d ranks is ready with %d blocks", mesh.world_size, num_blocks)
    return GroupExecutor(
        runner,
        link,
        num_blocks=num_blocks,
        num_stages=mesh.pp.size,
        last_rank=(mesh.pp.size - 1) * mesh.tp.size,
        step_timeout_s=config.step_timeout_s,
        leave=lambda has_failed: _leave(runner, has_failed=has_failed),
    )


def _meet(link: LeaderLink, timeout_s: float) -> None:
    link.gather(timeout_s)
    link.proceed(0)


def _take_least(link: LeaderLink, value: int) -> int:
    least = min(value, *link.gather(LOAD_TIMEOUT_S).values())
    link.proceed(least)
    return least


def _blame(link: LeaderLink, error: Exception) -> Exception:
    """Return an error's reason: the leader's own about model and settings stand, for others the ranks may know it."""
    if isinstance(error, (ValueError, GroupFailedError)):
        return error
    return explain(link, error)


def join_mesh(config: EngineConfig, rank: int, host: str, store: TCPStore) -> Mesh:
    """Enter torch.distributed with every other rank, and share this machine's cores with those on it.

    All ranks call it, with the store of one Rendezvous and its host.
    """
    os.environ.update(choose_interfaces(host, os.environ))
    world_size = config.parallel.world_size
    device = select_device(config.device, _local_rank(rank))
    store.set(_node_key(rank), platform.node())
    dist.init_process_group(
        device.collective_backend,
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.step_timeout_s),
    )
    nodes = [store.get(_node_key(other)) for other in range(world_size)]
    _set_num_threads(config, num_local_ranks=nodes.count(nodes[rank]))
    mesh = Mesh.from_world(
        tensor_parallel=config.parallel.tensor_parallel,
        pipeline_parallel=config.parallel.pipeline_parallel,
        timeout_s=config.step_timeout_s,
    )
    if config.parallel.one_shot_all_reduce and device.collective_backend == "nccl":
        _share_memory(mesh, nodes, device)
    return mesh


def _share_memory(mesh: Mesh, nodes: Sequence[bytes], device: Device) -> None:
    """Give tensor-parallel ranks a faster way for small all-reduces, where they are all on one node."""
    tp, first = mesh.tp, mesh.rank - mesh.tp.rank
    if tp.group is not None and len({*nodes[first : first + tp.size]}) == 1:
        tp.one_shot = OneShotAllReduce.connect(tp.group, size=tp.size, device=device.torch_device)


def _leave(runner: ModelRunner | None = None, *, has_failed: bool = False) -> None:
    """End this process's part in torch.distributed, if it has one; all ranks call it.

    NCCL's communicators are left to the end of the process after a failure: destroying one waits for the other ranks
    and for what is queued on the GPU, which may wait for ever. It also waits for the graphs that hold a collective of
    it, so that recorded steps go first.
    """
    if not dist.is_initialized() or (has_failed and dist.get_backend() == dist.Backend.NCCL):
        return
    if runner is not None:
        runner.drop_recordings()
    dist.destroy_process_group()


def _load(
    config: EngineConfig, mesh: Mesh, agree: _Agree, progress: Progress | None, stats: RankStats | None
) -> ModelRunner:
    folder = Path(config.model)
    device: Device = select_device(config.device, _local_rank(mesh.rank))
    dtype = _DTYPES[agree(_DTYPES.index(choose_dtype(config.dtype, folder, device, config.kernels)))]
    config = replace(config, attention_backend=_choose_attention(config, device.torch_device, agree))
    with _refusing_settings():
        if device.torch_device.type == "cuda":
            os.environ.update(choose_triton_cache(os.environ))
        if config.cache.dtype == "int8":
            check_int8_cache(device.torch_device.type, describe_model(folder), block_size=config.cache.block_size)
        kernels = _select_kernels(config, device.torch_device, dtype)
    are_fast = int(not kernels.slowness)
    if are_fast > agree(are_fast):
        logger.warning("plain torch computes, which is several times slower: other ranks have no compiled kernels")
        kernels = _select_kernels(replace(config, kernels="cpu"), device.torch_device, dtype)
    decoder = load_decoder(
        folder,
        mesh=mesh,
        device=device.torch_device,
        dtype=dtype,
        kernels=kernels,
        layer_partition=config.parallel.layer_partition,
        expert_parallel=config.parallel.expert_parallel,
        int8_linears=config.quantization == "int8",
        int8_cache=config.cache.dtype == "int8",
        max_context=config.max_context,
        progress=progress,
    )
    if isinstance(kernels, InductorKernels):  # no other rank is to wait for minutes inside of a step
        with _refusing_settings():
            kernels.compile_ahead(*decoder.layer_inputs(), decoder.num_local_layers)
    return ModelRunner(decoder, mesh=mesh, device=device, config=config, stats=stats)


def _choose_attention(config: EngineConfig, device: torch.device, agree: _Agree) -> AttentionBackendName:
    """The backend that is asked for; where that is left open, the first that all ranks have.

    With different ones they would record different steps, each with its all-reduces, and wait for each other for ever.
    """
    is_open = config.attention_backend == "auto" and device.type == "cuda" and config.kernels != "reference"
    for backend in _ATTENTION_BACKENDS if is_open else ():
        if agree(int(has_attention(device, backend))):
            return backend
    return config.attention_backend


@contextmanager
def _refusing_settings() -> Iterator[None]:
    """Refuse settings whose kernels cannot be had here."""
    try:
        yield
    except DeviceError as error:
        raise EngineConfigError(str(error)) from error


def _select_kernels(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    return select_kernels(
        device,
        dtype,
        config.kernels,
        attention_backend=config.attention_backend,
        compiles=config.compile,
        max_graph_size=config.max_cudagraph_capture_size,
    )


def _local_rank(rank: int) -> int:
    """The GPU for a rank among those that its process sees: Ray shows each its own, elsewhere all see all."""
    return rank % max(1, torch.cuda.device_count())


def _set_num_threads(config: EngineConfig, *, num_local_ranks: int) -> None:
    torch.set_num_threads(config.num_threads or threads_per_rank(num_local_ranks))


def _endpoint_key(rank: int) -> str:
    return f"plans/{rank}"


def _node_key(rank: int) -> str:
    return f"node/{rank}"
