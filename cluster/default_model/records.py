"""JSON records and the requests for them: what is asked for is what the record says, and it always parses."""

import json
import random
from collections.abc import Callable

from cluster.default_model import world
from cluster.default_model.grammar import article, expand

Record = dict[str, object]


def make_record(rng: random.Random) -> tuple[str, str]:
    """A request in words and the JSON text that answers it."""
    maker = rng.choice(_MAKERS)
    request, record = maker(rng)
    return request, json.dumps(record, ensure_ascii=False)


def _ask(rng: random.Random, what: str) -> str:
    return expand(rng.choice(_REQUESTS), rng, {"what": what})


_REQUESTS = (
    "Write a JSON record of {what}.",
    "Write a JSON record for {what}.",
    "[Give me|Make|Create|Write] a JSON record of {what}.",
    "[Give me|Make|Create|Write] a JSON object for {what}[.|, please.]",
    "Describe {what} [as|in] JSON.",
    "JSON: {what}",
)


def _pet(rng: random.Random) -> tuple[str, Record]:
    kind, name, colour = rng.choice(world.PETS), rng.choice(world.NAMES), rng.choice(world.COLOURS)
    age = rng.randint(1, 12)
    what = article(kind)
    if rng.random() < 0.3:
        what = f"{article(colour)} {kind}"
    if rng.random() < 0.85:
        what += rng.choice((" named ", " called ")) + name
    if rng.random() < 0.3:
        what += f", {age} years old" if age > 1 else ", one year old"
    food = rng.choice(list(world.FOODS.values()))
    return _ask(rng, what), {"kind": kind, "name": name, "age": age, "colour": colour, "food": food}


def _person(rng: random.Random) -> tuple[str, Record]:
    name, job = rng.choice(world.NAMES), rng.choice(world.JOBS)
    age, city = rng.randint(20, 70), rng.choice(world.CITIES)
    what = f"{article(job)} named {name}"
    if rng.random() < 0.4:
        what += f" from {city}"
    if rng.random() < 0.3:
        what += f", {age} years old"
    return _ask(rng, what), {"name": name, "job": job, "age": age, "city": city}


def _weather(rng: random.Random) -> tuple[str, Record]:
    city, day, sky = rng.choice(world.CITIES), rng.choice(world.DAYS), rng.choice(world.SKIES)
    what = rng.choice((f"the weather in {city} on {day}", f"the {day} weather in {city}", f"the weather in {city}"))
    return _ask(rng, what), {"city": city, "day": day, "sky": sky, "temperature": rng.randint(-5, 30)}


def _order(rng: random.Random) -> tuple[str, Record]:
    name, item, count = rng.choice(world.NAMES), rng.choice(world.GOODS), rng.randint(2, 20)
    what = rng.choice((f"an order of {count} {item} for {name}", f"an order for {name}: {count} {item}"))
    return _ask(rng, what), {"customer": name, "items": [{"item": item, "count": count}], "paid": rng.random() < 0.5}


def _book(rng: random.Random) -> tuple[str, Record]:
    kind, trait, author = rng.choice(list(world.ANIMAL_HOMES)), rng.choice(world.TRAITS), rng.choice(world.NAMES)
    what = f"a book about {article(kind)}"
    if rng.random() < 0.6:
        what += f" by {author}"
    title = f"The {trait.capitalize()} {kind.capitalize()}"
    request = _ask(rng, what)
    return request, {"title": title, "author": author, "pages": rng.randint(2, 20) * 10, "topics": [kind, "friends"]}


def _capitals(rng: random.Random) -> tuple[str, Record]:
    country = rng.choice(list(world.CAPITALS))
    return _ask(rng, country), {"country": country, "capital": world.CAPITALS[country]}


def _colours(rng: random.Random) -> tuple[str, Record]:
    count = rng.randint(2, 5)
    what = f"{world.NUMBER_WORDS[count]} colours"
    return _ask(rng, what), {"colours": rng.sample(world.COLOURS, count)}


_MAKERS: tuple[Callable[[random.Random], tuple[str, Record]], ...] = (
    _pet, _pet, _pet, _person, _weather, _order, _book, _capitals, _colours,
)  # fmt: skip
