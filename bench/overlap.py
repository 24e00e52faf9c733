"""How long a device that needs no CPU stands still under backlog, waiting for the host: a stand-in for a GPU.

python -m bench.overlap [--step 5,10,20] [--running 32,256] [--launch 0] [--repetition-penalty 1] [--logprobs 20]
                        [--rounds 3]

All that the host does is real: scheduler, inputs, sampler, engine, detokenizer, the event loop and the frames that go
to a router. What the device does is not (queued_device.py): each step takes it the same time, in milliseconds. So many
sequences run, and four times as many are there from the start: 32 to 256 tokens in, 16 to 128 out. `engine`: its loop
alone; `served`: its thread beside an event loop that makes frames. The target is that it waits less than 2 % of the
time. `--launch`: milliseconds that starting a step takes the host besides, Python's lock held.
"""

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from weft.v1 import replica_pb2

from bench.load.calls import Lengths, Session
from bench.load.datasets import DatasetOptions, make_sessions, take_calls
from bench.load.engine_run import run_engine
from bench.queued_device import QueuedDevice, build_queued_engine
from bench.result_line import end_with_line
from bench.script import count, counts, length, lengths, make_parser, run_script
from cluster.config import build_section
from cluster.models import DEFAULT_MODEL, resolve_model
from cluster.replica_connection import OutboxLimits, RouterConnection
from cluster.replica_wire import write_output
from workers.async_engine import AsyncEngine
from workers.config import EngineConfig
from workers.engine import Engine, StepResult
from workers.request import Request, RequestId, SamplingParams
from workers.stats import RankStats

_DATASET = DatasetOptions(inputs=Lengths(low=32, high=256), outputs=Lengths(low=16, high=128))
_FORMATS = {"share": ".2%", "ms": ".2f", "steps": ".0f"}


