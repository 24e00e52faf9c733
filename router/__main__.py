"""`python -m router`: one router as a process of its own, beside or outside the cluster."""

import asyncio
import logging
import signal
import sys

import uvloop

from router.app import BoundAddresses, run_router
from router.config import RouterConfig
from router.errors import RouterError
from router.flags import parse_flags, to_config


def main(arguments: list[str] | None = None) -> int:
    """Run a router until SIGINT or SIGTERM; return the exit status."""
    options = parse_flags(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(_serve(to_config(options)))
    except RouterError as error:
        print(f"router: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: RouterConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await run_router(config, stop=stop, on_ready=_announce)


def _announce(addresses: BoundAddresses) -> None:
    http = f"http://{addresses.http}/v1" if addresses.http else "off"
    metrics = f"http://{addresses.metrics}/metrics" if addresses.metrics else "off"
    print(f"gRPC {addresses.grpc}   OpenAI {http}   metrics {metrics}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
