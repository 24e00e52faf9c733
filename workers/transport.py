"""Carries numbered plans from a group's leader to its other ranks, and outputs and failures back. msgpack over zmq.

Every plan carries its number and the digest of all plans up to it, so that a rank that missed one, or got another one
than its peers, stops at once and names both. One connection a rank, exclusive; zmq's own thread exchanges heartbeats
on it, whatever Python is busy with, so that a rank that is dead, stopped or cut off is noticed by the other side.
Plans to ranks on the leader's machine take a shorter way (local_plans.py).
"""

import logging
import math
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import NoReturn
from zlib import crc32

import msgspec
import zmq
from weft.addresses import join_host_port
from zmq.utils.monitor import recv_monitor_message

from workers.errors import GroupFailedError
from workers.local_plans import PlanReceiver, PlanSender
from workers.plan import ModelOutput, StepPlan

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
HEARTBEAT_TIMEOUT_S = 4.0
"""A peer that sends nothing for so long is gone."""

_SLICE_MS = 50
"""How often a wait for one rank looks at the others."""
_LOOK_S = 1.0
_NUM_LOOKS = 5
"""After so many looks in a row, this long apart, that found the leader gone, its rank is told. A rank mostly finds that
out by itself, but not while it waits for others within a step."""
_EVIDENCE_S = 0.3
"""How long to wait for other ranks' reports once one is known to have failed."""
_WAITED = ("CollectiveError:", "DistStoreError:")
"""Errors of a rank that waited for another one."""
_LINGER_MS = 1000
_NEVER_MS = 24 * 3600 * 1000
"""Time before a socket reconnects: not -1, with which zmq also drops what came before the end and was not read yet."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""What a socket's monitor tells. All but the handshake come with a file descriptor, which tells connections apart."""


class PlanMessage(msgspec.Struct, frozen=True, tag="plan", array_like=True):
    """A plan in its place in the chain."""

    number: int
    digest: int
    """Digest of the previous one and the plan's bytes."""
    plan: bytes


class ProceedMessage(msgspec.Struct, frozen=True, tag="proceed", array_like=True):
    """Tells a rank that all have reported, and to go on with this value."""

    value: int


