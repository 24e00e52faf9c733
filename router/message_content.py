"""What a chat message says, from the forms in which clients of model servers write it: a string, text parts, or null.

The HTTP front and the Python SDK share it, so that a conversation means the same over both; on the wire it is a string.
What roles are called, the HTTP and the gRPC front share.
"""

from router.errors import InvalidRequestError

_PART = '{"type": "text", "text": ...}'


def content_text(content: object, *, role: str, place: str) -> str:
    """Return a message's text: parts are joined by line ends, and an assistant may say nothing, which is null.

    Args:
        content: as the client wrote it; None also where it is left out.
        role: of the message.
        place: of the content, for an error.

    Raises:
        InvalidRequestError: it is no text.
    """
    match content:
        case str():
            return content
        case None if role == "assistant":
            return ""
        case None:
            raise _refused(f"{place} is missing; allowed: a string or a list of text parts, or null of an assistant")
        case list() | tuple():
            return "\n".join(_part_text(part, f"{place}[{number}]") for number, part in enumerate(content))
    raise _refused(f"{place} is of type {type(content).__name__}; allowed: a string or a list of text parts")


def template_role(role: str) -> str:
    """Return a message's role as chat templates know it: "developer" is OpenAI's newer name of "system"."""
    return "system" if role == "developer" else role


def _part_text(part: object, place: str) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise _refused(f"{place} has no text; allowed: {_PART}")
        case {"type": kind}:
            raise _refused(f"{place} is a part of type {kind!r}; allowed: {_PART}, or a string")
    raise _refused(f"{place} is no part; allowed: {_PART}, or a string")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="messages")
