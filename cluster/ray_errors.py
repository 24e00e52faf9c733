"""What an error of Ray says, in one line that an operator can use."""

from ray.exceptions import ActorDiedError, RayTaskError

_WITHOUT_A_WORD = "Worker exit type: SYSTEM_ERROR"
_DETAIL = "Worker exit detail: "


def in_a_line(error: BaseException) -> str:
    """Return the most telling line; where a process ended without a word, say which one and what that means."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, RayTaskError) or (isinstance(error, ActorDiedError) and error.actor_init_failed):
        return lines[-1].strip()  # the last line of a traceback
    if isinstance(error, ActorDiedError):
        return _cause_of_death(lines)
    return lines[0].strip()


def _cause_of_death(lines: list[str]) -> str:
    """Return the cause from Ray's text: a line that is always the same, facts that begin with a tab, and the cause."""
    cause = next((line for line in lines[1:] if not line.startswith("\t")), lines[0])
    if _WITHOUT_A_WORD in cause:
        pid = next((f" ({line.strip()})".replace(":", "") for line in lines if line.startswith("\tpid: ")), "")
        return f"its process{pid} ended without a word: killed, as by the kernel when memory runs out, or crashed"
    return cause.partition(_DETAIL)[2] or cause
