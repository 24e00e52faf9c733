import json
from pathlib import Path

import pytest
from helpers.cluster import LLAMA, write_tokenizer
from helpers.wanted_bench import Bench


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_tokenizer(tmp_path)
    return Bench(tmp_path)
