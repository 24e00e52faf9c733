"""Little stories: a hero, a friend, one plot, an ending. Within one, names, kinds, colours and pronouns stay the same."""

# ruff: noqa: E501  A template is one line, however long.

import random

from cluster.default_model import world
from cluster.default_model.grammar import article, expand, tell

OPENINGS = (
    "Once upon a time there was {a_trait} {kind} named {hero}. {He} lived {home}.",
    "Once upon a time, {a_trait} {kind} named {hero} lived {home}.",
    "There was once {a_trait} {kind} called {hero}, who lived {home}.",
    "{hero} was {a_trait} {kind} who lived {home}.",
)
ENDINGS = (
    "[From that day on|Ever since that day], {hero} and {friend} were the best of friends.",
    "That night {hero} slept well and dreamed of {place}.",
    "{hero} smiled all the way home.",
    "And they all lived happily ever after.",
    "{lesson}",
    '"{lesson_said}," said {friend}, and {hero} agreed.',
    "When the moon came up, {hero} and {friend} said good night.",
)
_MEET_FRIEND = (
    "[On the way {he} met|Near {place} {he} met|Soon {he} met] {friend} the {friend_kind}.",
    "{He} [ran|walked|hurried] to {his} friend {friend}, {a_friend_trait} {friend_kind}.",
)
_THANKS = (
    '"Thank you, {friend}!" said {hero}. ["You are a true friend."|"I could not have done it alone."|]',
    "{hero} [hugged|thanked] {friend} and [laughed|danced with joy|smiled].",
)

