"""Asks the autoscaler of the Ray cluster for nodes, while groups wait because the cluster is too small for them.

A group that waits is demand for Ray already, as its placement group; what is asked for in so many words Ray starts at
once, however slowly it may grow by itself (`upscaling_speed`), and does not forget while the group is placed anew.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from ray.exceptions import RayError

logger = logging.getLogger(__name__)

Bundles = Sequence[dict[str, float]]

_MAX_LAST_TRIES = 5
_RETRY_S = 1.0


class NodeRequest:
    """Keeps what Ray's autoscaler was asked for last. Ray has one such request for the whole cluster."""

    def __init__(self, ask: Callable[[Bundles], None], *, is_successor: bool) -> None:
        """Args: `ask` tells Ray, and blocks; a controller that came after another one does not know what was asked."""
        self._ask = ask
        self._asked: Bundles | None = None if is_successor else []
        """The bundles that Ray was told of last; None: not known."""
        self._last_reason = ""

    async def want(self, bundles: Bundles) -> None:
        """Ask for a cluster in which all of these bundles fit, occupied or not; with none, take the request back.

        When Ray does not listen, the next call tries again.
        """
        if bundles == self._asked:
            return
        self._asked = None  # a call that fails may have reached Ray
        try:
            await asyncio.to_thread(self._ask, bundles)
        except (RayError, RuntimeError, OSError) as error:
            if self._last_reason != str(error):
                logger.warning("Ray was not asked for nodes: %s", error)
            self._last_reason = str(error)
            return
        self._asked, self._last_reason = bundles, ""
        if bundles:
            logger.info("asked Ray for room for %d bundles: %s", len(bundles), bundles[-1])
        else:
            logger.info("no more nodes are asked for")

    async def close(self) -> None:
        """Take the request back for good, within a few seconds, for nobody would do it later."""
        for _ in range(_MAX_LAST_TRIES):
            await self.want([])
            if self._asked is not None:
                return
            await asyncio.sleep(_RETRY_S)


def ask_ray(bundles: Bundles) -> None:
    """Tell Ray's autoscaler; a cluster without one takes no notice."""
    from ray.autoscaler.sdk import request_resources  # a second to import, for those who join a cluster

    request_resources(bundles=list(bundles))