class StopMessage(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """The group ends: well when there is no reason."""

    reason: str | None


class ReportMessage(msgspec.Struct, frozen=True, tag="report", array_like=True):
    """A rank has come to the next point of the start."""

    value: int


class OutputMessage(msgspec.Struct, frozen=True, tag="output", array_like=True):
    """What the last stage sampled."""

    output: ModelOutput


class FailureMessage(msgspec.Struct, frozen=True, tag="failure", array_like=True):
    """A rank gives up."""

    error: str
    traceback: str


_ToRank = PlanMessage | ProceedMessage | StopMessage
_ToLeader = ReportMessage | OutputMessage | FailureMessage

_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_to_rank_decoder: msgspec.msgpack.Decoder[_ToRank] = msgspec.msgpack.Decoder(_ToRank)
_to_leader_decoder: msgspec.msgpack.Decoder[_ToLeader] = msgspec.msgpack.Decoder(_ToLeader)


class PlanChain:
    """The number and digest of the latest plan, on either side. A checksum: it is against mistakes, not attackers."""

    def __init__(self) -> None:
        self._number = 0
        self._digest = 0

    def seal(self, plan: bytes) -> PlanMessage:
        """Return the next message of the chain."""
        self._number += 1
        self._digest = crc32(plan, self._digest)
        return PlanMessage(self._number, self._digest, plan)

    def verify(self, message: PlanMessage) -> None:
        """Raise GroupFailedError unless the message is the next one of the same chain."""
        expected = self._number + 1
        if message.number != expected:
            raise GroupFailedError(f"plan {message.number} came; expected: plan {expected}")
        self._number = expected
        self._digest = crc32(message.plan, self._digest)
        if message.digest != self._digest:
            raise GroupFailedError(f"plan {expected} came with digest {message.digest:x}; expected: {self._digest:x}")


class LeaderLink:
    """The leader's end. One thread."""

    def __init__(self, host: str, ranks: Iterable[int]) -> None:
        """Listen on `host`, on one free port for each rank."""
        self._context = zmq.Context()
        self._peers = {rank: _Peer(self._context) for rank in ranks}
        self._local = PlanSender()
        self.endpoints = {rank: f"{peer.bind(host)} {self._local.name}" for rank, peer in self._peers.items()}
        """Where each rank connects, from anywhere and on this machine."""
        self._chain = PlanChain()
        self._reports: dict[int, list[int]] = {rank: [] for rank in self._peers}
        self._outputs: dict[int, list[ModelOutput]] = {rank: [] for rank in self._peers}
        self._failures: dict[int, FailureMessage] = {}
        self._gone: set[int] = set()

    def send_plan(self, plan: StepPlan) -> None:
        """Send the next plan to every rank. GroupFailedError when one cannot take it."""
        encoded = _encoder.encode(self._chain.seal(_encoder.encode(plan)))
        for rank in self._peers:
            try:
                if self._local.send(rank, encoded):
                    continue
            except BlockingIOError:
                self._refuse(rank)
            self._send(rank, encoded)

    def proceed(self, value: int) -> None:
        """Let every rank go on from the point that it reported."""
        encoded = _encoder.encode(ProceedMessage(value))
        for rank in self._peers:
            self._send(rank, encoded)

    def gather(self, timeout_s: float) -> dict[int, int]:
        """Wait until every rank has come to its next point and return what each reported. GroupFailedError."""
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank, values in self._reports.items() if not values]:
            if time.monotonic() > deadline:
                raise GroupFailedError(f"ranks {missing} did not start within {timeout_s:.0f} s")
            self._peers[missing[0]].socket.poll(_SLICE_MS)
            self.check()
        self._local.admit()  # they have connected before they reported
        return {rank: values.pop(0) for rank, values in self._reports.items()}

    def receive_output(self, rank: int, timeout_s: float) -> ModelOutput:
        """Wait for the next output of a rank. GroupFailedError when any rank fails or it takes longer."""
        outputs, peer = self._outputs[rank], self._peers[rank]
        deadline = time.monotonic() + timeout_s
        while not outputs:
            if self._failures:
                self.check()
            if peer.socket.poll(_SLICE_MS):
                self._read(rank)
            else:
                self.check()
                if time.monotonic() > deadline:
                    raise GroupFailedError(f"rank {rank} did not answer within {timeout_s:.1f} s: it or a peer hangs")
        return outputs.pop(0)

    def check(self) -> None:
        """Raise GroupFailedError when a rank has failed or is gone; says which, and why as far as they told."""
        self._look()
        if not self._failures and not self._gone:
            return
        deadline = time.monotonic() + _EVIDENCE_S
        while time.monotonic() < deadline and len(self._failures.keys() | self._gone) < len(self._peers):
            time.sleep(0.01)
            self._look()
        silent = sorted(self._gone - self._failures.keys())
        reasons = [f"rank {rank} died, hangs or is cut off" for rank in silent]
        if not silent and all(failure.error.startswith(_WAITED) for failure in self._failures.values()):
            quiet = sorted(self._peers.keys() - self._failures.keys())
            reasons += [f"rank {rank} told nothing: it hangs, or waits too" for rank in quiet]
        for rank, failure in sorted(self._failures.items()):
            logger.error("rank %d failed:\n%s", rank, failure.traceback)
            reasons.append(f"rank {rank} failed: {failure.error}")
        raise GroupFailedError("; ".join(reasons))

    def close(self, reason: str | None = None) -> None:
        """Tell every rank to end, because of `reason` if there is one, and close."""
        for peer in self._peers.values():
            peer.try_send(StopMessage(reason))
            peer.close()
        self._local.close()
        self._context.term()

    def _send(self, rank: int, encoded: bytes) -> None:
        try:
            self._peers[rank].socket.send(encoded, zmq.DONTWAIT)
        except zmq.Again:
            self._refuse(rank)

    def _refuse(self, rank: int) -> NoReturn:
        self.check()
        raise GroupFailedError(f"rank {rank} takes no more messages: it hangs") from None

    def _look(self) -> None:
        """Read whatever has come, without waiting. A rank's last words come before its end."""
        for rank, peer in self._peers.items():
            self._read(rank)
            if peer.is_gone():
                self._read(rank)
                self._gone.add(rank)

    def _read(self, rank: int) -> None:
        peer = self._peers[rank]
        while _is_readable(peer.socket):
            try:
                message = _to_leader_decoder.decode(peer.socket.recv())
            except msgspec.MsgspecError as error:
                raise GroupFailedError(f"rank {rank} sent what is no message: {error}") from error
            match message:
                case ReportMessage(value):
                    self._reports[rank].append(value)
                case OutputMessage(output):
                    self._outputs[rank].append(output)
                case FailureMessage() as failure:
                    self._failures[rank] = failure


