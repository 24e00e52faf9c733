"""Looks at a service's ranks before and after each load, and finds out once what their machine can."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from bench.load.service_ranks import RankSource
from bench.load.utilization import Peak, RankCounters, RanksUnknownError, Utilization, compare
from cluster.operate import is_of_this_machine

MeasurePeak = Callable[[RankCounters], Awaitable[Peak]]
"""Measures what this machine can, for a rank like that."""

_FLAGS = "--peak-bandwidth and --peak-flops say it"
_MEASURE_TIMEOUT_S = 120.0


class RankObserver:
    """Watches the ranks of one model through all loads. What it cannot know is missing, and the reason kept."""

    def __init__(self, source: RankSource | None, model: str, *, peak: Peak, measure_peak: MeasurePeak) -> None:
        """Args: `peak` is what was given of the machines; `measure_peak` is for what was not."""
        self._source = source
        self._model = model
        self._measure_peak = measure_peak
        self._before: Mapping[str, RankCounters] | None = None
        self._after: Mapping[str, RankCounters] | None = None
        self.peak = peak
        self.unknown = ""
        """Why it was not known at some time what the ranks do."""

    async def find_peak(self) -> None:
        """Measure what was not given, where the ranks are on the CPUs of this machine; it should be idle."""
        ranks = await self._look()
        if ranks is None:
            self._source = None  # nor later: asking again might take its time
            return
        if self.peak.is_known:
            return
        if any(rank.device != "cpu" for rank in ranks.values()):
            self.peak = replace(self.peak, unknown=f"the ranks have the GPUs to themselves; {_FLAGS}")
        elif not all(is_of_this_machine(rank.node) for rank in ranks.values()):
            self.peak = replace(self.peak, unknown=f"the ranks are not on this machine; {_FLAGS}")
        else:
            self.peak = _complete(self.peak, await self._measure_peak(next(iter(ranks.values()))))

    async def begin(self) -> None:
        """Look at the ranks as a load begins."""
        self._before, self._after = await self._look(), None

    async def end(self) -> None:
        """Look at the ranks as the load ends."""
        self._after = await self._look()

    def utilization(self, duration_s: float) -> Utilization | None:
        """Return what the ranks did in a load of this length; None where it did not end, or they are not known."""
        if self._before is None or self._after is None:
            return None
        try:
            return compare(self._before, self._after, duration_s=duration_s, peak=self.peak)
        except RanksUnknownError as error:
            self.unknown = str(error)
            return None

    async def _look(self) -> Mapping[str, RankCounters] | None:
        if self._source is None:
            return None
        try:
            return await self._source.look(self._model)
        except RanksUnknownError as error:
            self.unknown = str(error)
            return None


async def measure_peak_here(rank: RankCounters) -> Peak:
    """Measure this machine in a process of its own: torch is none of the load generator's business."""
    command = (sys.executable, "-m", "bench.load.hardware", rank.dtype, rank.quantization)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_MEASURE_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        return Peak(unknown=f"measuring this machine took longer than {_MEASURE_TIMEOUT_S:g} s; {_FLAGS}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        return Peak(unknown=f"this machine could not be measured ({last}); {_FLAGS}")
    return Peak(**json.loads(out))


def _complete(given: Peak, measured: Peak) -> Peak:
    return replace(
        measured,
        read_bytes_per_s=given.read_bytes_per_s or measured.read_bytes_per_s,
        flops_per_s=given.flops_per_s or measured.flops_per_s,
    )
