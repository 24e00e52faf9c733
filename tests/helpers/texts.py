"""Texts that tokenizers are compared on: real prompts in two languages, and made ones of everything else."""

import gzip
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

NUM_PROMPTS = 6000
_MAX_CHARS = 400  # one prompt; the long ones would only repeat themselves

_FRAGMENTS = (
    *(
        "Привет, как дела?",
        "Γειά σου Κόσμε",
        "مرحبا بالعالم",
        "שלום עולם",
        "नमस्ते दुनिया",
        "สวัสดีชาวโลก",
        "안녕하세요 세계",
    ),
    *(
        "こんにちは、世界。カタカナ",
        "გამარჯობა",
        "ሰላም ልዑል",
        "வணக்கம் உலகம்",
        "សួស្តី",
        "Xin chào các bạn",
        "Dzień dobry, żółć",
    ),
    *(
        "naïve café ñandú",
        "nai\u0308ve cafe\u0301",
        "ﬁnancial ①②③ Ｆｕｌｌ　ｗｉｄｔｈ",
        "𠜎𠜱𡃁 𐍈𐌰",
        "ꙮ ༄༅ ᚠᛇᚻ",
        "\ue000\uf8ff private",
    ),
    *("🙂", "👩‍👩‍👧‍👦", "🇨🇭🇯🇵", "👍🏽 ok", "❤️‍🔥", "☃︎", "𝒳𝓎𝓏 ∮ E⋅da = Q", "½ ⅓ ² ₃", "€ £ ¥ ₿"),
    *(
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\n\n",
        "\r\n",
        " \n ",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\u2028",
        "\x0b\x0c",
        "\x85",
        "\x1f",
    ),
    *("a" * 20, "=" * 33, "ha" * 9, "." * 7, " " * 37, "\n" * 5, "\t" * 4, "0" * 9, "1234567890 3.14159 1,000,000"),
    *(
        "don't WE'LL I'm you'Re they'd",
        "snake_case CamelCase kebab-case",
        "https://example.org/?q=a%20b#c",
        "x += y[i-1] // 2;",
    ),
    *(
        "def f(x):\n    return x\n",
        '{"key": [1, 2.5, null]}',
        "<html><body/></html>",
        "\\frac{a}{b}",
        "---\n# Title\n* item",
    ),
    *("▁", "▁a", "<0x0A>", "<0xE4>", "�", "\x00", "\x7f", "\u0301", "\ufeff"),
)


def prompts(shared: Path, count: int = NUM_PROMPTS) -> list[str]:
    """So many prompts, from all files in turn."""
    files = [_contents(path) for path in sorted((shared / "prompts").glob("*.jsonl.gz"))]
    return list(islice(_in_turn(files), count))


def made_texts(extra: tuple[str, ...] = (), *, count: int = 800) -> list[str]:
    """Fragments in many scripts, emoji, white space and odd characters, some of `extra`, put together at random."""
    rng = random.Random(0)
    fragments = [*_FRAGMENTS, *extra * (len(_FRAGMENTS) // (4 * len(extra)) if extra else 0)]
    drawn = ["".join(rng.choices(fragments, k=rng.randint(2, 6))) for _ in range(count)]
    spaced = [" ".join(rng.choices(fragments, k=rng.randint(2, 6))) for _ in range(count // 2)]
    return ["", *fragments, *drawn, *spaced]


def _contents(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            for message in json.loads(line)["messages"]:
                yield message["content"][:_MAX_CHARS]


def _in_turn(sources: list[Iterator[str]]) -> Iterator[str]:
    while sources:
        for source in list(sources):
            text = next(source, None)
            if text is None:
                sources.remove(source)
            else:
                yield text
