"""What 8 bits cost a trained model: how far its predictions move on text that it knows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.paged_layout import make_meta
from tokenizers import Tokenizer
from torch import Tensor

from cluster.default_model import corpus
from parallel.checkpoint import load_decoder
from parallel.kernels.select import select_kernels
from parallel.mesh import Mesh

CPU = torch.device("cpu")
BLOCK_SIZE = 16
DEFAULT_MODEL = Path(corpus.__file__).parent / "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From float32 to bfloat16, some of it in 8 bits, over all tokens of some texts."""

    divergence: float
    """Kullback-Leibler, mean."""
    agreement: float
    """Tokens after which the best next one is the same."""
    perplexity: float
    """New over old."""


def predict(
    folder: Path,
    texts: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    int8_linears: bool = False,
    int8_cache: bool = False,
) -> Tensor:
    """Log-probabilities [tokens, vocabulary] of what comes after each token."""
    decoder = load_decoder(
        folder,
        mesh=Mesh.single(),
        device=CPU,
        dtype=dtype,
        kernels=select_kernels(CPU, dtype),
        int8_linears=int8_linears,
        int8_cache=int8_cache,
    )
    entry = decoder.cache_entry
    rows = []
    for ids in texts:
        num_blocks = len(ids) // BLOCK_SIZE + 2
        meta = make_meta([(len(ids), len(ids))], block_size=BLOCK_SIZE, num_blocks=num_blocks)
        size = num_blocks * BLOCK_SIZE * entry.num_elements
        caches = [
            entry.lay_out(torch.zeros(size, dtype=entry.dtype), BLOCK_SIZE) for _ in range(decoder.num_local_layers)
        ]
        hidden = decoder(torch.tensor(ids), torch.arange(len(ids)), caches, [meta] * len(caches))
        logits = decoder.logits(hidden)
        assert logits is not None
        rows.append(logits.log_softmax(-1))
    return torch.cat(rows)


def measure(folder: Path, texts: Sequence[Sequence[int]], **in_8_bits: bool) -> Change:
    old = predict(folder, texts, torch.float32)
    new = predict(folder, texts, torch.bfloat16, **in_8_bits)
    targets = torch.cat([torch.tensor([*ids[1:], -1]) for ids in texts])  # the last token has none
    losses = [F.nll_loss(logs, targets, ignore_index=-1).item() for logs in (old, new)]
    return Change(
        divergence=F.kl_div(new, old, reduction="batchmean", log_target=True).item(),
        agreement=(old.argmax(-1) == new.argmax(-1)).float().mean().item(),
        perplexity=torch.tensor(losses[1] - losses[0]).exp().item(),
    )


def default_texts(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in islice(corpus.documents(seed=987), count)]


def golden_texts(folder: Path, count: int) -> list[list[int]]:
    if not folder.exists():
        pytest.skip(f"{folder} is not there")
    rows = [json.loads(line) for line in (folder / "golden_greedy.jsonl").read_text().splitlines()]
    return [(row["prompt_ids"] + row["output_ids"])[:500] for row in rows[:count]]


def test_the_default_model_predicts_almost_the_same() -> None:
    change = measure(DEFAULT_MODEL, default_texts(24), int8_linears=True)
    assert change.divergence < 0.001
    assert change.agreement > 0.97
    assert 0.99 < change.perplexity < 1.01


def test_a_story_model_predicts_almost_the_same(shared: Path) -> None:
    folder = shared / "models" / "stories3M"
    change = measure(folder, golden_texts(folder, 8), int8_linears=True)
    assert 1e-4 < change.divergence < 0.015  # something was rounded
    assert change.agreement > 0.94
    assert 0.98 < change.perplexity < 1.03


def test_with_a_cache_in_8_bits_the_default_model_predicts_almost_the_same() -> None:
    change = measure(DEFAULT_MODEL, default_texts(24), int8_cache=True)
    assert change.divergence < 0.001
    assert change.agreement > 0.97
    assert 0.99 < change.perplexity < 1.01


def test_with_a_cache_in_8_bits_a_story_model_predicts_almost_the_same(shared: Path) -> None:
    folder = shared / "models" / "stories3M"
    texts = golden_texts(folder, 8)
    plain, change = measure(folder, texts), measure(folder, texts, int8_cache=True)
    assert change != plain  # something was rounded
    assert change.divergence < 0.003
    assert change.agreement > 0.97
    assert 0.99 < change.perplexity < 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_a_cache_in_8_bits_alone_99_of_100_tokens_are_the_same(dtype: torch.dtype) -> None:
    texts = default_texts(24)
    plain, changed = predict(DEFAULT_MODEL, texts, dtype), predict(DEFAULT_MODEL, texts, dtype, int8_cache=True)
    assert not torch.equal(plain, changed)  # something was rounded
    assert (plain.argmax(-1) == changed.argmax(-1)).float().mean() >= 0.99
