"""Engines for tests: over the fake model, or over real ranks, and what their requests got."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from weft.block_hash import block_hashes, root_hash
from weft.recording import Recorder

from helpers.fake_model import VOCAB_SIZE, FakeModel
from helpers.gloo_pool import GlooPool
from workers.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from workers.engine import Engine, StepResult
from workers.errors import GroupFailedError
from workers.executor import Executor, GroupExecutor, LocalExecutor
from workers.model_runner import ModelRunner
from workers.overlap import Lookahead
from workers.plan import ModelOutput, StepPlan
from workers.rank import Rendezvous, follow_group, lead_group
from workers.request import Finish, Request, RequestId, RequestOutput, SamplingParams, TokenLogprobs
from workers.tokenizer import TokenTable


class FakeExecutor:
    """Runs plans on the fake model. `fail` makes the group fail at the next step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_in_flight: int = 1,
        looks_ahead: bool = False,
        windows: tuple[int | None, ...] = (None,),
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.windows = windows
        self.num_host_blocks = num_host_blocks
        self.max_in_flight = max_in_flight
        self.lookahead = Lookahead.ALWAYS if looks_ahead else Lookahead.NEVER
        self.model = FakeModel(block_size, windows)
        self.is_closed = False
        self.num_checks = 0
        self.failure: GroupFailedError | None = None
        self.on_submit: Callable[[StepPlan], None] | None = None
        self.on_collect: Callable[[], None] | None = None
        self._outputs: deque[ModelOutput] = deque()

    def submit(self, plan: StepPlan) -> None:
        if self.on_submit is not None:
            self.on_submit(plan)
        self.check()
        self._outputs.append(self.model.run(plan))

    def collect(self) -> ModelOutput:
        if self.on_collect is not None:
            self.on_collect()
        return self._outputs.popleft()

    def check(self) -> None:
        self.num_checks += 1
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.is_closed = True


class LimitedExecutor:
    """An executor whose cache is used only in part."""

    def __init__(self, executor: Executor, num_blocks: int) -> None:
        assert num_blocks <= executor.num_blocks
        self.num_blocks = num_blocks
        self.windows = executor.windows
        self.num_host_blocks = executor.num_host_blocks
        self.max_in_flight, self.lookahead = executor.max_in_flight, executor.lookahead
        self.submit = executor.submit
        self.collect = executor.collect
        self.check = executor.check
        self.close = executor.close


def letter_pieces(vocab_size: int = VOCAB_SIZE) -> list[str]:
    """Return one piece of text for each id: letters, then pairs of them."""
    letters = "abcdefghij"
    return [*letters, *(x + y for x in letters for y in letters)][:vocab_size]


def letter_tokens(vocab_size: int = VOCAB_SIZE) -> TokenTable:
    """A tokenizer with these pieces."""
    vocab = {piece: i for i, piece in enumerate(letter_pieces(vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenTable(tokenizer)


def anonymous_tokens() -> TokenTable:
    """A tokenizer that knows no token, for models that come without one: all text is empty."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    return TokenTable(tokenizer)


def fake_engine(
    executor: FakeExecutor | None = None,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    max_context: int = 200,
    clock: Callable[[], float] | None = None,
    recorder: Recorder | None = None,
    **scheduler: Any,
) -> Engine:
    """An engine over the fake model, with blocks of four tokens."""
    config = EngineConfig(
        model="fake",
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 8, **scheduler}),
    )
    clock_s = iter(range(1 << 30))
    return Engine(
        config,
        executor or FakeExecutor(),
        tokens=letter_tokens(),
        eos_token_ids=eos_token_ids,
        max_context=max_context,
        vocab_size=VOCAB_SIZE,
        clock=clock or (lambda: next(clock_s) / 1000),
        recorder=recorder,
    )


@dataclass(kw_only=True)
class Outcome:
    """Everything that one request got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish is None, "output after the last"
        assert self.error is None, "output after the last"
        assert output.finish is None or output.error is None
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish, self.error = output.finish, output.error

    @property
    def has_ended(self) -> bool:
        return self.finish is not None or self.error is not None


def run(
    engine: Engine, requests: Iterable[Request] = (), *, each_step: Callable[[StepResult], None] | None = None
) -> dict[str, Outcome]:
    """Add the requests, step until nothing is left, and return each one's outcome."""
    outcomes: dict[str, Outcome] = {}
    for request in requests:
        engine.add_request(request)
        outcomes[request.request_id] = Outcome()
    while engine.has_work:
        result = engine.step()
        for output in result.outputs:
            outcomes.setdefault(output.request_id, Outcome()).add(output)
        if each_step is not None:
            each_step(result)
    assert all(outcome.has_ended for outcome in outcomes.values()), "a request never ended"
    engine.check_integrity()
    return outcomes


def request(name: str, prompt: Iterable[int], *, generated: Iterable[int] = (), **sampling: Any) -> Request:
    """A greedy request, unless `sampling` says otherwise."""
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        generated_token_ids=tuple(generated),
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **sampling}),
    )


