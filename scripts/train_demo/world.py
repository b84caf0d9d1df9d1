"""The micro-world's vocabulary and small grammar helpers. Everything else draws its words from here."""

FEMALE = ("Ann Sue Mia Eva Lily Rose Emma Anna Ella Nora Ruth Jane Kate Lucy Mary Sara Zoe Amy Ida Ivy Joy May Tess Nell "
          "Vera Dora Cora Lena Lisa Nina Rita Alma").split()
MALE = ("Leo Sam Tom Ben Max Tim Jack John Paul Mark Luke Adam Noah Hugo Otto Carl Finn Dan Ned Ray Roy Ted Joe Jim Bob "
        "Kit Ian Alan Eric Fred Glen Hank").split()
NAMES = FEMALE + MALE
HELD_NAMES = FEMALE[-8:] + MALE[-8:]      # never seen in the chain tasks: for the held-out-names row of the evaluation
CHAIN_NAMES = [n for n in NAMES if n not in HELD_NAMES]

THINGS = ("ball key book doll hat kite cup coin map pen ring shoe bell drum lamp rope toy boat card flute spoon brush "
          "letter stone shell ribbon whistle basket puzzle mitten scarf button feather clock mirror bottle blanket bucket "
          "pencil hammer candle umbrella wheel").split()
PLACES = ("kitchen garden park school market barn forest library attic cellar bakery station meadow garage tower yard cave "
          "village castle harbor mill stable orchard museum").split()
BOXES = "box bag drawer chest sack crate jar tin trunk cabinet case barrel pouch locker shed van tent truck wagon".split()
FOODS = "apple pear cake cookie bun plum carrot banana muffin pie tart pancake".split()
ANIMALS = ("cat dog bird rabbit duck fox frog mouse pony goat lamb hen turtle squirrel hedgehog kitten puppy owl bear "
           "donkey").split()
ADJECTIVES = "red blue green yellow white black brown pink old new small big shiny little round pretty".split()
TOOLS = "rope ladder basket net blanket stick shovel".split()
SKILLS = ["ride a bike", "swim", "bake bread", "paint", "climb a tree", "sing", "fly a kite", "read", "whistle", "skate",
          "tie a knot", "row a boat", "play the flute", "juggle"]
SEASONS = "spring summer autumn winter".split()
SEEDS = "bean flower pumpkin tomato sunflower pea rose".split()
SOUNDS = ["a small sound", "a strange noise", "a soft cry", "a loud bang", "a funny squeak"]
FEELINGS = "happy sad angry tired scared proud lonely excited hungry sleepy".split()
DIRECTIONS = "north east south west".split()
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
DIGITS = list("0123456789")
DAYS = ["One day", "One morning", "On a sunny day", "One afternoon", "Early one morning", "Last week", "On a cold day",
        "After lunch", "One evening", "On a windy day", "After school", "On a quiet Sunday", "One bright day"]

VOCABULARY = {"person": NAMES, "thing": THINGS, "place": PLACES, "food": FOODS, "animal": ANIMALS, "adj": ADJECTIVES,
              "tool": TOOLS, "skill": SKILLS, "season": SEASONS, "seed": SEEDS, "sound": SOUNDS, "day": DAYS}

PRONOUNS = {"he": ("she", "he"), "him": ("her", "him"), "his": ("her", "his"), "He": ("She", "He"), "His": ("Her", "His"),
            "himself": ("herself", "himself"), "boy": ("girl", "boy")}


def is_female(name):
    return name in FEMALE


def pronoun(name, form):
    return PRONOUNS[form][0 if is_female(name) else 1]


def with_article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def plural(word):
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "sh", "ch", "x")) else "s")


def single_token_words():
    """Words that answers consist of: the tokenizer must hold each as one token, bare and with a leading blank."""
    words = NAMES + THINGS + PLACES + BOXES + ANIMALS + FOODS + DIRECTIONS + ["true", "false", "yes", "no"]
    return sorted(set(words)) + LETTERS
