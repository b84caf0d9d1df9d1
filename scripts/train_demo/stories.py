"""Story teller, question maker and story checker over the plots of plots.py; plus stories that track who has what where.

The teller and the checker read the same templates: whatever the teller can say, the checker can parse, and a parsed
sentence binds roles (the hero, the place, the lost thing). A sentence that binds a role differently from an earlier one
contradicts the story.
"""
import re

from plots import PLOTS
from world import NAMES, PLACES, PRONOUNS, THINGS, VOCABULARY, is_female, plural, pronoun, with_article

SLOT = re.compile(r"\{(a:)?(\w+)(?:\.(\w+))?\}")
CHOICE = re.compile(r"\[([^\]]*\|[^\]]*)\]")
ARTICLE = re.compile(r"\b[Aa] \{(\w+)\}")


def sentences(text):
    """Splits at sentence ends that are followed by a capital, a quotation mark or a slot."""
    out, start = [], 0
    for m in re.finditer(r'[.!?]"? (?=[A-Z"{])', text):
        out.append(text[start:m.end() - 1])
        start = m.end()
    out.append(text[start:])
    return [s for s in out if s]


def normalise(template):
    return ARTICLE.sub(lambda m: "{a:" + m.group(1) + "}", template)


def capitalise(text):
    """Upper-cases the first letter of each sentence (a template may begin with an article)."""
    return " ".join(s[0].upper() + s[1:] for s in sentences(text))


def fill(template, roles, r):
    template = CHOICE.sub(lambda m: r.choice(m.group(1).split("|")), normalise(template))

    def word(m):
        value = roles[m.group(2)]
        if m.group(3) == "s":
            return plural(value)
        if m.group(3):
            return pronoun(value, m.group(3))
        return with_article(value) if m.group(1) else value
    return SLOT.sub(word, template)


def cast(plot, r):
    """Draws a word for every role; words of one kind are different from each other."""
    roles, used = {}, set()
    for role, kind in plot["roles"].items():
        while True:
            word = r.choice(VOCABULARY[kind])
            if word not in used:
                break
        used.add(word)
        roles[role] = word
    return roles


def tell(r, name=None, roles=None):
    """One story: (plot name, roles, topic, text, [(question, answer)])."""
    name = name or r.choice(list(PLOTS))
    plot = PLOTS[name]
    roles = roles or cast(plot, r)
    parts = []
    for beat in plot["beats"]:
        if beat[0] == "?":
            if r.random() < 0.4:
                continue
            beat = beat[1:]
        parts.append(capitalise(fill(r.choice(beat), roles, r)))
    questions = [(fill(q, roles, r), fill(a, roles, r)) for q, a in plot["ask"]]
    r.shuffle(questions)
    return name, roles, fill(plot["topic"], roles, r), " ".join(parts), questions


def tell_about(r, kind, word):
    """A story in which `word` (a name, thing, animal …) plays a role of its kind, preferably the first one."""
    fitting = [n for n, p in PLOTS.items() if kind in p["roles"].values()]
    name = r.choice(fitting)
    roles = cast(PLOTS[name], r)
    role = [k for k, v in PLOTS[name]["roles"].items() if v == kind][0]
    for other, value in roles.items():
        if value == word:
            roles[other] = roles[role]
    roles[role] = word
    return tell(r, name, roles)


# ---- tracking: a world of three people, two things and five places ----

def track(r, moves=None):
    """(text, [(question, answer)], number of moves)."""
    people, places, things = r.sample(NAMES, 3), r.sample(PLACES, 5), r.sample(THINGS, 2)
    at = dict(zip(people, places))
    holder, left = {}, {}
    out = [f"{n} is in the {at[n]}." for n in people]
    for x in things:
        holder[x] = r.choice(people)
        out.append(f"{holder[x]} {r.choice(['has', 'picks up'])} the {x}.")
    moves = moves or r.randint(3, 9)
    for _ in range(moves):
        n = r.choice(people)
        mine = [x for x in things if holder.get(x) == n]
        here = [x for x in things if left.get(x) == at[n]]
        act = r.randrange(3)
        if act == 1 and mine:
            x, k = r.choice(mine), r.choice([p for p in people if p != n])
            if at[k] != at[n]:
                at[k] = at[n]
                out.append(f"{k} comes to the {at[n]}.")
            holder[x] = k
            out.append(f"{n} gives {pronoun(k, 'him')} the {x}." if out[-1].startswith(k + " comes") else f"{n} gives the {x} to {k}.")
        elif act == 2 and mine:
            x = r.choice(mine)
            del holder[x]
            left[x] = at[n]
            out.append(f"{n} {r.choice(['leaves', 'puts'])} the {x} there.")
        elif act == 2 and here:
            x = r.choice(here)
            del left[x]
            holder[x] = n
            out.append(f"{n} picks up the {x}.")
        else:
            at[n] = r.choice([p for p in places if p != at[n]])
            out.append(f"{n} {r.choice(['goes', 'walks', 'runs'])} to the {at[n]}.")
    questions = [(f"Where is the {x} now?", at[holder[x]] if x in holder else left[x]) for x in things]
    questions += [(f"Who has the {x} now?", holder[x]) for x in things if x in holder]
    questions.append((f"Where is {people[0]} now?", at[people[0]]))
    r.shuffle(questions)
    return " ".join(out), questions, moves


