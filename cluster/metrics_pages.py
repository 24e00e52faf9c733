"""Fetches the metrics pages of a cluster's processes, several at once, for the controller to hand on."""

import asyncio
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

_TIMEOUT_S = 2.0
_NUM_THREADS = 16


async def fetch_pages(addresses: Sequence[str]) -> Mapping[str, bytes]:
    """Return the pages at these host:port as Prometheus reads them; those that do not answer are missing."""
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="metrics-pages")
    try:
        pages = await asyncio.gather(*(loop.run_in_executor(pool, fetch_page, address) for address in addresses))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return {address: page for address, page in zip(addresses, pages, strict=True) if page is not None}


def fetch_page(address: str) -> bytes | None:
    """Return the page, from its process and by no proxy; None where it does not answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
            page: bytes = response.read()
            return page
    except (OSError, ValueError):
        return None  # it is starting, or has just gone