PLOTS: dict[str, tuple[str, ...]] = {
    "lost": (
        "[One morning|One day|One sunny day|After breakfast], {hero} could not find {his} {colour} {thing}.",
        "[{He} looked under the bed and behind the door|{He} looked in every corner of the house|{He} looked high and low], but the {thing} was not there.",
        "?\"Oh no!\" said {hero}. \"My {thing} is gone!\"",
        "MEET",
        "\"Have you seen my {colour} {thing}?\" asked {hero}.",
        "\"No,\" said {friend}, \"but I will help you [look|find it|search].\"",
        "[Together they|So they|The two friends] searched {place} and {place2}.",
        "?They asked a butterfly and a snail, but nobody had seen it.",
        "[At last|Then|After a long time] {friend} saw something {colour} {spot}. It was the {thing}!",
        "THANKS",
    ),
    "cook": (
        "[One day|One cold morning|On Sunday], {hero} wanted to make {dish}.",
        "[But there were no|But {he} had no] {ingredient} in the kitchen.",
        "MEET",
        "\"I want to make {dish}, but I need {ingredient},\" said {hero}.",
        "\"I know where to find {ingredient},\" said {friend}. \"Come with me to {place}!\"",
        "They filled {article_colour} basket and carried it home.",
        "[Soon the whole house smelled wonderful|They stirred and mixed and waited|{hero} cooked and {friend} set the table].",
        "When the {dish} [was|were] ready, they ate it all with [a cup of tea|a glass of milk|big spoons].",
        "?\"This is the best {dish} in the world,\" said {friend}.",
    ),
    "noise": (
        "[One night|Late one evening|In the middle of the night], {hero} heard a strange noise. \"{noise}!\" it went.",
        "{hero} pulled the blanket over {his} ears, but the noise came again. \"{noise}!\"",
        "?\"Is it a ghost?\" {he} thought.",
        "[In the end|At last] {he} took {his} {colour} lantern and went to wake {friend} the {friend_kind}.",
        "\"Do you hear that?\" whispered {hero}. \"Yes,\" said {friend}. \"Let us go and see.\"",
        "They [walked slowly|went on tiptoe|crept] to {place} and looked {spot}.",
        "It was only {noise_source}!",
        "{hero} and {friend} laughed [and laughed|until their bellies hurt].",
    ),
    "build": (
        "[One day|In the spring|One summer morning], {hero} decided to build {a_build}.",
        "{He} collected {material} and {material2}, and {he} worked [all morning|until noon|very hard].",
        "But the {build} [fell down|broke|was crooked].",
        "?{hero} sat down {spot} and almost cried.",
        "Then {friend} the {friend_kind} came by. \"Do not give up,\" said {friend}. \"We can do it together.\"",
        "{friend} held the {material} and {hero} tied the knots.",
        "[By evening|When the sun went down|Before dinner] the {build} was ready, and it was [strong|beautiful|perfect].",
        "?They painted it {colour}.",
        "THANKS",
    ),
    "birthday": (
        "It was the birthday of {friend} the {friend_kind}, and {hero} had no present.",
        "[{hero} thought and thought.|\"What can I give?\" {hero} wondered.]",
        "{He} went to {place} and looked {spot}, and there {he} found something {colour}.",
        "It was [a {colour} ribbon|a {colour} feather|a {colour} stone]. {hero} [washed it|cleaned it] and wrapped it in a leaf.",
        "[In the afternoon|At four o'clock] everyone came to the party and ate {dish}.",
        "When {friend} opened the present, {his_friend} eyes [shone|grew big|sparkled].",
        "\"It is the [best|most beautiful] present of all!\" said {friend}.",
    ),
    "fear": (
        "{hero} was afraid of {fear}.",
        "[All the others|The other animals] [laughed|played without {him}|did not understand], but {friend} the {friend_kind} did not laugh.",
        "\"I was afraid too, once,\" said {friend}. \"Take my hand, and we will go [slowly|together|one step at a time].\"",
        "[That evening|The next day|On Saturday] they went to {place}.",
        "{hero} closed {his} eyes and took one small step, and then another.",
        "Then {he} opened {his} eyes. {fear_truth}.",
        "\"I did it!\" [cried|shouted|said] {hero}. [{friend} clapped.|\"I knew you could,\" said {friend}.]",
    ),
    "race": (
        "[One day|One fine morning|In May] there was a race from {place} to {place2}.",
        "{hero} wanted to win. {friend} the {friend_kind} wanted to win too.",
        "[\"One, two, three, go!\" called the owl.|A bell rang, and off they went.]",
        "{hero} ran [as fast as the wind|faster than ever], and soon {he} was [far ahead|in front].",
        "But then {he} saw that {friend} had fallen and hurt {his_friend} [foot|knee].",
        "{hero} stopped. [\"Friends are more important than winning,\" {he} said.|{He} turned around and ran back.]",
        "[Arm in arm they crossed the line, last of all|They walked to the end together], and everybody [cheered|clapped].",
        "?Both of them got a {colour} medal.",
    ),
    "storm": (
        "[One {weather_adj} day|One {weather_adj} evening], {hero} sat by the fire with a cup of tea.",
        "Knock, knock! [Someone was at the door|There was somebody outside]. It was {friend} the {friend_kind}, cold and wet.",
        "\"The {weather} has [broken|carried away|destroyed] my roof,\" said {friend}. \"May I stay here?\"",
        "\"Of course,\" said {hero}. \"Come in and get warm.\"",
        "{hero} gave {him_friend} {article_colour} blanket and some {dish}.",
        "All night they told stories while the {weather} [went on|sang around the house].",
        "In the morning the sun was shining, and they repaired the roof with {material}.",
    ),
    "music": (
        "{hero} had an old {instrument}, and {he} [practised|played] every day.",
        "At first it sounded [terrible|funny|like a sneezing goose], and the birds flew away.",
        "\"I will never learn it,\" said {hero} sadly.",
        "But {friend} the {friend_kind} liked the music. \"Play a little every day,\" {he_friend} said, \"and wait.\"",
        "So {hero} played in the morning and in the evening, in {place} and near {place2}.",
        "[In the summer|After many weeks|When autumn came] there was a feast in the village, and {hero} played the {instrument}.",
        "Everybody danced, and {friend} danced [the longest|most of all].",
    ),
    "gift": (
        "[One day|One morning], {hero} found {gift} {spot}.",
        "\"Who has lost this?\" {he} wondered, and [{he} went from door to door|{he} asked everyone in {place}].",
        "\"It is not mine,\" said the mole. \"It is not mine,\" said the hen.",
        "At last {he} came to {friend} the {friend_kind}, who [was crying|looked sad].",
        "\"I have lost {gift},\" said {friend}. \"It was a present from my grandmother.\"",
        "\"Here it is!\" said {hero}, and {friend} [jumped for joy|smiled again].",
        "?To say thank you, {friend} made {dish} for both of them.",
    ),
    "star": (
        "[One night|One clear night], {hero} saw a star fall from the sky into {place}.",
        "{He} took {his} {colour} {thing} and ran out to find it.",
        "MEET",
        "\"Did you see the star?\" asked {hero}. \"Yes! It fell {spot},\" said {friend}.",
        "They looked and looked, and there it was: a tiny {colour} light.",
        "\"I want to go home,\" said the star in a small voice.",
        "So they climbed to the top of the hill and threw it up [as high as they could|into the sky].",
        "Now, every night, one star shines [a little brighter|just for {hero} and {friend}].",
    ),
    "seed": (
        "In the spring {friend} the {friend_kind} gave {hero} a seed. \"Plant it and wait,\" said {friend}.",
        "{hero} planted the seed near {place} and gave it water every day.",
        "One week passed, and nothing happened. Two weeks passed, and nothing happened.",
        "\"My seed is sleeping,\" said {hero}. [But {he} did not give up.|\"I will sing to it.\"]",
        "[Then, one morning|At last, one warm morning], there was a small green leaf.",
        "It grew and grew, and in the summer it had a big {colour} flower.",
        "{hero} called {friend}, and they [sat in its shade|danced around it|looked at it until evening].",
    ),
}  # fmt: skip


