"""Fetches the metrics pages of a cluster's processes, several at once, for the controller to hand on."""

import asyncio
from collections.abc import Mapping, Sequence
from email.parser import BytesHeaderParser

from weft.addresses import split_host_port

_TIMEOUT_S = 2.0  # for one page
_MAX_AT_ONCE = 16  # connections
_MAX_BYTES = 16 << 20  # of a page


async def fetch_pages(addresses: Sequence[str]) -> Mapping[str, bytes]:
    """Return the pages at these host:port as Prometheus reads them; those that do not answer are missing."""
    places = asyncio.Semaphore(_MAX_AT_ONCE)

    async def fetch(address: str) -> bytes | None:
        async with places:
            return await fetch_page(address)

    pages = await asyncio.gather(*map(fetch, addresses))
    return {address: page for address, page in zip(addresses, pages, strict=True) if page is not None}


async def fetch_page(address: str) -> bytes | None:
    """Return the page, from this address and no other; None where there is none, or it is too large or too late."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*split_host_port(address))
            try:
                writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                return await _read_page(reader)
            finally:
                writer.close()
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
        return None  # it is starting, or has just gone


async def _read_page(reader: asyncio.StreamReader) -> bytes:
    """Return the body of an answer. Raises ValueError where it is an error, or longer than allowed."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, _, lines = head.partition(b"\r\n")
    length = int(BytesHeaderParser().parsebytes(lines).get("content-length", ""))
    if status.split(b" ")[1:2] != [b"200"] or length > _MAX_BYTES:
        raise ValueError(f"{status!r} with {length} bytes; allowed: 200 with at most {_MAX_BYTES}")
    return await reader.readexactly(length)
