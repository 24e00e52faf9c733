"""The order in which requests are served, and the queue of those that wait."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from workers.request import Request
from workers.sequence import Sequence


def serving_order(policy: str, request: Request, arrival_number: int) -> tuple[int, int]:
    """Return the key that a request is served by, smaller first: arrival, under "priority" after its priority."""
    return (request.priority if policy == "priority" else 0, arrival_number)


class WaitingQueue:
    """Sequences that wait for a slot, those that were served before (preempted, or from another replica) first.

    Under "priority" they come first among those of equal priority. A sorted list: a heap would need tombstones for
    aborted requests, while moving a few kilobytes of pointers costs less than a microsecond.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []  # the first to be served is last
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of all that wait."""
        return self._num_tokens

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place; its key and its tokens stay as they are while it waits."""
        insort(self._sequences, sequence, key=_queue_key)
        self._num_tokens += sequence.num_tokens

    def peek(self) -> Sequence | None:
        """Return the next to be served, None when nothing waits."""
        return self._sequences[-1] if self._sequences else None

    def pop(self) -> Sequence:
        """Remove and return the next to be served."""
        sequence = self._sequences.pop()
        self._num_tokens -= sequence.num_tokens
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        i = bisect_left(self._sequences, _queue_key(sequence), key=_queue_key)
        assert self._sequences[i] is sequence
        del self._sequences[i]
        self._num_tokens -= sequence.num_tokens


def _queue_key(sequence: Sequence) -> tuple[int, bool, int]:
    priority, arrival_number = sequence.order
    return (-priority, sequence.is_resumed, -arrival_number)
