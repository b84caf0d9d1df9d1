"""Depth tasks: puzzles whose answer takes k serial steps, with the intermediate answer after each step.

Each maker returns (facts, [(question, [answer after step 1, …, step k], k)]). `facts` is shared by the questions of one
context and empty for the self-contained families (walk, turn, logic). The staircase rule trains "after loop t the answer
is the one after min(t, k) steps"; the intermediate answers are what a model with too few loops is taught to say.
"""
from world import BOXES, CHAIN_NAMES, DIGITS, DIRECTIONS, LETTERS, PLACES, THINGS

SERIAL = ("walk", "turn", "logic")
CHAINS = ("hand", "variables", "nest")
FAMILIES = SERIAL + CHAINS
MAX_STEPS = 16


def walk(r, k):
    """Start with 4. Add 3. Double it. Take away 5. Keep the last digit."""
    value = r.randrange(10)
    text, steps = f"Start with {value}.", []
    for _ in range(k):
        kind, d = r.randrange(5), r.randint(1, 9)
        if kind < 2:
            value, text = (value + d) % 10, text + f" Add {d}."
        elif kind < 4:
            value, text = (value - d) % 10, text + f" Take away {d}."
        else:
            value, text = value * 2 % 10, text + " Double it."
        steps.append(str(value))
    return text + " Keep the last digit.", steps


def turn(r, k):
    """You face north. Turn right. Turn around. Where do you look?"""
    at = r.randrange(4)
    text, steps = f"You face {DIRECTIONS[at]}.", []
    for _ in range(k):
        word, by = r.choice((("right", 1), ("left", 3), ("right", 1), ("left", 3), ("around", 2)))
        at = (at + by) % 4
        text += f" Turn {word}."
        steps.append(DIRECTIONS[at])
    return text + " Where do you look?", steps


def logic(r, k):
    """Is ((true and not false) xor true) true or false? Nested to the left; one operator a step."""
    value = r.random() < 0.5
    text, steps = ("true" if value else "false"), []
    for _ in range(k):
        op, operand, negated = r.choice(("and", "or", "xor", "xor")), r.random() < 0.5, r.random() < 0.3
        right = operand != negated
        value = (value and right) if op == "and" else (value or right) if op == "or" else value != right
        text = f"({text} {op} {'not ' if negated else ''}{'true' if operand else 'false'})"
        steps.append("true" if value else "false")
    return f"Is {text} true or false?", steps


def hand(r, k_max, questions, k=None, names=CHAIN_NAMES):
    """A cycle of hand-overs longer than twice the number of steps, told in random order."""
    n = min(2 * k_max + 1 + r.randint(0, 1), len(names))
    ring = r.sample(names, n)
    facts = [f"{ring[i]} gives every letter to {ring[(i + 1) % n]}." for i in range(n)]
    r.shuffle(facts)
    asked = [(i, steps) for i in range(n) for steps in ([k] if k else range(1, k_max + 1))]
    out = []
    for i, steps in r.sample(asked, min(questions, len(asked))):
        times = "1 time" if steps == 1 else f"{steps} times"
        out.append((f"A letter starts with {ring[i]} and is handed on {times}. Who has it?",
                    [ring[(i + j) % n] for j in range(1, steps + 1)], steps))
    return facts, out


def linked(r, starts, middles, ends, phrase, question, k_max, questions, k=None):
    """Chains start -> middle … -> end, one for each of `starts` and `ends`, facts shuffled. With k all have k links and a
    question begins at a start; else they differ in length and each link is where one question may begin."""
    middles = r.sample(middles, len(middles))
    chains = []
    for i, (first, last) in enumerate(zip(starts, ends)):
        length = k or (k_max if i == 0 else r.randint(1, k_max))
        body = [middles.pop() for _ in range(length - 1)]
        chains.append([first or middles.pop()] + body + [last])
    facts = [phrase.format(a, b) for c in chains for a, b in zip(c, c[1:])]
    r.shuffle(facts)
    asked = [(c, i) for c in chains for i in range(1 if k else len(c) - 1)]
    out = [(question.format(c[i]), c[i + 1:], len(c) - 1 - i) for c, i in r.sample(asked, min(questions, len(asked)))]
    return facts, out


def chain_count(r, k, k_max, most, links):
    """Chains of a context: two where the difficulty is exact, else so many that all of them have at most `links` links."""
    return 2 if k else r.randint(2, max(2, min(most, links // k_max)))


def variables(r, k_max, questions, k=None):
    """a is 7. c is b. b is a. What is c?"""
    k_max = min(k_max, 8)
    n = chain_count(r, k, k_max, 6, len(LETTERS))
    return linked(r, [None] * n, LETTERS, r.sample(DIGITS, n), "{} is {}.", "What is {}?", k_max, questions, k)


def nest(r, k_max, questions, k=None):
    """The key is in the box. The box is in the bag. The bag is in the kitchen. Where is the key?"""
    k_max = min(k_max, 6)
    n = chain_count(r, k, k_max, 6, 18)
    return linked(r, r.sample(THINGS, n), BOXES, r.sample(PLACES, n), "The {} is in the {}.", "Where is the {}?", k_max,
                  questions, k)


def make(family, r, k_max, questions, k=None, names=CHAIN_NAMES):
    """(facts, [(question, steps, k)]); difficulty up to k_max, or exactly k where given."""
    if family in SERIAL:
        maker, out = {"walk": walk, "turn": turn, "logic": logic}[family], []
        for _ in range(questions):
            # The deeper half is asked twice as often: it is what there is to learn.
            steps = k or (r.randint(1, k_max) if r.random() < 0.5 else r.randint((k_max + 1) // 2, k_max))
            text, answers = maker(r, steps)
            out.append((text, answers, steps))
        return [], out
    if family == "hand":
        return hand(r, k_max, questions, k, names)
    return {"variables": variables, "nest": nest}[family](r, k_max, questions, k)


def addition(r, digits=None):
    """(question, answer, digits); half of the problems have many carries."""
    n = digits or r.randint(1, 4)
    x = [r.randrange(10) for _ in range(n)]
    y = [9 - d if r.random() < 0.5 else r.randrange(10) for d in x] if r.random() < 0.5 else [r.randrange(10) for _ in x]
    if n > 1:
        x[0], y[0] = max(1, x[0]), max(1, y[0])
    a, b = int("".join(map(str, x))), int("".join(map(str, y)))
    form = r.choice(("{} + {} =", "What is {} + {}?", "How much is {} + {}?", "{} plus {}"))
    return form.format(a, b), str(a + b), n
