"""The small world that the default model knows: its words and facts, as plain tables. Sentences are made elsewhere."""

BOYS = ("Tom", "Max", "Leo", "Finn", "Otto", "Jack", "Theo", "José")
GIRLS = ("Mia", "Lily", "Anna", "Ruby", "Nora", "Ida", "Rosa", "Zoë")
NAMES = BOYS + GIRLS

ANIMAL_HOMES = {
    "fox": "in a den under the old oak tree",
    "rabbit": "in a burrow at the edge of the meadow",
    "bear": "in a warm cave on the hill",
    "mouse": "in a tiny house behind the mill",
    "owl": "in a hollow tree in the forest",
    "frog": "beside the green pond",
    "duck": "on the bank of the river",
    "hedgehog": "under a pile of leaves in the garden",
    "squirrel": "high up in a tall pine tree",
    "cat": "in a cottage near the village",
    "dog": "on a small farm",
    "pony": "in a stable on the farm",
    "badger": "in a tunnel below the hill",
    "otter": "by the bend of the river",
    "turtle": "on the beach near the lighthouse",
    "goat": "on the side of the mountain",
}
"""The kinds of animals that can be heroes of a story, and where each lives."""

TRAITS = (
    "little", "brave", "kind", "clever", "curious", "shy", "cheerful", "sleepy", "gentle", "quiet", "young", "lucky",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "orange", "purple", "pink", "grey", "golden")
LOSABLES = (
    "hat", "ball", "scarf", "kite", "lantern", "key", "boat", "drum", "bell", "basket", "book", "cup", "button",
    "blanket",
)  # fmt: skip
PLACES = (
    "the garden", "the forest", "the meadow", "the old bridge", "the river", "the village", "the mill", "the beach",
    "the orchard", "the hill", "the pond", "the lighthouse",
)  # fmt: skip
SPOTS = (
    "under a bush", "behind a stone", "in the tall grass", "between the roots of a tree", "under the bridge",
    "behind the gate", "in an empty nest", "on a low branch", "next to the well", "inside a hollow log",
)  # fmt: skip
DISHES = (
    "apple pie", "carrot soup", "honey cake", "blueberry jam", "mushroom stew", "warm bread", "pumpkin soup",
    "cherry tart", "nut cookies", "pancakes",
)  # fmt: skip
INGREDIENTS = {
    "apple pie": "apples",
    "carrot soup": "carrots",
    "honey cake": "honey",
    "blueberry jam": "blueberries",
    "mushroom stew": "mushrooms",
    "warm bread": "flour",
    "pumpkin soup": "a pumpkin",
    "cherry tart": "cherries",
    "nut cookies": "nuts",
    "pancakes": "eggs",
}
INSTRUMENTS = ("flute", "drum", "fiddle", "trumpet", "harp", "whistle")
WEATHERS = {"rain": "rainy", "snow": "snowy", "wind": "windy", "fog": "foggy"}
BUILDS = ("raft", "tree house", "bridge", "swing", "sledge", "bench", "snow house", "little boat")
MATERIALS = ("wood", "rope", "straw", "branches", "old boards", "stones")
GIFTS = (
    "a jar of honey", "a warm scarf", "a wooden whistle", "a bunch of flowers", "a shiny stone", "a small lantern",
    "a basket of berries", "a painted cup",
)  # fmt: skip
NOISES = {
    "tap, tap, tap": "a woodpecker looking for breakfast",
    "whoosh": "the wind in the chimney",
    "drip, drip, drip": "water falling into an old bucket",
    "squeak, squeak": "a gate that moved in the wind",
    "crunch, crunch": "a goat that was eating dry leaves",
    "hoo, hoo": "an owl saying good night",
}
FEARS = {
    "the dark": "The dark was full of stars",
    "deep water": "The water was cool and soft",
    "high places": "From up there the whole valley looked like a toy",
    "thunder": "The thunder was only a loud drum in the sky",
    "the big forest": "The forest smelled of moss and sang with birds",
}
LESSONS = (
    "A good friend is worth more than gold.",
    "Small paws can do great things.",
    "Sharing makes everything better.",
    "It is brave to ask for help.",
    "Patience brings the best rewards.",
    "Kind words open every door.",
)

