"""What the first request of a service finds done: its engine has run a step, imports nothing, and has its memory."""

import subprocess
import sys

import pytest

from cluster.models import DEFAULT_MODEL, PACKAGED

_ENGINE = """
import mmap
import sys
from pathlib import Path
from threading import enumerate as all_threads
from workers.config import CacheConfig, EngineConfig
from workers.engine_builder import build_engine
from workers.request import Request, RequestId, SamplingParams

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

before = resident()
cache = CacheConfig(cpu_cache_bytes=512 << 20)
engine = build_engine(EngineConfig(model=sys.argv[1], dtype="bfloat16", cache=cache))
for thread in all_threads():
    if thread.name == "populate":
        thread.join(240)
print((resident() - before) >> 20)
imported = set(sys.modules)
sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
engine.add_request(Request(request_id=RequestId("a"), prompt_token_ids=(1, 2, 3), sampling=sampling))
while engine.has_work:
    engine.step()
print(sorted(set(sys.modules) - imported))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What such an engine prints."""
    ran = subprocess.run(
        [sys.executable, "-c", _ENGINE, str(PACKAGED[DEFAULT_MODEL])], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_first_request_imports_nothing(printed: list[str]) -> None:
    """The packages of torch's compiler took more than a second of it."""
    assert printed[1] == "[]"


def test_memory_of_the_cache_is_there(printed: list[str]) -> None:
    """Taken by the steps that write it first, it made 32 requests up to a tenth slower."""
    assert int(printed[0]) >= 512, "MB, the size of the cache"
