"""Between asyncio and the engine's thread: commands go in through a queue, step results come back in order.

event loop                                        engine thread
submit, abort  ---- commands, condition ---->     add_request, abort, launch, take_result, collect, launch, ...
on_step, on_failure  <-- call_soon_threadsafe --  results
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from workers.cores import compute_here
from workers.engine import Engine, EngineLoad, StepResult
from workers.errors import EngineError, EngineStoppedError, GroupFailedError, RequestFailedError
from workers.request import Request, RequestId, RequestOutput
from workers.turn_watch import TurnWatch

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.5
"""How often an idle engine looks whether its ranks are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the results so far add up to."""

    block_hashes: list[bytes]
    """Hashes of the blocks in the prefix cache."""
    load: EngineLoad


class _Arrival(NamedTuple):
    request: Request
    at_s: float


_Command = _Arrival | RequestId
"""A request to serve, or the id of one to end."""


class AsyncEngine:
    """Owns the engine and its thread. Methods belong to the event loop, except where they say otherwise."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepResult], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        longest_turn_s: float | None = None,
    ) -> None:
        """Both callbacks run on the event loop: one for each step, in order, and one at most when the group fails.

        `longest_turn_s`: a step that lasts longer hangs, and the group has failed; None: nobody looks.
        """
        self._engine = engine
        self._on_step = on_step
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._commands: list[_Command] = []
        self._is_stopping = False  # no more commands are taken
        self._has_collected = False  # a step, of which nobody was told yet
        self._wake = threading.Condition()
        self._failure: BaseException | None = None
        self._watch = TurnWatch(longest_turn_s)
        # As of the last result given to on_step:
        self._resident: dict[bytes, None] = {}
        self._load = engine.load

    def start(self) -> None:
        """Start the thread; results come to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watch.start(self._give_up)

    async def stop(self) -> None:
        """End every request with ABORT, give out the last results, end the ranks and the thread.

        From now on requests are refused. A thread that hangs is left to itself.
        """
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._loop is None:  # never started
            self._loop = asyncio.get_running_loop()
            self._refuse_rest()
            self._engine.close()
        else:
            while self._thread.is_alive() and not self._watch.is_hung:
                await asyncio.to_thread(self._thread.join, IDLE_CHECK_S)
        self._watch.cancel()
        await asyncio.sleep(0)  # let the results that are on their way arrive

    def submit(self, request: Request) -> None:
        """Hand a request to the engine, from any thread; a refusal comes back as its output with `error`."""
        if not self._command(_Arrival(request, self._engine.now_s())):
            self._refuse(request)

    def abort(self, request_id: RequestId) -> None:
        """End a request, from any thread. Nothing happens when it has ended, or when all are being ended."""
        self._command(request_id)

    def snapshot(self) -> Snapshot:
        """Return what the results given to `on_step` so far add up to; the next one continues from here."""
        return Snapshot(block_hashes=list(self._resident), load=self._load)

    @property
    def num_resident_blocks(self) -> int:
        """Blocks in the prefix cache, as of the last `on_step` call; may be read in any thread."""
        return len(self._resident)

    def _command(self, command: _Command) -> bool:
        """Hand over a command, unless none are taken any more; whether it was."""
        with self._wake:  # held by the engine's thread for moments only
            if self._is_stopping:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def _refuse(self, request: Request) -> None:
        refused = RequestOutput(request_id=request.request_id, error=self._refusal())
        self._call(self._receive_refusal, refused)

    def _refusal(self) -> EngineError:
        if self._failure is not None:
            return GroupFailedError(f"the engine has failed: {self._failure}")
        return EngineStoppedError("the engine is stopping; it takes no more requests")

    def _refuse_rest(self) -> None:
        """Refuse the requests that were handed over and nobody will come to; nothing more is taken."""
        with self._wake:
            self._is_stopping = True
            commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, _Arrival):
                self._refuse(command.request)

    # On the event loop

    def _receive(self, result: StepResult) -> None:
        for block_hash in result.stored_block_hashes:
            self._resident[block_hash] = None
        for block_hash in result.evicted_block_hashes:
            self._resident.pop(block_hash, None)
        self._load = result.load
        if self._on_step is not None:
            self._on_step(result)

    def _receive_refusal(self, output: RequestOutput) -> None:
        self._receive(StepResult(outputs=[output], stored_block_hashes=[], evicted_block_hashes=[], load=self._load))

    def _give_up(self, error: GroupFailedError) -> None:
        """End what can be ended without the thread, which hangs."""
        logger.error("%s", error)
        self._failure = error
        self._refuse_rest()
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not error:
            return  # it is known as hung, and has failed since
        if self._on_failure is not None:
            self._on_failure(error)

    # In the engine's thread

    def _run(self) -> None:
        compute_here()
        try:
            while (commands := self._wait()) is not None:
                with self._watch:
                    self._advance(commands)
            self._engine.abort_all()
            while self._has_work:
                with self._watch:
                    self._publish(self._engine.step())
                    self._has_collected = False
        except BaseException as error:
            logger.exception("the engine failed")
            self._failure = self._failure or error
            self._refuse_rest()
            self._call(self._fail, error)
        finally:
            self._engine.close()

    @property
    def _has_work(self) -> bool:
        return self._has_collected or self._engine.has_work

    def _wait(self) -> list[_Command] | None:
        """Return the commands since the last call, at once while there is work; None to stop."""
        if not self._has_work:
            self._engine.rest()
        with self._wake:
            if not (self._commands or self._is_stopping or self._has_work):
                self._wake.wait(IDLE_CHECK_S)
            commands, self._commands = self._commands, []
            return None if self._is_stopping and not commands else commands

    def _advance(self, commands: list[_Command]) -> None:
        refusals = []
        for command in commands:
            if isinstance(command, _Arrival):
                refusal = self._add(command)
                if refusal is not None:
                    refusals.append(refusal)
            else:
                self._engine.abort(command)
        if self._has_work or refusals:
            self._engine.launch()
            result = self._engine.take_result()  # of the step before, while this one runs
            result.outputs.extend(refusals)
            if self._has_collected or result.outputs:
                self._publish(result)
            self._has_collected = self._engine.collect()
        else:
            self._engine.check()

    def _add(self, arrival: _Arrival) -> RequestOutput | None:
        """Give the engine a request; the output that refuses it, if it does."""
        request = arrival.request
        try:
            self._engine.add_request(request, arrival_s=arrival.at_s)
        except EngineError as error:
            return RequestOutput(request_id=request.request_id, error=error)
        except Exception as error:  # one request must not end the others
            logger.exception("request %s cannot be added", request.request_id)
            failed = RequestFailedError(f"the request cannot be added: {error!r}")
            return RequestOutput(request_id=request.request_id, error=failed)
        return None

    def _publish(self, result: StepResult) -> None:
        self._call(self._receive, result)

    def _call(self, function: Callable[..., None], argument: object) -> None:
        assert self._loop is not None, "started"
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: nobody is there to hear
            logger.warning("the event loop is closed; a result of the engine is lost")
