"""Looks on while the controller is between two lives: for commands that run as long as somebody watches."""

import math
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from cluster.errors import ControllerError, ServiceStoppedError

_LIMIT_S = 30.0
_RETRY_S = 0.5

_AnswerT = TypeVar("_AnswerT")


def tell_aside(line: str) -> None:
    """Print a line beside what the command puts out."""
    print(line, file=sys.stderr)


class Patience:
    """Asks a controller again and again. One that has answered may fail for a while, which is told once."""

    def __init__(
        self,
        tell: Callable[[str], None] = tell_aside,
        *,
        has_answered: bool = False,
        give_up_s: float = math.inf,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to ask.

        Args:
            tell: is called with one line when the controller begins to fail.
            has_answered: it has answered something else just before.
            give_up_s: time of the clock after which nobody is waited for.
            sleep, clock: of this process.
        """
        self._tell = tell
        self._sleep = sleep
        self._clock = clock
        self._has_answered = has_answered
        self._give_up_s = give_up_s
        self._is_stopping = False

    def note_stopping(self, *, is_stopping: bool) -> None:
        """Note whether the service is being stopped, as the last answer says: then nobody is waited for."""
        self._is_stopping = is_stopping

    def ask(self, question: Callable[[], _AnswerT]) -> _AnswerT:
        """Return the answer.

        Raises:
            ServiceStoppedError: there is none, as was to be expected.
            ControllerError: there is none to the first question, or none for 30 s or until it is time to give up.
        """
        give_up_s: float | None = None
        while True:
            try:
                answer = question()
            except ControllerError as error:
                if self._is_stopping:
                    raise ServiceStoppedError("the service has stopped") from error
                if not self._has_answered or (give_up_s is not None and self._clock() >= give_up_s):
                    raise
                if give_up_s is None:
                    limit_s = min(_LIMIT_S, max(0.0, self._give_up_s - self._clock()))
                    give_up_s = self._clock() + limit_s
                    self._tell(f"{error} (asked again for {limit_s:.0f} s)")
            else:
                self._has_answered = True
                return answer
            self._sleep(_RETRY_S)
