"""Circuit breaker of one replica: whether it gets requests, from how earlier ones ended. Pure; time is an argument."""

from router.config import BreakerConfig


class Breaker:
    """Opens after failures in a row; later lets one probe through, whose end closes it or opens it for longer."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._num_failures = 0
        self._open_s = config.open_s
        self._open_until_s: float | None = None
        self._is_probing = False

    @property
    def is_closed(self) -> bool:
        """Whether it lets everything through, whatever the time."""
        return self._open_until_s is None

    def allows(self, now_s: float) -> bool:
        """Say whether a request may go to the replica now."""
        if self._open_until_s is None:  # asked of each replica for each request
            return True
        return now_s >= self._open_until_s and not self._is_probing

    def begin(self, now_s: float) -> None:
        """Note that a request goes to the replica; when the open time is over, it is the probe."""
        if self._open_until_s is not None and now_s >= self._open_until_s:
            self._is_probing = True

    def succeed(self) -> None:
        """Note that the replica answered a request: the breaker closes."""
        self._num_failures = 0
        self._open_s = self._config.open_s
        self._open_until_s = None
        self._is_probing = False

    def fail(self, now_s: float) -> None:
        """Note that the replica failed."""
        self._num_failures += 1
        if self._open_until_s is None:
            if self._num_failures < self._config.max_failures:
                return
        elif now_s < self._open_until_s:
            return  # a straggler from before it opened
        else:  # the probe failed
            self._open_s = min(self._open_s * 2, self._config.max_open_s)
        self._open_until_s = now_s + self._open_s
        self._is_probing = False

    def release(self) -> None:
        """Note an end that says nothing about the replica (cancelled, refused); the next request may be the probe."""
        self._is_probing = False
