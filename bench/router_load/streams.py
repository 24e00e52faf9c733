"""A client that costs next to nothing: hundreds of streams of a router, of which it only looks at what comes.

The packages that a user would take need more CPU for a message than the router does that is measured with them. So
requests are written as bytes here, and of HTTP/2 (RFC 9113) there is only what these need: the windows are as large as
they may be, and nothing is ever asked twice.
"""

import json
import re
import select
import selectors
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from weft.v1 import inference_pb2 as pb

from bench.errors import BenchError

_READ_BYTES = 1 << 20
_PROMPT_TOKENS = 32
_VOCAB_SIZE = 256


class Message(NamedTuple):
    """One message that came."""

    stream: int
    text: str


class Streams(Protocol):
    """Streams of one front of a router, numbered as they begin."""

    def start(self, max_tokens: int) -> int:
        """Ask for so many tokens, and return the stream's number."""

    def receive(self, timeout_s: float) -> Iterator[Message]:
        """Give what came with tokens, after a wait at most. Raises BenchError when the router refuses a request."""

    def close(self) -> None:
        """End all streams."""


class GrpcStreams:
    """Calls of weft.v1.Inference on one connection."""

    def __init__(self, host: str, port: int) -> None:
        """Connect."""
        self._socket = _connect(host, port)
        self._num_streams = 0
        self._bytes = b""
        self._messages: dict[int, bytes] = {}  # begun, by stream
        self._answered: set[int] = set()
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HIHI", _INITIAL_WINDOW, _MOST, _MAX_FRAME, _LARGEST_FRAME))
        self._socket.sendall(_PREFACE + settings + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _MOST - 0xFFFF)))

    def start(self, max_tokens: int) -> int:
        """See Streams."""
        number = self._num_streams
        self._num_streams += 1
        stream = 2 * number + 1
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=_prompt(number)),
            sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        ).SerializeToString()
        body = struct.pack(">BI", 0, len(request)) + request
        self._socket.sendall(
            _frame(_HEADERS, _END_HEADERS, stream, _REQUEST_HEADERS) + _frame(_DATA, _END_STREAM, stream, body)
        )
        return number

    def receive(self, timeout_s: float) -> Iterator[Message]:
        """See Streams."""
        if not select.select((self._socket,), (), (), timeout_s)[0]:
            return
        came = self._socket.recv(_READ_BYTES)
        if not came:
            raise BenchError("the router has closed the connection")
        data, self._bytes = self._bytes + came, b""
        begin = 0
        while len(data) - begin >= _FRAME_HEADER:
            kind, flags = data[begin + 3], data[begin + 4]
            stream = int.from_bytes(data[begin + 5 : begin + 9])
            end = begin + _FRAME_HEADER + int.from_bytes(data[begin : begin + 3])
            if end > len(data):
                break
            yield from self._take(kind, flags, stream, data[begin + _FRAME_HEADER : end])
            begin = end
        self._bytes = data[begin:]

    def close(self) -> None:
        """See Streams."""
        self._socket.close()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> Iterator[Message]:
        match kind:
            case _ if kind == _DATA:
                data = self._messages.pop(stream, b"") + payload
                while len(data) >= 5 and len(data) >= (end := 5 + int.from_bytes(data[1:5])):
                    text = pb.GenerateResponse.FromString(data[5:end]).text
                    if text:
                        self._answered.add(stream)
                        yield Message(stream // 2, text)
                    data = data[end:]
                if data:
                    self._messages[stream] = data
            case _ if kind == _SETTINGS and not flags & _ACK:
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            case _ if kind == _PING and not flags & _ACK:
                self._socket.sendall(_frame(_PING, _ACK, 0, payload))
            case _ if kind == _HEADERS and flags & _END_STREAM and stream not in self._answered:
                raise BenchError(f"the router has refused a request: {payload!r}")
            case _ if kind in (_RST_STREAM, _GOAWAY):
                raise BenchError(f"the router has ended a stream: {payload!r}")


class HttpStreams:
    """Streamed completions of the OpenAI front, a connection each."""

    def __init__(self, host: str, port: int) -> None:
        """Connect with the first stream."""
        self._address = (host, port)
        self._selector = selectors.DefaultSelector()
        self._num_streams = 0
        self._begun: dict[int, bytes] = {}  # events, by stream

    def start(self, max_tokens: int) -> int:
        """See Streams."""
        number = self._num_streams
        self._num_streams += 1
        fields = {"model": "stand-in", "prompt": _prompt(number), "max_tokens": max_tokens, "stream": True}
        body = json.dumps({**fields, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n"
        stream = _connect(*self._address)
        stream.sendall(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        self._selector.register(stream, selectors.EVENT_READ, number)
        return number

    def receive(self, timeout_s: float) -> Iterator[Message]:
        """See Streams."""
        for key, _ in self._selector.select(timeout_s):
            stream = key.fileobj
            assert isinstance(stream, socket.socket)
            data = stream.recv(_READ_BYTES)
            if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                raise BenchError(f"the router has refused a request: {data!r}")
            events, _, rest = (self._begun.pop(key.data, b"") + data).rpartition(b"\n\n")
            self._begun[key.data] = rest
            for text in _TEXT.findall(events):
                if text:
                    yield Message(key.data, text.decode())
            if not data:
                self._selector.unregister(stream)
                stream.close()

    def close(self) -> None:
        """See Streams."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


def _connect(host: str, port: int) -> socket.socket:
    connected = socket.create_connection((host, port))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _prompt(number: int) -> list[int]:
    """A prompt of its own for each stream, so that no two share a prefix."""
    return [*number.to_bytes(4), *range(4, _PROMPT_TOKENS)]


# HTTP/2: types, flags and settings by their numbers in RFC 9113, section 6

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW, _MAX_FRAME = 4, 5
_MOST = (1 << 31) - 1
_LARGEST_FRAME = (1 << 24) - 1


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field as RFC 7541, section 6.2.2 has it: never indexed, not compressed."""
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


_REQUEST_HEADERS = b"".join(
    _literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/weft.v1.Inference/Generate"),
        (b":authority", b"router"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
_TEXT = re.compile(rb'"text": ?"([^"]*)"')
