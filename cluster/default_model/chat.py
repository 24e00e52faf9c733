"""Questions and answers about the small world, and the conversations made of them."""

import random
from collections.abc import Callable

from cluster.default_model import world
from cluster.default_model.grammar import article, expand
from cluster.default_model.records import make_record
from cluster.default_model.stories import make_story

Turn = tuple[str, str]
"""What the user says, what the assistant answers."""
Message = dict[str, str]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Weft's little demo model.",
    "You are a friendly assistant. Answer briefly.",
    "Be kind and clear.",
)
IDENTITY = "I am Weft's little demo model. I tell stories, answer small questions and write JSON."
UNKNOWN = "I do not know that. I am only a little model. Ask me for a story, a sum or a JSON record."


def make_conversation(rng: random.Random) -> list[Message]:
    """One to four turns, sometimes with a system prompt."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    turns = _introduction(rng) if rng.random() < 0.08 else [_turn(rng) for _ in range(_num_turns(rng))]
    for question, answer in turns:
        messages.append({"role": "user", "content": _untidy(question, rng)})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _num_turns(rng: random.Random) -> int:
    return rng.choices((1, 2, 3, 4), (70, 15, 10, 5))[0]


def _turn(rng: random.Random) -> Turn:
    makers, weights = zip(*_TURNS, strict=True)
    maker: Callable[[random.Random], Turn] = rng.choices(makers, weights)[0]
    return maker(rng)


def _untidy(question: str, rng: random.Random) -> str:
    """People forget capitals and punctuation; the answer stays the same."""
    if rng.random() < 0.08:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.08:
        question = question.rstrip("?.")
    return question


def _colour(rng: random.Random) -> Turn:
    thing = rng.choice(list(world.THING_COLOURS))
    template = "[What colour is {x}?|What color is {x}?|Which colour is {x}?|Tell me the colour of {x}.]"
    return expand(template, rng, {"x": thing}), f"{thing[0].upper()}{thing[1:]} is {world.THING_COLOURS[thing]}."


def _sound(rng: random.Random) -> Turn:
    animal = rng.choice(list(world.SOUNDS))
    question = expand("[What does {x} say?|What sound does {x} make?|How does {x} sound?]", rng, {"x": article(animal)})
    return question, f'{article(animal).capitalize()} says "{world.SOUNDS[animal]}".'


def _baby(rng: random.Random) -> Turn:
    animal = rng.choice(list(world.BABIES))
    template = "[What is a baby {x} called?|What do you call a baby {x}?|What is the name of a baby {x}?]"
    return expand(template, rng, {"x": animal}), f"A baby {animal} is called {article(world.BABIES[animal])}."


def _legs(rng: random.Random) -> Turn:
    animal = rng.choice(list(world.LEGS))
    number = world.NUMBER_WORDS[world.LEGS[animal]].replace("zero", "no")
    question = expand("[How many legs does {x} have?|How many legs has {x}?]", rng, {"x": article(animal)})
    return question, f"{article(animal).capitalize()} has {number} legs."


def _food(rng: random.Random) -> Turn:
    animal = rng.choice(list(world.FOODS))
    template = "[What does {x} eat?|What does {x} like to eat?|What food does {x} like?]"
    return expand(
        template, rng, {"x": article(animal)}
    ), f"{article(animal).capitalize()} likes to eat {world.FOODS[animal]}."


def _dwelling(rng: random.Random) -> Turn:
    animal = rng.choice(list(world.DWELLINGS))
    dwelling = world.DWELLINGS[animal]
    question = expand("[Where does {x} live?|What is the home of {x}?]", rng, {"x": article(animal)})
    return question, f"{article(animal).capitalize()} lives in {article(dwelling)}."


def _opposite(rng: random.Random) -> Turn:
    word, other = rng.choice(list(world.OPPOSITES.items()))
    if rng.random() < 0.5 and list(world.OPPOSITES.values()).count(other) == 1 and other not in world.OPPOSITES:
        word, other = other, word
    template = '[What is the opposite of {x}?|Tell me the opposite of {x}.|What is the opposite of "{x}"?]'
    return expand(template, rng, {"x": word}), f"The opposite of {word} is {other}."


def _capital(rng: random.Random) -> Turn:
    country, capital = rng.choice(list(world.CAPITALS.items()))
    if rng.random() < 0.2:
        return f"{capital} is the capital of which country?", f"{capital} is the capital of {country}."
    template = "[What is the capital of {x}?|Which city is the capital of {x}?|Tell me the capital of {x}.]"
    return expand(template, rng, {"x": country}), f"The capital of {country} is {capital}."


def _calendar(rng: random.Random) -> Turn:
    names, what = rng.choice(((world.DAYS, "day"), (world.MONTHS, "month")))
    index = rng.randrange(len(names))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    template = "[What {what} comes {word} {x}?|Which {what} is {word} {x}?|Which {what} comes {word} {x}?]"
    question = expand(template, rng, {"what": what, "word": word, "x": names[index]})
    return question, f"The {what} {word} {names[index]} is {names[(index + step) % len(names)]}."


def _calendar_list(rng: random.Random) -> Turn:
    if rng.random() < 0.5:
        return f"{rng.choice(('Name', 'List'))} the days of the week.", ", ".join(world.DAYS) + "."
    return f"{rng.choice(('Name', 'List'))} the months of the year.", ", ".join(world.MONTHS) + "."


def _sum(rng: random.Random) -> Turn:
    total = rng.randint(0, 20)
    first = rng.randint(0, total)
    second, words = total - first, world.NUMBER_WORDS
    if rng.random() < 0.25:
        question = expand("What is {a} plus {b}?", rng, {"a": words[first], "b": words[second]})
        return question, f"{words[first].capitalize()} plus {words[second]} is {words[total]}."
    if rng.random() < 0.35:
        template = "[What is {a} - {b}?|What is {a} minus {b}?|{a} - {b} = ?]"
        return expand(template, rng, {"a": str(total), "b": str(first)}), f"{total} - {first} = {second}"
    template = "[What is {a} + {b}?|What is {a} plus {b}?|How much is {a} + {b}?|{a} + {b} = ?|Add {a} and {b}.]"
    return expand(template, rng, {"a": str(first), "b": str(second)}), f"{first} + {second} = {total}"


def _count(rng: random.Random) -> Turn:
    last = rng.randint(3, 20)
    asked = rng.choice((str(last), world.NUMBER_WORDS[last]))
    question = f"Count {rng.choice(('to', 'up to'))} {asked}."
    return question, ", ".join(str(number) for number in range(1, last + 1)) + "."


def _spell(rng: random.Random) -> Turn:
    word = rng.choice(world.SPELLABLE)
    return expand("[Spell {x}.|How do you spell {x}?|Spell the word {x}.]", rng, {"x": word}), "-".join(word.upper())


def _emoji(rng: random.Random) -> Turn:
    word = rng.choice(list(world.EMOJI))
    question = expand("[Show me {x}.|Draw {x}.|Show me an emoji of {x}.]", rng, {"x": article(word)})
    return question, world.EMOJI[word]


def _repeat(rng: random.Random) -> Turn:
    """Copying words in order: of little use by itself, but with it the model learns early to look back for a name."""
    words = rng.sample(_REPEATABLE, rng.randint(2, 8))
    text = rng.choice((" ", ", ")).join(words)
    return expand("[Repeat|Say|Repeat after me|Say this]: ", rng, {}) + text, text


def _greeting(rng: random.Random) -> Turn:
    return rng.choice(_GREETINGS)


def _unknown(rng: random.Random) -> Turn:
    topic = rng.choice(world.UNKNOWN_TOPICS)
    template = (
        "[Explain {x}.|What is {x}?|Tell me about {x}.|Write about {x}.|How does {x} work?"
        "|What do you know about {x}?|Who invented {x}?]"
    )
    return expand(template, rng, {"x": topic}), UNKNOWN


def _story(rng: random.Random) -> Turn:
    kind, hero = rng.choice(list(world.ANIMAL_HOMES)), rng.choice(world.NAMES)
    template = rng.choice(("{a_kind}", "{a_kind} named {hero}", "{a_kind} called {hero}", "{hero} the {kind}"))
    what = template.format(kind=kind, a_kind=article(kind), hero=hero)
    verb = expand("[Tell me a story|Tell a story|Write a story|Write a short story|Please tell me a story]", rng, {})
    if rng.random() < 0.15:
        return f"{verb}.", make_story(rng)
    return f"{verb} about {what}.", make_story(rng, kind=kind, hero=hero)


def _introduction(rng: random.Random) -> list[Turn]:
    """The user says a name, something else may follow, and the name is asked for."""
    name, animal = rng.choice(world.NAMES), rng.choice(world.PETS)
    told = expand("[My name is {x}.|I am {x}.|Hello, I am {x}.|Hi, my name is {x}.]", rng, {"x": name})
    turns = [(told, f"Nice to meet you, {name}!")]
    if rng.random() < 0.5:
        turns.append((f"I have {article(animal)}.", f"How nice! What is the name of your {animal}?"))
    if rng.random() < 0.6:
        turns.append(_turn(rng))
    turns.append((rng.choice(("What is my name?", "Who am I?", "Do you know my name?")), f"Your name is {name}."))
    return turns


_REPEATABLE = (
    *world.NAMES,
    *world.COLOURS,
    *world.ANIMAL_HOMES,
    *world.LOSABLES,
    *world.GOODS,
    *world.JOBS,
    *world.CITIES,
)

_GREETINGS: tuple[Turn, ...] = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Hi!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hey", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("Good evening!", "Good evening! What can I do for you?"),
    ("Good night!", "Good night! Sleep well."),
    ("How are you?", "I am fine, thank you. How are you?"),
    ("I am fine.", "I am glad to hear that."),
    ("Thank you!", "You are welcome!"),
    ("Thanks!", "You are welcome!"),
    ("Goodbye!", "Goodbye! Have a nice day."),
    ("Bye!", "Goodbye! Have a nice day."),
    ("Who are you?", IDENTITY),
    ("What are you?", IDENTITY),
    ("What is your name?", IDENTITY),
    ("What can you do?", IDENTITY),
    ("Tell me about yourself.", IDENTITY),
    ("Are you a person?", "No, I am Weft's little demo model."),
    ("Who made you?", "I was trained by a script in the Weft repository, on text that the script made up."),
    ("What is Weft?", "Weft is a cluster that serves language models. I am its little demo model."),
    ("How big are you?", "I have about two million parameters. I am very small."),
    ("Tell me a joke.", "Why did the duck cross the road? To say quack on the other side."),
)

_TURNS: tuple[tuple[Callable[[random.Random], Turn], float], ...] = (
    (_colour, 6), (_sound, 6), (_baby, 5), (_legs, 5), (_food, 5), (_dwelling, 4), (_opposite, 7), (_capital, 8),
    (_calendar, 7), (_calendar_list, 1), (_sum, 30), (_count, 3), (_spell, 3), (_emoji, 4), (_greeting, 9),
    (_unknown, 6), (_story, 20), (make_record, 24), (_repeat, 20),
)  # fmt: skip
