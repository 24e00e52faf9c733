"""Time to the first token of a long prefix: computed, found on the host, found on the device; and what saving costs.

python -m bench.host_tier MODEL [--tokens 2001] [--repeats 5]

The pool holds one prompt, so that each evicts the one before. Three kinds of request take turns: one with a new
prompt, one with the prompt that was evicted last, and that one again; beside them new prompts in an engine without a
host tier. The limit of the second is memory's rate for what is copied: the evicted blocks out, the found ones in.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.result_line import end_with_line
from bench.script import count, make_parser, run_script
from parallel.families.registry import describe_model
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.request import Request, RequestId, SamplingParams

_BLOCK_SIZE = 16
_NUM_PROMPTS_ON_HOST = 3
_NUM_WARM_UPS = 5
"""Rounds that are left out: until then slots are used for the first time, and the system hands out their pages."""
_KINDS = ("computed, no tier", "computed", "host", "device")


class Prompts:
    """New prompts of one length, and how long an engine takes to the first token of one."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._num_requests = 0

    def draw(self) -> tuple[int, ...]:
        """Return one that shares no prefix with any other."""
        return tuple(self._random.randrange(5, self._vocab_size) for _ in range(self._num_tokens))

    def time_to_first_token(self, engine: Engine, prompt: tuple[int, ...]) -> float:
        """Serve one token and return the seconds."""
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request_id = RequestId(str(self._num_requests))
        engine.add_request(Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
        start_s = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start_s


def measure(model: str, *, num_tokens: int, num_repeats: int) -> dict[str, list[float]]:
    """Return seconds to the first token by kind."""
    plain, tiered = (_build(model, num_tokens, num_prompts) for num_prompts in (0, _NUM_PROMPTS_ON_HOST))
    prompts = Prompts(num_tokens, plain.vocab_size)
    earlier = prompts.draw()
    prompts.time_to_first_token(tiered, earlier)
    times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for _ in range(num_repeats + _NUM_WARM_UPS):
        new = prompts.draw()
        turns = ((plain, prompts.draw()), (tiered, new), (tiered, earlier), (tiered, earlier))
        for kind, (engine, prompt) in zip(_KINDS, turns, strict=True):
            times[kind].append(prompts.time_to_first_token(engine, prompt))
        earlier = new  # evicted from the device by the last two
    num_found = num_tokens // _BLOCK_SIZE * _BLOCK_SIZE * (num_repeats + _NUM_WARM_UPS)
    stats = tiered.stats
    if (stats.num_host_tokens, stats.num_cached_tokens) != (num_found, 2 * num_found):
        raise SystemExit(f"{stats.num_host_tokens} tokens came from the host; expected: {num_found}")
    for engine in (plain, tiered):
        engine.close()
    return {kind: each[_NUM_WARM_UPS:] for kind, each in times.items()}


def _build(model: str, num_tokens: int, num_prompts: int) -> Engine:
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    host_cache_bytes = num_prompts * num_blocks * _block_bytes(model)
    cache = CacheConfig(block_size=_BLOCK_SIZE, num_blocks=num_blocks, host_cache_bytes=host_cache_bytes)
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=num_tokens)
    return build_engine(EngineConfig(model=model, dtype="bfloat16", cache=cache, scheduler=scheduler))


def _block_bytes(model: str) -> int:
    description = describe_model(Path(model))
    return description.num_layers * _BLOCK_SIZE * 2 * description.num_kv_heads * description.head_dim * 2


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = make_parser("bench.host_tier", __doc__)
    parser.add_argument("model", help="a folder in Hugging Face layout")
    parser.add_argument("--tokens", type=count, default=2001, help="length of each prompt")
    parser.add_argument("--repeats", type=count, default=5)
    options = parser.parse_args(argv)
    times = measure(options.model, num_tokens=options.tokens, num_repeats=options.repeats)
    table = Table(title=f"Time to the first token of {options.tokens} tokens")
    for heading in ("prefix", "median", "least", "most"):
        table.add_column(heading)
    for kind, each in times.items():
        table.add_row(kind, *(f"{value * 1e3:.1f} ms" for value in (median(each), min(each), max(each))))
    Console().print(table)
    end_with_line("host_tier", {"tokens": options.tokens, "seconds": times})


if __name__ == "__main__":
    run_script(main)