class RankLink:
    """The end of a rank that is not the leader. One thread."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._rank = rank
        self._context = zmq.Context()
        self._peer = _Peer(self._context)
        address, _, local_name = endpoint.partition(" ")
        self._local = PlanReceiver.connect(local_name, rank)
        self._peer.socket.connect(address)
        self._chain = PlanChain()
        self._poller = select.poll()  # a third of the time of zmq's until a message is here
        for waits in (self._peer.socket, self._peer.monitor):
            self._poller.register(waits.fileno(), select.POLLIN)

    def __enter__(self) -> "RankLink":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Tell the leader why this rank gives up, if it does, and close."""
        if error is not None:
            last_words = FailureMessage(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
            self._peer.try_send(last_words)
        self._peer.close()
        if self._local is not None:
            self._local.close()
        self._context.term()

    def report(self, value: int, timeout_s: float) -> int:
        """Say that this rank has come to the next point; wait for the others and return what the leader decided."""
        self._peer.socket.send(_encoder.encode(ReportMessage(value)))
        match self._receive(timeout_s):
            case ProceedMessage(decided):
                return decided
            case StopMessage(reason):
                raise GroupFailedError(f"the leader ended the group: {reason}")
            case message:
                raise GroupFailedError(f"rank {self._rank} got a {type(message).__name__}; expected: ProceedMessage")

    def receive_plan(self) -> StepPlan | None:
        """Wait for the next plan; None when the group ends well.

        Raises:
            GroupFailedError: the leader is gone or says that the group failed, or the plan is not the chain's next.
        """
        match self._receive_plan():
            case PlanMessage() as message:
                try:
                    self._chain.verify(message)
                except GroupFailedError as error:
                    raise GroupFailedError(f"rank {self._rank} diverged: {error}") from None
                return _plan_decoder.decode(message.plan)
            case StopMessage(None):
                return None
            case StopMessage(reason):
                raise GroupFailedError(f"the leader ended the group: {reason}")
            case message:
                raise GroupFailedError(f"rank {self._rank} got a {type(message).__name__}; expected: PlanMessage")

    @contextmanager
    def watched(self, on_lost: Callable[[GroupFailedError], object]) -> Iterator[None]:
        """Call `on_lost`, in another thread, when the leader has been gone for some seconds and this rank did not look.

        It waits within a step then: for a machine that is silent, until the step's time is over. For use after the
        start only.
        """
        has_ended = threading.Event()
        watching = partial(self._watch, self._peer.monitor.fileno(), has_ended, on_lost)
        threading.Thread(target=watching, daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()

    def _watch(self, monitor: int, has_ended: threading.Event, on_lost: Callable[[GroupFailedError], object]) -> None:
        """Look at the descriptor, which any thread may: what it tells of stays there until the rank reads it.

        A rank that has read of the end takes what came before it, and may wait in that.
        """
        poller = select.poll()
        poller.register(monitor, select.POLLIN)
        num_looks = 0
        while not has_ended.wait(_LOOK_S):
            num_looks = num_looks + 1 if self._peer.was_gone or poller.poll(0) else 0
            if num_looks == _NUM_LOOKS:
                on_lost(self._lost_leader())
                return

    def has_message(self) -> bool:
        """Whether there is something for `receive_plan` already. Never waits."""
        if self._local is not None and self._local.has_message():
            return True
        return _is_readable(self._peer.socket)

    def send_output(self, output: ModelOutput) -> None:
        """Send what this rank sampled to the leader."""
        self._peer.socket.send(_encoder.encode(OutputMessage(output)))

    def _receive(self, timeout_s: float = math.inf) -> _ToRank:
        """Wait for the next message of zmq."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_leader()
            if _is_readable(self._peer.socket):  # asking is also what makes its descriptor tell of the next one
                return self._decode(self._peer.socket.recv())
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise GroupFailedError(f"rank {self._rank} heard nothing from its leader for {timeout_s:.0f} s")
            self._poller.poll(None if math.isinf(left_s) else math.ceil(left_s * 1000))

    def _receive_plan(self) -> _ToRank:
        """Wait for the next message of either way."""
        local = self._local
        while local is not None and local.has_next:
            if (encoded := local.receive()) is not None:
                return self._decode(encoded)
            self._check_leader()
        message = self._receive()
        if local is not None:
            local.resume()
        return message

    def _decode(self, encoded: bytes) -> _ToRank:
        try:
            return _to_rank_decoder.decode(encoded)
        except msgspec.MsgspecError as error:
            raise GroupFailedError(f"rank {self._rank} got what is no message: {error}") from error

    def _check_leader(self) -> None:
        if self._peer.is_gone() and not _is_readable(self._peer.socket):  # its last words come before its end
            raise self._lost_leader()

    def _lost_leader(self) -> GroupFailedError:
        return GroupFailedError(f"rank {self._rank} lost its leader: it died, hangs or is cut off")


class _Peer:
    """One exclusive connection and the events of its end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.set(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT_S * 1000))
        self.socket.set(zmq.HANDSHAKE_IVL, int(HEARTBEAT_TIMEOUT_S * 1000))
        self.socket.set(zmq.ZAP_DOMAIN, b"weft")  # without one, whatever a stranger sends is a peer of ZMTP 1
        self.socket.set(zmq.RECONNECT_IVL, _NEVER_MS)
        self.socket.set(zmq.LINGER, _LINGER_MS)
        self.socket.set(zmq.IPV6, 1)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.was_gone = False
        """What `is_gone` said last; any thread may read it."""
        self._has_met = False
        self._connections: set[int] = set()
        """Connections by file descriptor, the other side's and earlier ones: which has shaken hands is not told."""

    def bind(self, host: str) -> str:
        """Listen on a free port and return the address to connect to."""
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        self.socket.bind(f"tcp://{join_host_port(address, '*')}")
        return self.socket.get_string(zmq.LAST_ENDPOINT)

    def is_gone(self) -> bool:
        """Whether the other side was there and is no more.

        Others who knock are turned away. Those before it may delay this, until their time for a handshake is over.
        """
        while not self.was_gone and _is_readable(self.monitor):
            event = recv_monitor_message(self.monitor)
            match event["event"]:
                case zmq.EVENT_ACCEPTED if not self._has_met:
                    self._connections.add(event["value"])
                case zmq.EVENT_CONNECTED:
                    self._connections.add(event["value"])
                    self._has_met = True  # who is dialled is the leader, and gone where no handshake follows
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._has_met = True
                case zmq.EVENT_DISCONNECTED:
                    self._connections.discard(event["value"])
                    self.was_gone = self._has_met and not self._connections
        return self.was_gone

    def try_send(self, message: _ToRank | _ToLeader) -> None:
        """Send if the other side is there to take it."""
        try:
            self.socket.send(_encoder.encode(message), zmq.DONTWAIT)
        except zmq.ZMQError:
            logger.debug("nobody takes the last message %s", type(message).__name__)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
