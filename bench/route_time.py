"""What a router computes to place one request, by policy and number of replicas: `python -m bench.route_time`.

    what there is: one model whose replicas are all connected and hold a system prompt of 16 blocks; each also holds 48
                   blocks of a conversation of its own
    a request:     64 blocks of 16 tokens, hashed before: the system prompt and, every second time, a conversation that
                   a replica holds; else one that is new
    timed:         what dispatch.py and flight.py ask of the model's route: whether a replica is there, which ones take
                   requests, and which of these gets it. Median and p99 over the requests

No sockets, no tasks. It should not grow with the replicas where a policy looks at two; prefix affinity and the least
loaded look at all.
"""

import random
import time
from collections.abc import Sequence

from weft.v1 import replica_pb2

from bench.load.statistics import percentile
from bench.result_line import end_with_line
from bench.script import count, make_parser, run_script
from router.breaker import Breaker
from router.config import BreakerConfig, FailoverConfig, PolicyName, PrefixPolicyConfig
from router.placing import Placing
from router.prefix_index import ReplicaId
from router.prefix_policy import make_policy
from router.replica_book import ReplicaBook
from router.route import Route, ServedModel

BLOCK_SIZE = 16
SHARED_BLOCKS, OWN_BLOCKS = 16, 48


def make_route(
    policy: PolicyName, num_replicas: int, rng: random.Random
) -> tuple[Route[ReplicaBook], list[list[bytes]]]:
    """Return a model with replicas that hold what they hold, and the blocks of each one's conversation."""
    served = ServedModel(name="m", path="", max_context=0)
    route: Route[ReplicaBook] = Route(served, make_policy(policy, PrefixPolicyConfig(), rng))
    route.accept(replica_pb2.Snapshot(block_size=BLOCK_SIZE))
    shared = [rng.randbytes(16) for _ in range(SHARED_BLOCKS)]
    prompts = []
    for number in range(num_replicas):
        book = ReplicaBook(
            ReplicaId(f"m-{number}.1"), index=route.index, breaker=Breaker(BreakerConfig()), on_change=route.note_change
        )
        route.add(book)
        prompts.append([*shared, *(rng.randbytes(16) for _ in range(OWN_BLOCKS))])
        book.note_snapshot(prompts[-1])
        book.note_load(rng.randrange(8), rng.randrange(2000), is_draining=False)
        book.note_ready()
    return route, prompts


def measure(policy: PolicyName, num_replicas: int, num_requests: int) -> list[float]:
    """Return the seconds of each request."""
    rng = random.Random(1)
    route, prompts = make_route(policy, num_replicas, rng)
    times = []
    for number in range(num_requests):
        hashes: Sequence[bytes] = rng.choice(prompts)
        if number % 2:
            hashes = [*hashes[:SHARED_BLOCKS], *(rng.randbytes(16) for _ in range(OWN_BLOCKS))]
        placing = Placing(FailoverConfig(), "m", lambda: 0.0)
        start_s = time.perf_counter()
        placing.seek(start_s)
        assert route.num_ready
        links = placing.find(route, start_s)
        route.choose(links, hashes, len(hashes) * BLOCK_SIZE)
        times.append(time.perf_counter() - start_s)
    return times


def main() -> None:
    """Print a table, then a line of JSON."""
    parser = make_parser("bench.route_time", __doc__)
    parser.add_argument("--replicas", type=count, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=count, default=2000)
    options = parser.parse_args()
    rows = []
    print(f"{'policy':16}{'replicas':>10}{'median us':>12}{'p99 us':>10}")
    for policy in PolicyName:
        for num_replicas in options.replicas:
            times = sorted(measure(policy, num_replicas, options.requests))
            median_us, p99_us = percentile(times, 0.5) * 1e6, percentile(times, 0.99) * 1e6
            print(f"{policy:16}{num_replicas:10}{median_us:12.1f}{p99_us:10.1f}")
            rows.append({"policy": policy, "replicas": num_replicas, "median_us": median_us, "p99_us": p99_us})
    end_with_line("route_time", {"rows": rows})


if __name__ == "__main__":
    run_script(main)
