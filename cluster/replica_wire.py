"""Between the messages of replica.proto and the engine's values; the one place where both are known."""

import grpc
from weft.v1 import inference_pb2, replica_pb2

from workers.errors import EngineStoppedError, GroupFailedError, InvalidRequestError, QueueFullError
from workers.request import FinishReason, Request, RequestId, RequestOutput, SamplingParams, TokenLogprobs, Usage

_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}


def to_request(submit: replica_pb2.Submit, request_id: RequestId, now_s: float) -> Request:
    """Return what the engine is asked. Raises InvalidRequestError when a sampling value is out of range.

    Args:
        submit: as the router sent it.
        request_id: the engine's name for it, unique over all routers.
        now_s: on the engine's clock.
    """
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        generated_token_ids=tuple(submit.generated_token_ids),
        sampling=_to_sampling(submit.sampling),
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        deadline_s=now_s + submit.timeout_s if submit.timeout_s > 0 else None,
    )


def write_output(output: RequestOutput, message: replica_pb2.RequestOutput) -> None:
    """Write what one step gave one request behind what is there of the steps before it."""
    message.token_ids.extend(output.token_ids)
    message.text += output.text
    for entry in output.logprobs:
        _write_logprobs(entry, message.logprobs.add())
    if output.error is not None:
        message.failed.CopyFrom(to_failed(output.error))
    elif output.finish is not None:
        finish = output.finish
        finished = message.finished
        finished.reason = _FINISH_REASONS[finish.reason]
        if finish.stop_string is not None:
            finished.stop_string = finish.stop_string
        elif finish.stop_token_id is not None:
            finished.stop_token_id = finish.stop_token_id
        finished.usage.CopyFrom(_to_usage(finish.usage))


def to_failed(error: Exception) -> replica_pb2.RequestFailed:
    """Return how a request was refused or lost."""
    return replica_pb2.RequestFailed(code=_status_code(error).value[0], message=str(error))


def _status_code(error: Exception) -> grpc.StatusCode:
    """Return the canonical code for what the engine refused or lost."""
    match error:
        case InvalidRequestError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case QueueFullError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case EngineStoppedError() | GroupFailedError():  # another replica may serve it
            return grpc.StatusCode.UNAVAILABLE
        case _:
            return grpc.StatusCode.INTERNAL


def _to_sampling(sampling: inference_pb2.SamplingParams) -> SamplingParams:
    """Return what the router has set; the rest has the engine's defaults."""
    scalars = {field.name: value for field, value in sampling.ListFields() if field.name not in _REPEATED}
    if scalars.get("top_k") == -1:
        scalars["top_k"] = 0
    return SamplingParams(**scalars, stop=tuple(sampling.stop), stop_token_ids=tuple(sampling.stop_token_ids))


_REPEATED = frozenset({"stop", "stop_token_ids"})


def _write_logprobs(entry: TokenLogprobs, message: inference_pb2.TokenLogprobs) -> None:
    chosen, top = message.chosen, message.top
    chosen.token_id, chosen.logprob = entry.token_id, entry.logprob
    for token_id, logprob in entry.top:  # written in place: made first and copied in, they take three times as long
        one = top.add()
        one.token_id, one.logprob = token_id, logprob


def _to_usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=usage.queue_s,
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
    )
