"""From sampled tokens to outputs: the text of each request, the end that its text brings, and its last output.

Text is made when it is asked for, which may be after the next step was planned; at once where it may end its request.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from workers.detokenizer import IncrementalDetokenizer
from workers.errors import RequestFailedError
from workers.request import Finish, FinishReason, RequestId, RequestOutput
from workers.scheduler import Scheduler, TokenOutput
from workers.sequence import Sequence
from workers.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Stream:
    """What a request needs to become text."""

    sequence: Sequence
    detokenizer: IncrementalDetokenizer
    last_token_s: float | None = None


class Delivery:
    """The outputs of an engine's requests, in order. Each that is begun ends once: here, by its tokens, or by `end`."""

    def __init__(self, scheduler: Scheduler, stats: EngineStats) -> None:
        """`scheduler` is told of ends that a text brings."""
        self._scheduler = scheduler
        self._stats = stats
        self._streams: dict[RequestId, _Stream] = {}
        self._sampled: list[TokenOutput] = []  # of the step added last, to be delivered
        self._sampled_s = 0.0
        self._outputs: list[RequestOutput] = []

    @property
    def is_pending(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._outputs or self._sampled)

    @property
    def request_ids(self) -> list[RequestId]:
        """Requests whose last output has not been made."""
        return list(self._streams)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._streams

    def begin(self, sequence: Sequence, detokenizer: IncrementalDetokenizer) -> None:
        """Expect tokens of a sequence."""
        self._streams[sequence.request_id] = _Stream(sequence=sequence, detokenizer=detokenizer)

    def add(self, tokens: Iterable[TokenOutput], now_s: float) -> None:
        """Take what a step gave its sequences; what earlier ones gave is delivered."""
        self._sampled_s = now_s
        for token in tokens:
            if token.sequence.request.sampling.stop:  # its text may end it, which is to be known before the next plan
                self._outputs.append(self._deliver(token, now_s))
            else:
                self._sampled.append(token)

    def deliver_all(self) -> None:
        """Make outputs of all that was added."""
        tokens, self._sampled = self._sampled, []
        self._outputs += [self._deliver(token, self._sampled_s) for token in tokens]

    def end(self, sequence: Sequence) -> None:
        """Add the last output of a sequence that has its `finish`, and no tokens to be delivered."""
        self._outputs.append(self._end(sequence, ""))

    def end_at_once(self, request_id: RequestId, text: str, finish: Finish) -> None:
        """Add the only output of a request that need not begin."""
        self._stats.num_finished[finish.reason] += 1
        self._outputs.append(RequestOutput(request_id=request_id, text=text, finish=finish))

    def take(self) -> list[RequestOutput]:
        """Deliver all, and return the outputs since the last call."""
        self.deliver_all()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _deliver(self, token: TokenOutput, now_s: float) -> RequestOutput:
        """Turn what a step gave a sequence into its output. Whatever goes wrong with its text ends it alone."""
        sequence, token_id = token.sequence, token.token_id
        request_id = sequence.request.request_id
        if token_id is None:
            assert token.error is not None, "a step gives a token or an error"
            return self._fail(request_id, token.error)
        stream = self._streams[request_id]
        self._note_token(stream, now_s)
        try:
            text = self._push(stream, token_id, now_s)
        except Exception as error:
            logger.exception("request %s: its text cannot be made", request_id)
            if sequence.finish is None:
                self._scheduler.finish(sequence, FinishReason.ABORT, now_s)
            return self._fail(request_id, RequestFailedError(f"token {token_id} has no text: {error!r}"))
        logprobs = () if token.logprobs is None else (token.logprobs,)
        if sequence.finish is None:
            return RequestOutput(request_id=request_id, token_ids=(token_id,), text=text, logprobs=logprobs)
        return msgspec.structs.replace(self._end(sequence, text), token_ids=(token_id,), logprobs=logprobs)

    def _push(self, stream: _Stream, token_id: int, now_s: float) -> str:
        """Return the text that the token made certain; end the sequence when that completes a stop string."""
        sequence, detokenizer = stream.sequence, stream.detokenizer
        finish, sampling = sequence.finish, sequence.request.sampling
        if finish is not None and finish.stop_token_id is not None and not sampling.include_stop_str_in_output:
            return ""
        text = detokenizer.push(token_id)
        if detokenizer.stop_string is not None:
            if finish is None:
                self._scheduler.finish(sequence, FinishReason.STOP, now_s, stop_string=detokenizer.stop_string)
            else:
                sequence.finish = replace(finish, reason=FinishReason.STOP, stop_string=detokenizer.stop_string)
        return text

    def _note_token(self, stream: _Stream, now_s: float) -> None:
        self._stats.num_generation_tokens += 1
        if stream.last_token_s is None:
            self._stats.ttft_s.add(now_s - stream.sequence.arrival_s)
        else:
            self._stats.itl_s.add(now_s - stream.last_token_s)
        stream.last_token_s = now_s

    def _end(self, sequence: Sequence, text: str) -> RequestOutput:
        """Return the last output of a sequence that has its `finish`."""
        stream = self._streams.pop(sequence.request_id)
        finish = sequence.finish
        assert finish is not None, "only a finished sequence ends"
        usage = finish.usage
        self._stats.num_finished[finish.reason] += 1
        self._stats.queue_s.add(usage.queue_s)
        self._stats.e2e_s.add(usage.queue_s + usage.prefill_s + usage.decode_s)
        return RequestOutput(request_id=sequence.request_id, text=text + stream.detokenizer.flush(), finish=finish)

    def _fail(self, request_id: RequestId, error: Exception) -> RequestOutput:
        del self._streams[request_id]
        self._stats.num_failed += 1
        return RequestOutput(request_id=request_id, error=error)
