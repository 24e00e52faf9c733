"""A tiny grammar: templates with alternatives in square brackets and slots in braces become sentences.

"[One day|One morning], {hero} went to {place}."      "?It was cold."  (a leading ? means: half of the time)
"""

import random
import re
from collections.abc import Iterable, Mapping

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


def expand(template: str, rng: random.Random, slots: Mapping[str, str]) -> str:
    """Choose among the alternatives, then fill the slots; innermost brackets first."""
    while match := _ALTERNATIVES.search(template):
        choice = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
    return template.format_map(slots)


def tell(templates: Iterable[str], rng: random.Random, slots: Mapping[str, str]) -> str:
    """Expand one template after the other into a paragraph."""
    sentences = []
    for template in templates:
        if template.startswith("?"):
            if rng.random() < 0.5:
                continue
            template = template[1:]
        sentences.append(expand(template, rng, slots))
    return " ".join(sentence for sentence in sentences if sentence)


def article(noun: str) -> str:
    """ "a fox", "an owl"."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