THING_COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "the sun": "yellow", "a banana": "yellow",
    "a strawberry": "red", "a carrot": "orange", "coal": "black", "chocolate": "brown", "a frog": "green",
    "a lemon": "yellow", "milk": "white", "a tomato": "red", "the sea": "blue", "a leaf": "green", "the night": "black",
    "a flamingo": "pink", "an elephant": "grey", "a plum": "purple", "a crow": "black", "a swan": "white",
    "a pumpkin": "orange",
}  # fmt: skip
SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "horse": "neigh",
    "owl": "hoo", "frog": "ribbit", "mouse": "squeak", "lion": "roar", "bee": "buzz", "snake": "hiss",
    "rooster": "cock-a-doodle-doo", "wolf": "howl", "crow": "caw",
}  # fmt: skip
BABIES = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "duck": "duckling", "sheep": "lamb", "pig": "piglet",
    "horse": "foal", "bear": "cub", "fox": "kit", "goat": "kid", "frog": "tadpole", "swan": "cygnet", "hen": "chick",
    "deer": "fawn", "owl": "owlet", "lion": "cub",
}  # fmt: skip
LEGS = {
    "cat": 4, "dog": 4, "cow": 4, "horse": 4, "duck": 2, "hen": 2, "owl": 2, "spider": 8, "bee": 6, "ant": 6,
    "snake": 0, "fish": 0, "frog": 4, "sheep": 4, "beetle": 6, "crow": 2, "bear": 4, "mouse": 4,
}  # fmt: skip
FOODS = {
    "rabbit": "carrots", "mouse": "cheese", "bear": "honey", "cow": "grass", "squirrel": "nuts", "cat": "fish",
    "dog": "bones", "bee": "nectar", "horse": "hay", "duck": "bread", "owl": "mice", "monkey": "bananas",
    "frog": "flies", "panda": "bamboo", "hen": "seeds",
}  # fmt: skip
DWELLINGS = {
    "bird": "nest", "bee": "hive", "rabbit": "burrow", "fox": "den", "horse": "stable", "dog": "kennel",
    "spider": "web", "bear": "cave", "cow": "barn", "ant": "anthill", "fish": "pond", "pig": "sty",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "happy": "sad", "old": "new",
    "light": "dark", "wet": "dry", "open": "closed", "full": "empty", "hard": "soft", "left": "right", "high": "low",
    "early": "late", "loud": "quiet", "near": "far", "long": "short", "clean": "dirty", "rich": "poor",
    "strong": "weak", "first": "last", "inside": "outside", "always": "never", "black": "white", "true": "false",
}  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Denmark": "Copenhagen",
    "Finland": "Helsinki", "Poland": "Warsaw", "Austria": "Vienna", "Switzerland": "Bern", "Greece": "Athens",
    "Hungary": "Budapest", "Iceland": "Reykjavík", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasília",
    "Peru": "Lima", "Chile": "Santiago", "Colombia": "Bogotá", "Australia": "Canberra", "Turkey": "Ankara",
}  # fmt: skip
EMOJI = {
    "cat": "🐱", "dog": "🐶", "fox": "🦊", "bear": "🐻", "frog": "🐸", "mouse": "🐭", "rabbit": "🐰", "owl": "🦉",
    "duck": "🦆", "cow": "🐮", "pig": "🐷", "bee": "🐝", "star": "⭐", "sun": "☀️", "moon": "🌙", "apple": "🍎",
    "heart": "❤️", "tree": "🌳", "fish": "🐟", "turtle": "🐢",
}  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
SPELLABLE = (
    "cat", "dog", "sun", "moon", "star", "tree", "fish", "bird", "bear", "frog", "milk", "book", "ball", "rain", "snow",
    "apple", "house", "water", "green", "happy",
)  # fmt: skip
PETS = ("cat", "dog", "rabbit", "hamster", "parrot", "goldfish", "turtle", "pony", "mouse", "canary")
CITIES = ("Paris", "Berlin", "Rome", "Madrid", "Lisbon", "London", "Oslo", "Vienna", "Tokyo", "Cairo", "Lima", "Ottawa")
GOODS = ("apples", "carrots", "eggs", "pencils", "candles", "buttons", "cookies", "lemons", "roses", "books")
SKIES = ("sunny", "cloudy", "rainy", "snowy", "windy", "foggy")
JOBS = ("baker", "teacher", "farmer", "doctor", "painter", "sailor", "gardener", "pilot", "cook", "singer")
UNKNOWN_TOPICS = (
    "quantum physics", "the stock market", "machine learning", "the Roman Empire", "black holes", "politics",
    "football results", "the meaning of life", "Python code", "a poem in Latin", "the president", "car engines",
    "tax law", "the internet", "DNA", "the speed of light", "Shakespeare", "rocket science", "chess openings",
    "computer networks", "the price of gold", "chemistry", "philosophy", "the French Revolution", "dinosaurs",
    "electric guitars", "the human brain", "bitcoin", "volcanoes", "medicine", "algebra", "world history",
)  # fmt: skip