def exact_config(
    model: Path, *, cache: CacheConfig, scheduler: SchedulerConfig, tp: int = 1, pp: int = 1, **changes: Any
) -> EngineConfig:
    """Ranks on a CPU in float32, each on one thread, so that no token depends on how work is shared out."""
    return EngineConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        num_threads=1,
        step_timeout_s=30.0,
        cache=cache,
        scheduler=scheduler,
        parallel=ParallelConfig(tensor_parallel=tp, pipeline_parallel=pp),
        **changes,
    )


def engine_over(
    executor: Executor,
    config: EngineConfig,
    *,
    tokens: TokenTable,
    vocab_size: int,
    eos_token_ids: frozenset[int] = frozenset(),
    max_context: int,
    enable_prefix_caching: bool = True,
    prefill_chunk_tokens: int | None = None,
) -> Engine:
    """One more engine over ranks that are there already: their cache holds nothing that it knows of."""
    return Engine(
        replace(
            config,
            cache=replace(config.cache, enable_prefix_caching=enable_prefix_caching),
            scheduler=replace(config.scheduler, prefill_chunk_tokens=prefill_chunk_tokens),
        ),
        executor,
        tokens=tokens,
        eos_token_ids=eos_token_ids,
        max_context=max_context,
        vocab_size=vocab_size,
    )


def runner_of(executor: Executor) -> ModelRunner:
    """What computes on the leader's own rank, for tests that look into it."""
    assert isinstance(executor, LocalExecutor | GroupExecutor)
    return executor._steps._runner


def cached_cells(engine: Engine, executor: Executor, prompt: list[int]) -> list[Tensor]:
    """What lies in the blocks that a prompt has filled, in all layers: keys, values and, in 8 bits, their scales."""
    hashes = block_hashes(root_hash(engine.config.hash_key), prompt, engine.config.cache.block_size)
    blocks = [block for block in map(engine._pool.lookup, hashes) if block is not None]
    assert len(blocks) == len(hashes)
    return [half[blocks] for cache in runner_of(executor)._caches for half in cache if half is not None]


def in_group(pool: GlooPool, config: EngineConfig, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Form a group of the config's shape in the pool and return `function(executor, config, *args)` of its leader.

    `options` are those of GlooPool.call.
    """
    rendezvous = Rendezvous.open()
    shape = config.parallel
    return pool.call(be_rank, config, rendezvous.port, function, args, ranks=shape.world_size, **options)[0]


def be_rank(rank: int, config: EngineConfig, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a process of the pool does in `in_group`; tests put ranks in its place that fail."""
    if rank:
        return follow_group(config, rank=rank, host="127.0.0.1", port=port)
    store = TCPStore("127.0.0.1", port, is_master=False)
    executor = lead_group(config, rendezvous=Rendezvous("127.0.0.1", store))
    try:
        return function(executor, config, *args)
    finally:
        executor.close()
