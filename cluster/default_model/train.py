"""Trains the default model on a CPU: a byte-level BPE tokenizer, then a small Llama, on the text of corpus.py.

    python -m cluster.default_model.train --out cluster/default_model/weights

Needs `transformers` (of the `dev` extra) for the model's training form; the engine never does.
"""

import argparse
import json
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.default_model import corpus

logger = logging.getLogger(__name__)

VOCAB_SIZE = 2048
CONTEXT = 1024
BATCH_TOKENS = 4096
SHARE_OF_SINGLE_DOCUMENTS = 0.85
"""Share of the steps whose rows hold one document each, as in use, so that looking back for a name finds the right
one. The other steps see rows of the whole context, for its late positions."""
PEAK_LEARNING_RATE = 3e-3
MUON_LEARNING_RATE = 1e-2
EMBEDDING_STD = 0.1
"""Spread of the initial embeddings: with the 0.02 of large models, what names share soon hides what sets them apart,
and they are not copied."""
IGNORED = -100
WARMUP_STEPS = 60


def main() -> None:
    """Train, save, and print samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, in Hugging Face layout")
    parser.add_argument("--steps", type=int, default=2400, help=f"optimizer steps of {BATCH_TOKENS} tokens each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(args.seed)
    write_tokenizer(tokenizer, args.out)
    model = build_model(tokenizer, args.seed)
    logger.info("%.2f M parameters", sum(parameter.numel() for parameter in model.parameters()) / 1e6)
    started = time.monotonic()
    loss = train(model, tokenizer, steps=args.steps, seed=args.seed)
    logger.info("final loss %.4f after %.0f s", loss, time.monotonic() - started)
    write_model(model, args.out)
    for prompt in SAMPLE_PROMPTS:
        logger.info("%r\n  -> %s", prompt, sample(model, tokenizer, prompt))


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer over 20,000 documents; digits stay single so that sums can be learnt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in corpus.SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(corpus.documents(seed), 20_000), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A",
        pair=f"{corpus.BOS} $A {corpus.BOS} $B",
        special_tokens=[(corpus.BOS, _token_id(tokenizer, corpus.BOS))],
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": corpus.BOS,
            "eos_token": corpus.TURN_END,
            "pad_token": corpus.PAD,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": corpus.CHAT_TEMPLATE,
        },
    )


def write_model(model: LlamaForCausalLM, folder: Path) -> None:
    """config.json, generation_config.json and the weights in float32."""
    model.save_pretrained(folder)
    config = model.config
    token_ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", token_ids | {"do_sample": True, "temperature": 0.7, "top_p": 0.95})


def build_model(tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """A Llama of 2 M parameters whose heads divide over 2 and 4 tensor-parallel ranks."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=_token_id(tokenizer, corpus.BOS),
        eos_token_id=[_token_id(tokenizer, corpus.EOS), _token_id(tokenizer, corpus.TURN_END)],
        pad_token_id=_token_id(tokenizer, corpus.PAD),
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    return model


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, *, steps: int, seed: int) -> float:
    """One pass over fresh text, products in bf16; returns the mean loss of the last 100 steps.

    Muon (arXiv:2502.16982) for the layers' matrices, AdamW for the rest, one cosine for both.
    """
    optimizers = build_optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(step, steps))
        for optimizer in optimizers
    ]
    recent: deque[float] = deque(maxlen=100)
    columns = (TextColumn("loss {task.fields[loss]:.3f}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan)
        for step, (inputs_BT, targets_BT) in enumerate(batches(tokenizer, steps=steps, seed=seed + 1)):
            loss = _loss(model, inputs_BT, targets_BT)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            recent.append(loss.item())
            progress.update(task, advance=1, loss=sum(recent) / len(recent))
            if (step + 1) % 100 == 0:
                logger.info("step %d of %d, loss %.4f", step + 1, steps, sum(recent) / len(recent))
    return sum(recent) / len(recent)


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    embedding = model.model.embed_tokens.weight
    muon = torch.optim.Muon(
        matrices, lr=MUON_LEARNING_RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([embedding, *norms], lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def batches(tokenizer: Tokenizer, *, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step, int64 [B, T] each; targets without a token are IGNORED."""
    source = token_lists(tokenizer, seed)
    num_single = round(steps * SHARE_OF_SINGLE_DOCUMENTS)
    yield from islice(single_document_batches(source, random.Random(seed)), num_single)
    for _ in range(steps - num_single):
        ids: list[int] = []
        while len(ids) <= BATCH_TOKENS:
            ids += next(source)
        yield (
            torch.tensor(ids[:BATCH_TOKENS]).view(-1, CONTEXT),
            torch.tensor(ids[1 : BATCH_TOKENS + 1]).view(-1, CONTEXT),
        )


def single_document_batches(source: Iterator[list[int]], rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """One document a row, documents of about the same length together, in random order."""
    while True:
        pool = sorted(islice(source, 1024), key=len)
        rows_by_batch: list[list[list[int]]] = [[]]
        for ids in pool:
            if len(ids) * (len(rows_by_batch[-1]) + 1) > BATCH_TOKENS:
                rows_by_batch.append([])
            rows_by_batch[-1].append(ids[: CONTEXT + 1])
        rng.shuffle(rows_by_batch)
        for rows in rows_by_batch:
            length = max(map(len, rows))
            padded = torch.tensor([ids + [IGNORED] * (length - len(ids)) for ids in rows])
            yield padded[:, :-1].clamp(min=0), padded[:, 1:]


def token_lists(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """The ids of one document after the other."""
    source = corpus.documents(seed)
    while True:
        for encoding in tokenizer.encode_batch_fast(list(islice(source, 256)), add_special_tokens=False):
            yield encoding.ids


def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    """The model's likeliest continuation of a prompt whose special tokens are written in."""
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    generate: Callable[..., Tensor] = getattr(model, "generate")  # noqa: B009 - its annotations do not fit its own class
    with torch.inference_mode():
        output = generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=300, do_sample=False, temperature=None, top_p=None
        )
    text: str = tokenizer.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
    return text


def _loss(model: LlamaForCausalLM, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BTE = model.model(inputs_BT).last_hidden_state
        logits_BTV = model.lm_head(hidden_BTE)
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)


def _learning_rate(step: int, steps: int) -> float:
    """Share of the peak: linear warm-up, then a cosine down to 2 %."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)))


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token} is a special token of this tokenizer"
    return token_id


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _user(text: str) -> str:
    return corpus.render_chat([{"role": "user", "content": text}]) + f"{corpus.TURN_START}assistant\n"


SAMPLE_PROMPTS = (
    corpus.BOS + "Once upon a time there was a little fox named Mia.",
    _user("Tell me a story about a bear named Otto."),
    _user("Write a JSON record of a cat named Tom."),
    _user("What is 7 + 5?"),
    _user("What is the capital of France?"),
    _user("Who are you?"),
)


if __name__ == "__main__":
    main()
