"""What the first request of a service finds done: its engine has run a step, and imports nothing any more."""

import subprocess
import sys

from cluster.models import DEFAULT_MODEL, PACKAGED

_ENGINE = """
import sys
from workers.config import CacheConfig, EngineConfig
from workers.engine_builder import build_engine
from workers.request import Request, RequestId, SamplingParams

cache = CacheConfig(num_blocks=16)
engine = build_engine(EngineConfig(model=sys.argv[1], dtype="bfloat16", cache=cache))
imported = set(sys.modules)
sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
engine.add_request(Request(request_id=RequestId("a"), prompt_token_ids=(1, 2, 3), sampling=sampling))
while engine.has_work:
    engine.step()
print(sorted(set(sys.modules) - imported))
"""


def test_first_request_imports_nothing() -> None:
    """The packages of torch's compiler took more than a second of it."""
    ran = subprocess.run(
        [sys.executable, "-c", _ENGINE, str(PACKAGED[DEFAULT_MODEL])], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"