# ---- the checker ----

def sentence_pattern(sentence):
    """Regular expression of one template sentence; groups are named role__form__number."""
    out, at, number = [], 0, 0
    for m in re.finditer(SLOT.pattern + "|" + CHOICE.pattern, sentence):
        out.append(re.escape(sentence[at:m.start()]))
        at = m.end()
        number += 1
        if m.group(4):
            out.append("(?:" + "|".join(map(re.escape, m.group(4).split("|"))) + ")")
            continue
        kind = sentence_pattern.roles[m.group(2)]
        form = m.group(3) or "word"
        if form in PRONOUNS:
            words = PRONOUNS[form]
        elif form == "s":
            words = [plural(w) for w in VOCABULARY[kind]]
        else:
            words = VOCABULARY[kind]
        out.append(("[Aa]n? " if m.group(1) else "") + f"(?P<{m.group(2)}__{form}__{number}>" + "|".join(map(re.escape, words)) + ")")
    out.append(re.escape(sentence[at:]))
    return re.compile("".join(out))


def build_grammar():
    grammar = {}
    for name, plot in PLOTS.items():
        sentence_pattern.roles = plot["roles"]
        patterns = {}
        for beat in plot["beats"]:
            for template in beat:
                if template != "?":
                    for s in sentences(normalise(template)):
                        patterns[s] = sentence_pattern(s)
        grammar[name] = list(patterns.values())
    return grammar


def bindings(match):
    """{role: word} and {role: gender} of one parsed sentence; None if it contradicts itself."""
    words = {}
    for group, value in match.groupdict().items():
        role, form, _ = group.split("__")
        if form in PRONOUNS:
            pair = PRONOUNS[form]
            key, value = role + " gender", value == pair[0] if pair[0] != pair[1] else None
        else:
            key = role
            if form == "s":
                value = next(w for k in VOCABULARY.values() for w in k if plural(w) == value)
        if value is not None and words.setdefault(key, value) != value:
            return None
    return words


def agrees(state, new):
    """Does a sentence fit what is known? Different roles (two people, two places) are never the same word."""
    merged = {k: v for k, v in {**state, **new}.items() if not k.endswith(" gender")}
    if len(set(merged.values())) < len(merged):
        return False
    for key, value in new.items():
        if key in state and state[key] != value:
            return False
        if key.endswith(" gender"):
            person = state.get(key[:-7], new.get(key[:-7]))
            if person in NAMES and is_female(person) != value:
                return False
        elif key + " gender" in state and value in NAMES and is_female(value) != state[key + " gender"]:
            return False
    return True


GRAMMAR = None


def check(text):
    """{sentences, parsed, off_plot, contradictions, plot, bad: [sentence]} of one told story."""
    global GRAMMAR
    GRAMMAR = GRAMMAR or build_grammar()
    split = sentences(" ".join(text.split()))
    hits = {name: [[m for m in (p.fullmatch(s) for p in patterns) if m] for s in split] for name, patterns in GRAMMAR.items()}
    best = max(hits, key=lambda n: sum(bool(h) for h in hits[n]))
    state, out = {}, {"sentences": len(split), "parsed": 0, "off_plot": 0, "contradictions": 0, "plot": best, "bad": []}
    for i, sentence in enumerate(split):
        if hits[best][i]:
            out["parsed"] += 1
            options = [b for b in map(bindings, hits[best][i]) if b is not None and agrees(state, b)]
            if options:
                state.update(options[0])
            else:
                out["contradictions"] += 1
                out["bad"].append(sentence)
        elif any(h[i] for h in hits.values()):
            out["parsed"] += 1
            out["off_plot"] += 1
            out["bad"].append(sentence)
        else:
            out["bad"].append(sentence)
    return out