def _pronouns(name: str) -> tuple[str, str, str]:
    return ("she", "her", "her") if name in world.GIRLS else ("he", "him", "his")


def make_story(rng: random.Random, *, kind: str | None = None, hero: str | None = None) -> str:
    """One story; `kind` and `hero` fix the hero's animal and name."""
    kind = kind or rng.choice(list(world.ANIMAL_HOMES))
    hero = hero or rng.choice(world.NAMES)
    slots = _slots(rng, kind, hero)
    plot = PLOTS[rng.choice(list(PLOTS))]
    opening = expand(rng.choice(OPENINGS), rng, slots)
    body = tell((_meeting(template, rng) for template in plot), rng, slots)
    ending = expand(rng.choice(ENDINGS), rng, slots)
    return f"{opening} {body} {ending}"


def _meeting(template: str, rng: random.Random) -> str:
    match template:
        case "MEET":
            return rng.choice(_MEET_FRIEND)
        case "THANKS":
            return rng.choice(_THANKS)
        case _:
            return template


def _slots(rng: random.Random, kind: str, hero: str) -> dict[str, str]:
    """Everything that a story may mention, chosen once."""
    friend = rng.choice([name for name in world.NAMES if name != hero])
    friend_kind = rng.choice([animal for animal in world.ANIMAL_HOMES if animal != kind])
    trait, friend_trait = rng.sample(world.TRAITS, 2)
    place, place2 = rng.sample(world.PLACES, 2)
    material, material2 = rng.sample(world.MATERIALS, 2)
    colour, dish, build = rng.choice(world.COLOURS), rng.choice(world.DISHES), rng.choice(world.BUILDS)
    noise, fear = rng.choice(list(world.NOISES)), rng.choice(list(world.FEARS))
    weather, lesson = rng.choice(list(world.WEATHERS)), rng.choice(world.LESSONS)
    he, him, his = _pronouns(hero)
    he_friend, him_friend, his_friend = _pronouns(friend)
    return {
        "hero": hero, "kind": kind, "a_trait": article(trait), "home": world.ANIMAL_HOMES[kind],
        "friend": friend, "friend_kind": friend_kind, "a_friend_trait": article(friend_trait),
        "he": he, "him": him, "his": his, "He": he.capitalize(),
        "he_friend": he_friend, "him_friend": him_friend, "his_friend": his_friend,
        "place": place, "place2": place2, "spot": rng.choice(world.SPOTS),
        "thing": rng.choice(world.LOSABLES), "colour": colour, "article_colour": article(colour),
        "dish": dish, "ingredient": world.INGREDIENTS[dish],
        "noise": noise.capitalize(), "noise_source": world.NOISES[noise],
        "build": build, "a_build": article(build), "material": material, "material2": material2,
        "fear": fear, "fear_truth": world.FEARS[fear],
        "weather": weather, "weather_adj": world.WEATHERS[weather],
        "instrument": rng.choice(world.INSTRUMENTS), "gift": rng.choice(world.GIFTS), "lesson": lesson,
        "lesson_said": lesson.rstrip("."),
    }  # fmt: skip
