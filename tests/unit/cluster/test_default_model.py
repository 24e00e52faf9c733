"""The committed default model speaks sensibly in its small world; `transformers` runs it here."""

import json
import re
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from cluster.default_model import corpus

WEIGHTS = Path(corpus.__file__).parent / "weights"
KNOWN_DOCUMENTS = 4000


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(WEIGHTS).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(WEIGHTS)


def words(text: str) -> set[str]:
    """The words of a text, in lower case."""
    return {word.lower() for word in re.findall(r"[^\W\d_]+", text)}


@cache
def known_words() -> frozenset[str]:
    return frozenset().union(*(words(text) for text in islice(corpus.documents(7), KNOWN_DOCUMENTS)))


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[str, bool]:
    """The greedy continuation of a prompt with its special tokens written in, and whether it ended by itself."""
    encoded = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**encoded, max_new_tokens=300, do_sample=False)
    new_ids = output[0, encoded["input_ids"].shape[1] :].tolist()
    ended = new_ids[-1] in model.generation_config.eos_token_id
    return tokenizer.decode(new_ids, skip_special_tokens=True), ended


def ask(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, *questions: str) -> str:
    """The answer to the last question of a conversation."""
    messages: list[dict[str, str]] = []
    answer = ""
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        answer, ended = complete(model, tokenizer, prompt)
        assert ended
        messages.append({"role": "assistant", "content": answer})
    return answer


def test_corpus_is_a_function_of_its_seed() -> None:
    first, again, other = (list(islice(corpus.documents(seed), 200)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_corpus_records_are_json() -> None:
    marker = f"{corpus.TURN_START}assistant\n{{"
    answers = [text.split(marker)[1] for text in islice(corpus.documents(5), 500) if marker in text]
    assert len(answers) > 50
    for answer in answers:
        json.loads("{" + answer.split(corpus.TURN_END)[0])


def test_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) < 10_000_000


def test_chat_template_equals_training_layout(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant")]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == corpus.render_chat(messages)


def test_tokenizer_round_trips_any_text_and_starts_with_bos() -> None:
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    text = "Zoë said: “Reykjavík 🦊!”\n\tعربى 日本 12345"
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id(corpus.BOS)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("opening", ["Once upon a time", "There was once a brave otter called Nora,"])
def test_story_ends_and_has_known_words(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, opening: str
) -> None:
    story, ended = complete(model, tokenizer, corpus.BOS + opening)
    assert ended
    assert len(story.split()) > 40
    assert words(story) <= known_words()


def test_story_is_about_what_was_asked(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    story = ask(model, tokenizer, "Tell me a story about a bear named Otto.")
    assert story.count("Otto") >= 3
    assert "bear" in story


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Write a JSON record of a cat named Tom.", {"kind": "cat", "name": "Tom"}),
        ("Write a JSON record of a baker named Ruby from Paris.", {"job": "baker", "name": "Ruby"}),
    ],
)
def test_json_answers_parse_and_say_what_was_asked(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, question: str, expected: dict[str, str]
) -> None:
    record = json.loads(ask(model, tokenizer, question))
    assert expected.items() <= record.items()


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What colour is the sky?", "blue"),
        ("What is the capital of France?", "Paris"),
        ("What is the opposite of hot?", "cold"),
        ("What day comes after Monday?", "Tuesday"),
        ("What is 2 + 3?", "= 5"),
        ("How many legs does a spider have?", "eight"),
        ("Who are you?", "Weft's little demo model"),
        ("Hello!", "How can I help you?"),
    ],
)
def test_chat_answers_facts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, question: str, expected: str
) -> None:
    assert expected in ask(model, tokenizer, question)


def test_chat_remembers_the_conversation(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    assert "Mia" in ask(model, tokenizer, "My name is Mia.", "What is my name?")
