"""Who is in flight and who waits for it, first come first served, or is refused early. Pure; time is an argument.

admission.py lets tasks wait for what is decided here.
"""

from router.config import AdmissionConfig
from router.errors import OverloadedError

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0
_FIRST_GAP_S = 0.05
"""Assumed time between two ends until it is measured: a guess, so short that the first clients come back soon."""
_GAP_WEIGHT = 0.1
"""Weight of a new gap in the mean: it follows the last ten or so, and one long request does not upset it."""


class Places:
    """The places of one router, by tickets: each request has one from `enter` to `leave`."""

    def __init__(self, config: AdmissionConfig) -> None:
        self.config = config
        self._num_tickets = 0
        self._entered: set[int] = set()
        self._in_flight: set[int] = set()
        self._waiting: dict[int, None] = {}  # in their order; none where a place is free
        self._gap_s = _FIRST_GAP_S  # mean time between two requests that end, while some wait
        self._last_end_s: float | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests that have started."""
        return len(self._in_flight)

    @property
    def num_queued(self) -> int:
        """Requests that have entered and not started."""
        return len(self._entered) - len(self._in_flight)

    @property
    def retry_after_s(self) -> float:
        """When to try again: about the time in which those that wait now get their places."""
        return min(max(self._gap_s * (self.num_queued + 1), _MIN_RETRY_S), _MAX_RETRY_S)

    def enter(self) -> int:
        """Return a new ticket.

        Raises:
            OverloadedError: as many requests are in flight and wait as may.
        """
        config = self.config
        if len(self._entered) >= config.max_in_flight + config.max_queued:
            raise OverloadedError(
                f"{self.num_in_flight} requests are in flight and {self.num_queued} wait; allowed: "
                f"{config.max_in_flight} in flight and {config.max_queued} waiting",
                retry_after_s=self.retry_after_s,
            )
        self._num_tickets += 1
        self._entered.add(self._num_tickets)
        return self._num_tickets

    def start(self, ticket: int) -> bool:
        """Whether the request is in flight now; otherwise it waits until a `leave` returns its ticket."""
        if len(self._in_flight) < self.config.max_in_flight:
            self._in_flight.add(ticket)
            return True
        self._waiting[ticket] = None
        return False

    def leave(self, ticket: int, now_s: float) -> int | None:
        """Take back a ticket, wherever its request is; return that of the request which is in flight in its place."""
        self._entered.remove(ticket)
        self._waiting.pop(ticket, None)
        if ticket not in self._in_flight:
            return None
        self._in_flight.remove(ticket)
        self._note_end(now_s)
        first = next(iter(self._waiting), None)
        if first is not None:
            del self._waiting[first]
            self._in_flight.add(first)
        return first

    def _note_end(self, now_s: float) -> None:
        if self._waiting and self._last_end_s is not None:
            self._gap_s += _GAP_WEIGHT * (now_s - self._last_end_s - self._gap_s)
        self._last_end_s = now_s
