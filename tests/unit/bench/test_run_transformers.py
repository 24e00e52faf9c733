"""transformers as a peer: as many tokens as were asked for, and when the first of them was there."""

import time
from pathlib import Path

import torch
from helpers.lazy_cuda import DEVICE, lazy_cuda

from bench.peers.run_transformers import Generate, _FirstToken
from bench.peers.worker import Job, Setup
from cluster.make_model import make_model


def test_each_request_has_the_tokens_that_it_asked_for(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(model, preset="tiny", sizes={}, dtype="float32", seed=0, tokenizer=None)
    sizes = {"num_threads": torch.get_num_threads(), "max_num_seqs": 2, "max_context": 16, "cache_tokens": 32}
    engine = Generate(Setup(model=str(model), dtype="float32", cache="", **sizes))
    start_s = time.perf_counter()
    answer = engine.run(Job(prompts=[[5, 6, 7], [8]], num_out=[2, 4]))
    assert [len(tokens) for tokens in answer.tokens] == [2, 4]
    assert answer.first_s is not None
    assert start_s < answer.first_s < time.perf_counter()


def test_first_token_on_a_gpu_is_waited_for_once() -> None:
    with lazy_cuda() as cuda:
        ids = torch.tensor([[5, 6]]).to(DEVICE) + 1
        first, num_waits = _FirstToken(), cuda.num_waits
        for _ in range(2):
            first(ids, None)
        assert cuda.num_waits == num_waits + 1
