"""How much work one replica has, as this router knows it: the load of the last frame, corrected by what came after it.

A request that was just sent is in no frame, so a burst would all go to the replica that looked idle; one that was just
aborted is still in the last frame, and an idle replica sends no further one. Both are counted here at once. Pure.
Other threads may read it: that takes single reads of numbers.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    pending_tokens: int
    """Tokens to compute before its first new one; 0 from then on."""
    frame: int
    """Frames received when it was sent."""


class LoadEstimate:
    """Requests and pending tokens on one replica."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._unseen: dict[str, _Entry] = {}
        """Of those, the requests that the reported load may not contain."""
        self._unseen_tokens = 0
        """Pending tokens of the requests in `_unseen`."""
        self._num_frames = 0
        self._reported_requests = 0
        self._reported_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests running or waiting there; never less than this router's own."""
        return max(len(self._entries), self._reported_requests + len(self._unseen))

    @property
    def num_pending_tokens(self) -> int:
        """Tokens still to be computed there."""
        return self._reported_tokens + self._unseen_tokens

    def submit(self, request_id: str, num_pending_tokens: int) -> None:
        """Note a request that was sent."""
        entry = _Entry(pending_tokens=num_pending_tokens, frame=self._num_frames)
        self._entries[request_id] = self._unseen[request_id] = entry
        self._unseen_tokens += num_pending_tokens

    def answer(self, request_id: str) -> None:
        """Note its first output: the replica knows it, and its prompt is computed."""
        self._see(request_id)
        self._entries[request_id].pending_tokens = 0

    def end(self, request_id: str) -> None:
        """Note that it finished, failed or was aborted."""
        entry = self._entries.pop(request_id)
        if request_id in self._unseen:
            self._see(request_id)
        else:
            self._reported_requests = max(0, self._reported_requests - 1)
            self._reported_tokens = max(0, self._reported_tokens - entry.pending_tokens)

    def report(self, num_requests: int, num_pending_tokens: int) -> None:
        """Note the load of a frame, after the outputs of that frame."""
        self._num_frames += 1
        self._reported_requests = num_requests
        self._reported_tokens = num_pending_tokens
        # The frame may have been on its way when a request was sent; the one after it was not.
        for request_id in [i for i, entry in self._unseen.items() if entry.frame < self._num_frames - 1]:
            self._see(request_id)

    def _see(self, request_id: str) -> None:
        entry = self._unseen.pop(request_id, None)
        if entry is not None:
            self._unseen_tokens -= entry.pending_tokens
