"""Why a request ended, in the words that clients see. The router and the Python SDK share it."""

from weft.v1 import inference_pb2 as pb

_NAMES = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


def finish_reason(reason: pb.FinishReason.ValueType) -> str:
    """Return the name of a reason; one that only a newer replica or router knows is "stop"."""
    return _NAMES.get(reason, "stop")
