"""The router's tokenizer and chat templates, against transformers on the shared tokenizers and models."""

import errno
import functools
import gzip
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.call import ChatMessage, Conversation
from router.errors import InvalidRequestError, ModelFilesError
from router.tokenizer import ModelTokenizer

FOLDERS = [
    *(f"tokenizers/{name}" for name in ("qwen", "gpt2", "llama2-32k")),
    *(f"models/{name}" for name in ("stories260K", "stories3M", "TinyStories-656K")),
]
LLAMA_STYLE = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}\
{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if loop.first and system is defined else '') }}
        {{- message['content'].strip() }} [/INST]
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""
HEADER_STYLE = """{{- bos_token }}{% for message in messages %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
<|{{ message.role }}|> {{ {'name': message.name, 'text': message.content} | tojson }}
{% generation %}{% set seen = 1 %}{{ message.content | trim }}
{% endgeneration %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def prompts(shared: Path, name: str, count: int) -> list[list[dict[str, str]]]:
    with gzip.open(shared / "prompts" / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in islice(lines, count)]


def sample_texts(shared: Path) -> list[str]:
    names = ("alpaca_en.jsonl.gz", "alpaca_zh.jsonl.gz", "arena_hard_en.jsonl.gz", "rag_rgb.jsonl.gz")
    texts = [message["content"] for name in names for messages in prompts(shared, name, 25) for message in messages]
    return [*texts, "", "naïve café — 你好 🙂👩‍👩‍👧", "tabs\tand\n\nlines  ", "def f(x):\n    return x"]


def as_chat(messages: list[dict[str, str]], **template_kwargs: object) -> Conversation:
    return Conversation(messages=tuple(ChatMessage(**each) for each in messages), template_kwargs=template_kwargs)


Readers = tuple[ModelTokenizer, Any]
"""Ours, and that of transformers."""


@pytest.fixture(scope="module")
def read(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Readers]:
    """Reads a shared folder, with another template where one is given, once for all tests: large ones take a second."""
    transformers = pytest.importorskip("transformers")

    @functools.cache
    def read(path: str, template: str | None = None) -> Readers:
        folder = shared / path
        if template is not None:
            folder = Path(shutil.copytree(folder, tmp_path_factory.mktemp("model"), dirs_exist_ok=True))
            (folder / "chat_template.jinja").write_text(template)
        return ModelTokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)

    return read


HI = Conversation(messages=(ChatMessage(role="user", content="hi"),))


def make_folder(folder: Path, *, config: dict[str, Any] | None = None, **files: str) -> Path:
    """Write a model folder with a small tokenizer of whole words and single characters."""
    words = ["<s>", "</s>", *map(chr, range(32, 127)), "\n", "é"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def render(folder: Path, *messages: ChatMessage, template_kwargs: dict[str, object] | None = None) -> str:
    tokenizer = ModelTokenizer.from_folder(folder, now=lambda: datetime(2024, 7, 26))
    chat = Conversation(messages=messages, template_kwargs=template_kwargs or {})
    return tokenizer.decode(tokenizer.render_chat(chat), skip_special_tokens=False)


@pytest.mark.parametrize("path", FOLDERS)
def test_encode_and_decode_equal_transformers(read: Callable[..., Readers], shared: Path, path: str) -> None:
    tokenizer, oracle = read(path)

    for text in sample_texts(shared):
        ids = tokenizer.encode(text)
        if type(oracle).__name__ == "LlamaTokenizer" and (text.startswith(" ") or 0 in ids):
            continue  # transformers rebuilds this one: no space before a first space, unknown characters dropped
        assert list(ids) == oracle.encode(text), text
        assert list(tokenizer.encode(text, add_special_tokens=False)) == oracle.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
    assert tokenizer.vocab_size == len(oracle)


@pytest.mark.parametrize("name", ["stories260K", "stories3M", "TinyStories-656K"])
def test_golden_prompts_have_their_ids(shared: Path, name: str) -> None:
    folder = shared / f"models/{name}"
    tokenizer = ModelTokenizer.from_folder(folder)
    goldens = [json.loads(line) for line in (folder / "golden_greedy.jsonl").read_text().splitlines()]

    for golden in goldens:
        assert list(tokenizer.encode(golden["prompt"])) == golden["prompt_ids"]


@pytest.mark.parametrize(("eos_token", "expected"), [("</s>", 1), ("<|not there|>", None), (None, None)])
def test_end_of_sequence_is_what_the_config_names(eos_token: str | None, expected: int | None, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path, config={"eos_token": eos_token}))
    assert tokenizer.eos_token_id == expected


def test_special_tokens_named_only_in_the_config_are_special(tmp_path: Path) -> None:
    declared = {str(len("<s></s>") + 92): {"content": "<|end|>", "special": True}}
    folder = make_folder(tmp_path, config={"added_tokens_decoder": declared, "unk_token": "?"})
    tokenizer = ModelTokenizer.from_folder(folder)

    ids = tokenizer.encode("a<|end|>b?")

    assert (ids[1], tokenizer.vocab_size) == (99, 100)
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize("name", ["sharegpt_zh_multiturn.jsonl.gz", "toolcall_multiturn.jsonl.gz", "rag_rgb.jsonl.gz"])
def test_chat_equals_transformers_on_real_conversations(read: Callable[..., Readers], shared: Path, name: str) -> None:
    tokenizer, oracle = read("tokenizers/qwen")

    for messages in prompts(shared, name, 20):
        expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(tokenizer.render_chat(as_chat(messages))) == expected


@pytest.mark.parametrize("template", [LLAMA_STYLE, HEADER_STYLE], ids=["llama", "header"])
@pytest.mark.parametrize("as_file", [True, False], ids=["file", "config"])
def test_templates_equal_transformers(shared: Path, template: str, as_file: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shutil.copytree(shared / "tokenizers/llama2-32k", tmp_path, dirs_exist_ok=True)
    config_file = tmp_path / "tokenizer_config.json"
    if as_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    config = json.loads(config_file.read_text()) | {"chat_template": "not used" if as_file else template}
    config_file.write_text(json.dumps(config))
    messages = [
        {"role": "system", "content": "Be <b>brief</b> & 'kind'.", "name": "rules"},
        {"role": "user", "content": " Hello é 你好 "},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And </s> now?"},
        {"role": "assistant", "content": "Never seen."},
        {"role": "user", "content": "Why?"},
    ]
    # transformers leaves a missing name undefined as we do; the header template writes names, so all have one
    messages = [{"name": "n"} | message for message in messages]
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)

    ids = ModelTokenizer.from_folder(tmp_path).render_chat(as_chat(messages))

    assert list(ids) == oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    "variables",
    [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"tone": ["dry", {"é": 1.5}], "not_used": 1}],
    ids=["none", "false", "true", "nested"],
)
def test_variables_of_a_request_equal_transformers(read: Callable[..., Readers], variables: dict[str, Any]) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if tone %}{{ tone | tojson }}{% endif %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    messages = [{"role": "user", "content": "hi"}]
    tokenizer, oracle = read("tokenizers/qwen", template)

    ids = tokenizer.render_chat(as_chat(messages, **variables))

    assert list(ids) == oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)


TRIMMING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("last", ["Sure: ", "  Sure", "Sure", "", "a </s> b\n"])
@pytest.mark.parametrize("template", [LLAMA_STYLE, TRIMMING], ids=["llama", "trimming"])
@pytest.mark.parametrize("continues", [True, False], ids=["continued", "closed"])
def test_end_of_a_prompt_equals_transformers(
    read: Callable[..., Readers], template: str, last: str, continues: bool
) -> None:
    messages = [{"role": "user", "content": "Sure?", "name": "n"}, {"role": "assistant", "content": last, "name": "n"}]
    tokenizer, oracle = read("tokenizers/llama2-32k", template)
    chat = replace(as_chat(messages), add_generation_prompt=False, continue_final_message=continues)

    ids = tokenizer.render_chat(chat)

    assert list(ids) == oracle.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=continues, return_dict=False
    )


def test_message_that_the_template_shows_twice_is_cut_at_the_second(tmp_path: Path) -> None:
    content = "{{ messages[0].content }}"
    tokenizer = ModelTokenizer.from_folder(
        make_folder(tmp_path, config={"chat_template": f"1 {content}, {content[:-3]} | trim }}}}; 2 {content}; end"})
    )

    ids = tokenizer.render_chat(replace(HI, continue_final_message=True))

    assert tokenizer.decode(ids) == "1 hi, hi; 2 hi"


def test_template_sees_what_a_message_says_beside_its_content(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.tool_call_id is defined }}|{{ m.name }} {% endfor %}"
    )
    messages = [
        ChatMessage(role="assistant", content="a", reasoning_content="hm"),
        ChatMessage(role="tool", content="b", tool_call_id="c1", name="f"),
    ]

    assert render(make_folder(tmp_path, config={"chat_template": template}), *messages) == "hm|False| |True|f "


def test_thoughts_reach_templates_that_read_them_under_another_name(tmp_path: Path) -> None:
    """As that of gpt-oss does."""
    template = "{% for m in messages %}{% if 'thinking' in m %}<{{ m.thinking }}>{% endif %}{{ m.content }}{% endfor %}"
    folder = make_folder(tmp_path, config={"chat_template": template})
    hi = ChatMessage(role="user", content="hi")

    assert render(folder, hi, ChatMessage(role="assistant", content="a", reasoning_content="hm")) == "hi<hm>a"
    assert render(folder, hi, ChatMessage(role="assistant", content="a")) == "hia"


PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (PARTS, "user hi assistant yes "),
        ("{{ m.content if m.content is string else 'parts' }}", "user hi assistant  yes "),
        (
            f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{PARTS}{{% endif %}}",
            "user hi assistant  yes ",
        ),
        (
            "{% if messages | length < 2 %}{{ raise_exception('two') }}{% endif %}{{ m.content }}",
            "user hi assistant  yes ",
        ),
    ],
)
def test_content_is_given_as_parts_to_templates_that_read_only_these(
    content: str, expected: str, tmp_path: Path
) -> None:
    template = f"{{% for m in messages %}}{{{{ m.role }}}} {content} {{% endfor %}}"
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path, config={"chat_template": template}))
    chat = as_chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yes"}])

    assert tokenizer.decode(tokenizer.render_chat(chat)) == expected
    assert tokenizer.decode(tokenizer.render_chat(replace(chat, continue_final_message=True))) == expected[:-1]


def test_message_that_the_template_does_not_show_is_not_continued(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path, config={"chat_template": "{{ bos_token }}x"}))

    with pytest.raises(InvalidRequestError, match="does not show the last message") as caught:
        tokenizer.render_chat(replace(HI, continue_final_message=True))

    assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_what_is_the_template_s_own_no_request_replaces(name: str, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path, config={"chat_template": "{{ bos_token }}x"}))

    with pytest.raises(InvalidRequestError, match=f"^chat_template_kwargs sets {name}; allowed: names that") as caught:
        tokenizer.render_chat(Conversation(messages=HI.messages, template_kwargs={name: "y", "free": 1}))

    assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["self", "context", "args", "turns left", "caller", "loop", "", "1"])
def test_no_name_lifts_a_bound_or_breaks_a_template(name: str, tmp_path: Path) -> None:
    template = "{% for a in range(9) %}{{ a }}{% endfor %}"
    assert (
        render(make_folder(tmp_path, config={"chat_template": template}), *HI.messages, template_kwargs={name: [9]})
        == "012345678"
    )

    template = "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="more than 1000000 turns"):
        render(make_folder(tmp_path, config={"chat_template": template}), *HI.messages, template_kwargs={name: [10**9]})


@pytest.mark.parametrize("as_list", [True, False])
def test_default_of_named_templates_is_used(as_list: bool, tmp_path: Path) -> None:
    named = {"tool_use": "tools", "default": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    folder = make_folder(tmp_path, config={"chat_template": listed if as_list else named})

    assert render(folder, ChatMessage(role="user", content="hi")) == "<s>hi</s>"


def test_template_is_looked_for_in_three_files(tmp_path: Path) -> None:
    message = ChatMessage(role="user", content="hi")

    make_folder(tmp_path, chat_template__json=json.dumps({"chat_template": "json {{ messages[0].content }}"}))
    assert render(tmp_path, message) == "json hi"
    make_folder(tmp_path, config={"chat_template": "config {{ messages[0].content }}"})
    assert render(tmp_path, message) == "config hi"
    make_folder(tmp_path, chat_template__jinja="jinja {{ messages[0].content }}")
    assert render(tmp_path, message) == "jinja hi"


def doubling(expression: str, first: str) -> str:
    """Return a template that computes a value of the one before, forty times."""
    return (
        f"{{% set ns = namespace(x={first}) %}}{{% for i in range(40) %}}{{% set ns.x = {expression} %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}", "more than 1000000 turns"),
        ("{% macro m() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}" + "{{ m() }}" * 11, "1000000 turns"),
        ("{% for a in range(99999) %}{{ 'long' * 1000 }}{% endfor %}", "more than 16777216 characters"),
        ("{{ 'x' * 99999999 }}", "repeated 99999999 times"),
        ("{{ 99999999 * ['x'] }}", "repeated 99999999 times"),
        ("{{ 9 ** 99999 }}", "a power has more than 4096 bits"),
        ("{{ range(999999999) | list }}", "Range too big"),
        (doubling("ns.x * ns.x", "3"), "a product has more than 4096 bits"),
        (doubling("ns.x + ns.x", "[1]"), "too long a text or list"),
        (doubling("ns.x ~ ns.x", "'a'"), "too long a text or list"),
        (doubling("'%s%s' % (ns.x, ns.x)", "'a'"), "too long a text or list"),
        (doubling("[ns.x, ns.x] | join", "'a'"), "too long a text or list"),
        (doubling("ns.x | replace('', ns.x)", "'ab'"), "too long a text or list"),
        (doubling("ns.x.replace('a', ns.x)", "'aa'"), "too long a text or list"),
        (doubling("ns.x.join([ns.x, ns.x])", "'a'"), "too long a text or list"),
        ("{% set ns = namespace(x='a') %}" + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}" * 30, "too long a text"),
        ("{% for a in range(9999) %}{% set b = 'a' * 9**6 %}{% endfor %}", "2147483648 of all together"),
        ("{{ 'a' | center(3000) }}", "a width is 3000; allowed: at most 999"),
        ("{{ 'a'.ljust(3000) }}", "a width is 3000"),
        ("{{ 'a' | indent(width=3000) }}", "a width is 3000"),
        ("{{ messages | batch(3000, 0) | list }}", "a width is 3000"),
        ("{{ messages | tojson(indent=3000) }}", "a width is 3000"),
        ("{{ '%% %-3000d' | format(1) }}", "a width is 3000"),
        ("{{ '%(a).3000f' % {'a': 1} }}", "a width is 3000"),
        ("{{ '%*d' % (3000, 1) }}", "its width from an argument"),
        ("{{ '{:>3000}'.format(1) }}", "a width is 3000"),
        (doubling("ns.x.replace('a'.encode(), ns.x)", "'aa'.encode()"), "'encode' of 'str' object is unsafe"),
        ("{{ (1).to_bytes(100000) }}", "'to_bytes' of 'int' object is unsafe"),
        ("{{ 'aa'.translate({97: 'a' * 1000}) }}", "'translate' of 'str' object is unsafe"),
        ("{{ '{:{}}'.format(1, 3000) }}", "its width from an argument"),
    ],
)
def test_what_a_template_may_spend_is_bounded(template: str, said: str, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path, config={"chat_template": template}))

    with pytest.raises(InvalidRequestError, match=said):
        tokenizer.render_chat(HI)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("['a', 1] | join('-') ~ [messages[0], messages[0]] | join(', ', attribute='role')", "a-1user, user"),
        ("', '.join(['a', 'b']) + 'aab'.replace('a', 'c', 1) ~ 'aab' | replace('a', 1)", "a, bcab11b"),
        ("'%5.1f%%|%s' | format(2, 'x') ~ '%(a)03d' % {'a': 7} ~ 17 % 5", "  2.0%|x0072"),
        ("'{:>4}{a}'.format(1, a='b') ~ 'a'.ljust(3) ~ 'b' | center(3) ~ 5000000 | tojson", "   1ba   b 5000000"),
        ("messages | map(attribute='role') | map('upper') | list | string ~ 2 * [3]", "['USER'][3, 3]"),
    ],
)
def test_what_is_counted_is_what_jinja_makes(expression: str, expected: str, tmp_path: Path) -> None:
    assert render(make_folder(tmp_path, config={"chat_template": f"{{{{ {expression} }}}}"}), *HI.messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in 'ab' recursive %}{{ loop('ab') if loop.depth < 60 }}{% endfor %}",
        "{% for a in [1] recursive %}{{ loop(range(99)) if loop.depth < 4 }}{% endfor %}",
        "{% for a in [1] recursive %}{{ loop(iterable=range(99)) if loop.depth < 4 }}{% endfor %}",
        "{% for a in range(200) %}{{ range(99) | map('upper') | list }}{% endfor %}",
    ],
)
def test_calls_recursion_and_filters_take_turns(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.template_sandbox.MAX_TURNS", 10_000)
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path, config={"chat_template": template}))

    with pytest.raises(InvalidRequestError, match="more than 10000 turns"):
        tokenizer.render_chat(HI)


def test_counted_loops_know_their_place(tmp_path: Path) -> None:
    template = (
        "{% for m in messages recursive %}{{ loop(m.content) if loop.depth < 2 }}{{ loop.index }}/{{ loop.length }}"
        "{{ loop.first }}{{ loop.last }}"
        "{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop.revindex }} {% else %}none{% endfor %}"
        "{% for m in nothing %}{% else %}none{% endfor %}{{ 3 * 'ab' }}{{ 2 ** 10 }}"
    )
    folder = make_folder(tmp_path, config={"chat_template": template})
    messages = [ChatMessage(role="user", content=content) for content in "abc"]
    inner = "1/1TrueTrueFalseFalse1 "
    expected = (
        f"{inner}1/3TrueFalseFalseTrue3 {inner}2/3FalseFalseTrueTrue2 {inner}3/3FalseTrueTrueFalse1 noneababab1024"
    )

    assert render(folder, *messages) == expected


def test_chat_adds_no_special_tokens_of_its_own(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models/stories3M"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = ModelTokenizer.from_folder(tmp_path)

    ids = tokenizer.render_chat(as_chat([{"role": "user", "content": "Once"}]))

    assert ids == tokenizer.encode("Once", add_special_tokens=False)
    assert ids != tokenizer.encode("Once")


def test_template_may_ask_for_the_date(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config={"chat_template": "{{ strftime_now('%d %b %Y') }}"})

    assert render(folder, ChatMessage(role="user", content="hi")) == "26 Jul 2024"


def test_blocks_leave_no_blank_lines(tmp_path: Path) -> None:
    template = "{% for m in messages %}\n    {% if true %}\nx{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    folder = make_folder(tmp_path, chat_template__jinja=template)

    assert render(folder, ChatMessage(role="user", content="hi")) == "xhi\n"


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{{ raise_exception('no tools') }}", (ChatMessage(role="user", content="hi"),), "no tools"),
        ("{{ messages[0].content + 1 }}", (ChatMessage(role="user", content="hi"),), "TypeError"),
        ("{{ '\\ud800' }}", (ChatMessage(role="user", content="hi"),), "surrogates not allowed"),
        ("{{ nothing.at_all }}", (ChatMessage(role="user", content="hi"),), "'nothing' is undefined"),
        ("{{ ''.__class__.mro() }}", (ChatMessage(role="user", content="hi"),), "unsafe"),
        ("{{ messages.append(1) }}", (ChatMessage(role="user", content="hi"),), "unsafe"),
        (None, (ChatMessage(role="user", content="hi"),), "no chat template"),
    ],
)
def test_malformed_chat_is_refused(
    template: str | None, messages: tuple[ChatMessage, ...], said: str, tmp_path: Path
) -> None:
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path, config={"chat_template": template}))

    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render_chat(Conversation(messages=messages))

    assert said in str(caught.value)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("files", "config", "said"),
    [
        ({"tokenizer__json": "{}"}, {}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer_config__json": "{"}, {}, "tokenizer_config.json is not JSON"),
        ({"generation_config__json": "[]"}, {}, "generation_config.json holds a list"),
        ({"generation_config__json": '{"top_p": "high"}'}, {}, "top_p in"),
        ({"generation_config__json": '{"top_k": Infinity}'}, {}, "top_k in"),
        ({"chat_template__jinja": "{% if %}"}, {}, "chat_template.jinja does not compile"),
        ({"chat_template__jinja": "{% for a in b %}" * 25 + "{% endfor %}" * 25}, {}, "does not compile: SyntaxError"),
        ({"chat_template__jinja": "{{ " + "(" * 3000 + ")" * 3000 + " }}"}, {}, "does not compile: RecursionError"),
        ({"chat_template__jinja": "{{ " + "9" * 5000 + " }}"}, {}, "does not compile: ValueError"),
        ({}, {"chat_template": 3}, "chat_template of"),
        ({}, {"chat_template": [{"name": "tool_use", "template": "x"}]}, "one of them must be 'default'"),
        ({}, {"chat_template": ["x"]}, "lacks `name` or `template`"),
    ],
)
def test_broken_folder_is_named(files: dict[str, str], config: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config=config, **files)

    with pytest.raises(ModelFilesError) as caught:
        ModelTokenizer.from_folder(folder)

    assert said in str(caught.value)


@pytest.mark.parametrize("knows_name", [True, False])  # what fails in reading, as on a damaged disk, knows none
def test_file_that_cannot_be_read_is_named_or_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_name: bool
) -> None:
    folder = make_folder(tmp_path, generation_config__json="{}")

    def refuse(file: Path, **_: object) -> str:
        raise OSError(errno.EIO, "Input/output error", *([str(file)] if knows_name else []))

    monkeypatch.setattr(Path, "read_text", refuse)
    name = r"/\w+config\.json" if knows_name else ""
    with pytest.raises(ModelFilesError, match=rf"{folder}{name} cannot be read: Input/output error"):
        ModelTokenizer.from_folder(folder)


def test_truncation_saved_in_the_file_is_not_applied(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=4)
    saved.save(str(folder / "tokenizer.json"))

    tokenizer = ModelTokenizer.from_folder(folder)

    assert [len(tokenizer.encode(text)) for text in ("ab", "abcdefgh")] == [2, 8]


def test_ids_beyond_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path))

    assert tokenizer.decode([*tokenizer.encode("ab"), 4_000_000_000]) == "ab"


def test_threads_get_the_same_ids(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_folder(make_folder(tmp_path, chat_template__jinja="{{ messages[0].content }}"))
    texts = [f"text number {index}" for index in range(64)]

    def round_trip(text: str) -> str:
        return tokenizer.decode(tokenizer.render_chat(as_chat([{"role": "user", "content": text}])))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == texts


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(shared: Path, work: str) -> None:
    tokenizer = ModelTokenizer.from_folder(shared / "tokenizers/qwen")
    text = "Once upon a time there was a little girl. " * 12_000
    argument = text if work == "encode" else tokenizer.encode(text) * 4
    worker = threading.Thread(target=getattr(tokenizer, work), args=(argument,))
    ticks, started = 0, time.perf_counter()

    worker.start()
    while worker.is_alive():
        worker.join(0.001)
        ticks += 1

    elapsed = time.perf_counter() - started
    assert ticks > 10, f"{ticks} turns in {elapsed:.2f} s: to {work} holds the interpreter lock"
