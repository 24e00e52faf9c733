"""How long a plan takes to the other ranks of a group on one machine, and what it costs the leader to send it.

python -m bench.plan_time [--ranks 2,4,5] [--sequences 32] [--pause-ms 0.5] [--plans 300]

Ranks are processes that wait for plans and do nothing else. Between plans the leader sleeps as long as ranks wait
between two steps (--pause-ms); a longer pause lets the cores fall asleep, which then takes longer than all the rest.
With more ranks than cores the last ones wait for a core.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from rich.console import Console
from rich.table import Table

from bench.load.statistics import percentile
from bench.result_line import end_with_line
from bench.script import count, counts, length, make_parser, run_script
from workers.plan import ScheduledSequence, ScheduledSequences, StepPlan
from workers.transport import LeaderLink, RankLink

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_NUM_WARM_UP_PLANS = 50


def main() -> None:
    """Measure groups of several sizes."""
    parser = make_parser("bench.plan_time", __doc__)
    parser.add_argument("--ranks", type=counts, default=[2, 4, 5], help="sizes of the group, with the leader (2,4,5)")
    parser.add_argument("--sequences", type=count, default=32, help="sequences that a plan schedules")
    parser.add_argument("--pause-ms", type=length, default=0.5, help="milliseconds between two plans")
    parser.add_argument("--plans", type=count, default=300)
    args = parser.parse_args()
    table = Table(
        "ranks", "leader sends", "first rank has it", "last rank has it", "p90", title="microseconds, medians"
    )
    rows = []
    for num_ranks in args.ranks:
        row = _measure(num_ranks, args.sequences, args.pause_ms / 1e3, args.plans)
        rows.append({"ranks": num_ranks, **row})
        table.add_row(str(num_ranks), *(f"{value:.0f}" for value in row.values()))
    Console().print(table)
    end_with_line("plan_time", {"pause_ms": args.pause_ms, "groups": rows})


def _measure(num_ranks: int, num_seqs: int, pause_s: float, num_plans: int) -> dict[str, float]:
    link = LeaderLink(_HOST, range(1, num_ranks))
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank, endpoint in link.endpoints.items():
        end, others = context.Pipe(duplex=False)
        ends.append(end)
        processes.append(context.Process(target=_follow, args=(endpoint, rank, others), daemon=True))
        processes[-1].start()
    link.gather(_START_TIMEOUT_S)
    link.proceed(0)
    starts_s, sent_s = [], []
    decodes = ScheduledSequences.of(ScheduledSequence(slot, 100, 1, [5], [], True) for slot in range(num_seqs))
    for number in range(_NUM_WARM_UP_PLANS + num_plans):
        time.sleep(pause_s)
        starts_s.append(time.perf_counter())
        link.send_plan(StepPlan(number, [], [], decodes))
        sent_s.append(time.perf_counter())
    link.close()
    arrivals_s: list[Sequence[float]] = [end.recv() for end in ends]
    for process in processes:
        process.join()
    return _summarise(starts_s, sent_s, arrivals_s)


def _follow(endpoint: str, rank: int, results: Connection) -> None:
    arrivals_s = []
    with RankLink(endpoint, rank) as link:
        link.report(0, _START_TIMEOUT_S)
        while link.receive_plan() is not None:
            arrivals_s.append(time.perf_counter())  # a clock of the machine, not of the process
    results.send(arrivals_s)


def _summarise(
    starts_s: Sequence[float], sent_s: Sequence[float], arrivals_s: Sequence[Sequence[float]]
) -> dict[str, float]:
    plans = list(zip(starts_s, sent_s, *arrivals_s, strict=True))[_NUM_WARM_UP_PLANS:]
    sends = sorted(1e6 * (sent - start) for start, sent, *_ in plans)
    firsts = sorted(1e6 * (min(arrivals) - start) for start, _, *arrivals in plans)
    lasts = sorted(1e6 * (max(arrivals) - start) for start, _, *arrivals in plans)
    return {
        "send_us": percentile(sends, 0.5),
        "first_us": percentile(firsts, 0.5),
        "last_us": percentile(lasts, 0.5),
        "last_p90_us": percentile(lasts, 0.9),
    }


if __name__ == "__main__":
    run_script(main)