def main() -> None:
    """Measure each length of a step."""
    parser = make_parser("bench.overlap", __doc__)
    parser.add_argument("--step", type=lengths, default=[5, 10, 20], help="milliseconds on the device (5,10,20)")
    parser.add_argument("--launch", type=length, default=0.0, help="milliseconds of the host beside it")
    parser.add_argument("--running", type=counts, default=[32, 256], help="sequences at once (32,256)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="penalty of each request; 1: none")
    parser.add_argument("--logprobs", type=count, help="alternatives whose log-probabilities each token comes with")
    parser.add_argument("--rounds", type=count, default=3)
    args = parser.parse_args()
    sys.setswitchinterval(2e-4)  # as in cluster/rank_actor.py
    torch.set_num_threads(1)  # who launches steps needs no team
    sampling = SamplingParams(
        temperature=0, ignore_eos=True, repetition_penalty=args.repetition_penalty, logprobs=args.logprobs
    )
    table = Table("step, ms", "running", "engine: waits", "ms a step", "steps", "served: waits", "ms a step", "steps")
    rows = []
    for step_ms in args.step:
        for num_running in args.running:
            rounds = [_measure(step_ms, args.launch, num_running, sampling, seed) for seed in range(args.rounds)]
            row = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
            rows.append({"step_ms": step_ms, "running": num_running, **row})
            cells = (format(value, _FORMATS[name.split("_")[1]]) for name, value in row.items())
            table.add_row(f"{step_ms:g}", str(num_running), *cells)
    Console().print(table)
    end_with_line("overlap", {"launch_ms": args.launch, "logprobs": args.logprobs, "rows": rows})


def _measure(
    step_ms: float, launch_ms: float, num_running: int, sampling: SamplingParams, seed: int
) -> dict[str, float]:
    engine = _run_engine(step_ms, launch_ms, num_running, sampling, seed)
    served = _run_served(step_ms, launch_ms, num_running, sampling, seed)
    return {f"engine_{name}": value for name, value in engine.items()} | {
        f"served_{name}": value for name, value in served.items()
    }


def _run_engine(
    step_ms: float, launch_ms: float, num_running: int, sampling: SamplingParams, seed: int
) -> dict[str, float]:
    engine, stats = _build(step_ms, launch_ms, num_running)
    sessions = _sessions(engine, num_running, seed)
    try:
        run_engine(engine, sessions, sampling, cache_salt="")
    finally:
        engine.close()
    return _shares(engine, stats)


def _run_served(
    step_ms: float, launch_ms: float, num_running: int, sampling: SamplingParams, seed: int
) -> dict[str, float]:
    engine, stats = _build(step_ms, launch_ms, num_running)
    asyncio.run(_Served(engine, sampling).run(_sessions(engine, num_running, seed)))
    return _shares(engine, stats)


class _Served:
    """An engine's thread, and the event loop that makes a router's frames of what it gives."""

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine = AsyncEngine(engine, on_step=self._on_step)
        self._sampling = sampling
        self._connection = RouterConnection(1, "bench", limits=OutboxLimits(), clock=time.monotonic)
        self._num_open = 0
        self._has_ended = asyncio.Event()

    async def run(self, sessions: Sequence[Session]) -> None:
        """Run until every request has ended."""
        self._num_open = len(sessions)
        for number, session in enumerate(sessions):
            name = self._connection.open_request(str(number))
            assert name is not None, "each has its own"
            self._engine.submit(_to_request(name, session, self._sampling))
        writer = asyncio.create_task(self._write())
        self._engine.start()
        await self._has_ended.wait()
        await self._engine.stop()
        writer.cancel()

    async def _write(self) -> None:
        async for frame in self._connection.frames():
            frame.SerializeToString()

    def _on_step(self, result: StepResult) -> None:
        """Do what cluster/replica_server.py does."""
        for output in result.outputs:
            message = self._connection.output_of(output.request_id)
            assert message is not None, "nothing is aborted"
            write_output(output, message)
            if output.finish is not None or output.error is not None:
                self._connection.end_request(output.request_id)
                self._num_open -= 1
        load = replica_pb2.Load(num_running=result.load.num_running, num_waiting=result.load.num_waiting)
        self._connection.end_step(result.stored_block_hashes, result.evicted_block_hashes, load)
        if not self._num_open:
            self._has_ended.set()


def _build(step_ms: float, launch_ms: float, num_running: int) -> tuple[Engine, RankStats]:
    section = {
        "path": str(resolve_model(DEFAULT_MODEL)),
        "cache": {"num_blocks": 8192},
        "scheduler": {"async_scheduling": True, "max_num_seqs": num_running},
    }
    config: EngineConfig = build_section(section).to_spec(hash_key=b"bench").engine
    stats = RankStats()
    engine = build_queued_engine(config, QueuedDevice(step_ms / 1e3, launch_ms / 1e3), stats)
    gc.collect()
    gc.freeze()  # as in cluster/imports.py
    return engine, stats


def _sessions(engine: Engine, num_running: int, seed: int) -> list[Session]:
    return list(take_calls(make_sessions(_DATASET, vocab_size=engine.vocab_size, seed=seed), 4 * num_running))


def _to_request(name: RequestId, session: Session, sampling: SamplingParams) -> Request:
    (call,) = session.calls
    assert isinstance(call.prompt, tuple), "prompts are token ids here"
    return Request(request_id=name, prompt_token_ids=call.prompt, sampling=replace(sampling, max_tokens=call.num_out))


def _shares(engine: Engine, stats: RankStats) -> dict[str, float]:
    """Return the idle share, what it is in milliseconds of a step, and how many steps there were."""
    idle_s, num_steps = stats.model_idle_s, engine.stats.num_steps
    return {"share": idle_s / (idle_s + stats.model_busy_s), "ms": 1e3 * idle_s / num_steps, "steps": num_steps}


if __name__ == "__main__":
    run_script(main)
