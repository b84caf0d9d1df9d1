"""Turns generated and packaged text into token pools: three text streams, and rows of depth tasks per family and difficulty."""
import functools
import lzma
import multiprocessing
import os
import random

import numpy as np

import chat
import stories
import tasks
from tokenizer import ASSISTANT, END, USER, Tokenizer
from world import NAMES, PLACES, THINGS, TOOLS

LEVELS = (2, 3, 4, 5, 6, 8)          # difficulties of the curriculum
ROW = 192                            # tokens of a task row
QUESTIONS = 12                       # supervised questions of a row at most
MARKS = 44                           # supervised ends of single operations of a row at most
FIRST = 128                          # bit in a text weight: a document begins here
DEEPEST = LEVELS[-1]                 # steps of the hardest trained question
HELD_PROSE = 60                      # one prose document in so many is held out
FALLBACK = [("own", "A small model thinks in loops. Every loop reads the same weights again and changes the state a little. "
             "More loops take more time, and some questions need them.")] * 1800


def load_prose(corpus):
    """[(source, text)], or a few own sentences where no corpus was built (smoke runs)."""
    path = os.path.join(corpus, "prose.txt.xz")
    if not os.path.exists(path):
        return FALLBACK
    with lzma.open(path, "rt") as f:
        rows = [line.rstrip("\n").split("\t", 1) for line in f]
    return [(source, text.replace("\\n", "\n").replace("\\\\", "\\")) for source, text in rows]


def split_prose(corpus):
    """(documents to train on, held-out documents)"""
    texts = [text for _, text in load_prose(corpus)]
    return [t for i, t in enumerate(texts) if i % HELD_PROSE], texts[::HELD_PROSE]


def load_definitions(corpus):
    """([(noun, definition)], nouns)"""
    path = os.path.join(corpus, "defs.txt.xz")
    if not os.path.exists(path):
        pairs = [("loop", "a thing that goes round and comes back"), ("story", "a tale that somebody tells")] * 4
    else:
        with lzma.open(path, "rt") as f:
            pairs = [tuple(line.rstrip("\n").split("\t", 1)) for line in f]
    return pairs, [w for w, _ in pairs]


def role_words(tokenizer):
    """({token: its word's token with a leading blank}, {that token: number of its kind}) of the words that play a role in
    stories and of which one story needs several: names, places, things."""
    canonical, kind = {}, {}
    for number, words in enumerate((NAMES, PLACES, THINGS + TOOLS), 1):
        for word in words:
            bare, spaced = tokenizer.encode(word), tokenizer.encode(" " + word)
            if len(spaced) == 1:
                kind[spaced[0]] = number
                for ids in (bare, spaced):
                    if len(ids) == 1:
                        canonical[ids[0]] = spaced[0]
    return canonical, kind


class Builder:
    """Encodes documents; lives once per worker process."""

    def __init__(self, tokenizer_path, corpus):
        self.tokenizer = Tokenizer(tokenizer_path)
        self.encode = functools.lru_cache(maxsize=1 << 18)(lambda s: tuple(self.tokenizer.encode(s)))
        self.defs, self.words = load_definitions(corpus)
        stop, bracket = self.encode(".")[0], self.encode(")")[0]
        self.close = {"walk": stop, "turn": stop, "logic": bracket}      # the token that ends an operation

    def text(self, s):
        """Ids of a text, sentence by sentence, so that repeated sentences are looked up."""
        parts = stories.sentences(s)
        out = list(self.encode(parts[0])) if parts else []
        for part in parts[1:]:
            out += self.encode(" " + part)
        return out

    def exchange(self, ids, weights, question, answer, certain):
        """Appends one turn; the question is not trained on, a certain short answer counts four times."""
        q, a = [USER] + self.text(question) + [ASSISTANT], self.text(answer) + [END]
        ids += q + a
        weights += [0] * len(q) + [4 if certain else 1] * len(a)

    def story_document(self, r):
        """A story told plainly, or read and asked about."""
        ids, weights = [], []
        if r.random() < 0.35:
            ids += self.text(stories.tell(r)[3]) + [END]
            return ids, [1] * len(ids)
        if r.random() < 0.5:
            text, questions, _ = stories.track(r)
        else:
            _, _, _, text, questions = stories.tell(r)
        for i, (question, answer) in enumerate(questions[:r.randint(1, 3)]):
            self.exchange(ids, weights, text + " " + question if i == 0 else question, answer, True)
        # The story inside the first question is text like any other.
        for i in range(1, len(self.text(text)) + 1):
            weights[i - 1] = 1
        return ids, weights

    def chat_document(self, r):
        ids, weights = [], []
        for _ in range(r.choice((1, 1, 1, 2, 3))):
            self.exchange(ids, weights, *chat.turns(r, self.defs, self.words))
        return ids, weights

    def stream(self, kind, seed, tokens):
        r, ids, weights = random.Random(seed), [], []
        make = self.story_document if kind == "story" else self.chat_document
        while len(ids) < tokens:
            i, w = make(r)
            w[0] |= FIRST
            ids += i
            weights += w
        return np.array(ids, np.int16), np.array(weights, np.uint8)

    def question_ids(self, question):
        return list(self.encode(question)) if len(question) < 40 else self.text(question)

    def row(self, family, level, r, questions=QUESTIONS, k=None, names=tasks.CHAIN_NAMES, length=ROW):
        """(ids, asked, marks) of one context with several questions: asked holds (position that is read out, k, answer ids after
        each step), marks holds (last position of an operation, its number, the value after it). The questions about one set of
        facts are left unanswered but for the last: an answer would tell what the next ones are about."""
        facts, asked = tasks.make(family, r, level, questions, k, names)
        ids, supervised, marks = [USER], [], []
        for i, fact in enumerate(facts):
            ids += self.encode(fact if i == 0 else " " + fact)
        for i, (question, steps, n) in enumerate(asked):
            head = [] if i == 0 else [USER]
            body = list(self.encode(" " + question)) if i == 0 and facts else self.text(question)
            answers = [self.encode(s)[0] for s in steps]
            if len(ids) + len(head) + len(body) + 3 > length:
                break
            at = len(ids) + len(head)
            if family in tasks.SERIAL:
                ends = [j for j, t in enumerate(body) if t == self.close[family]]
                ends = ends[:n] if family == "logic" else ends[1:n + 1]
                marks += [(at + e, j + 1, answers[j]) for j, e in enumerate(ends)]
            ids += head + body + [ASSISTANT]
            supervised.append((len(ids) - 1, n, answers))
            if not facts:
                ids += [answers[-1], END]
        if facts and supervised:
            ids += [supervised[-1][2][-1], END]
        return ids, supervised, marks

    def rows(self, family, level, seed, count):
        """Arrays of `count` rows: ids; questions' positions, k (0 = unused), answers after steps 1 … DEEPEST; marks' positions,
        numbers (0 = unused) and values."""
        r = random.Random(seed)
        x = np.zeros((count, ROW), np.int16)
        p, k, y = (np.zeros((count, QUESTIONS) + s, np.int16) for s in ((), (), (DEEPEST,)))
        mp, mj, mv = (np.zeros((count, MARKS), np.int16) for _ in range(3))
        for j in range(count):
            supervised = []
            while not supervised:                        # facts that leave no room for a question are drawn again
                ids, supervised, marks = self.row(family, level, r, length=ROW)
            x[j, :len(ids)] = ids
            for q, (position, n, answers) in enumerate(supervised):
                p[j, q], k[j, q] = position, n
                y[j, q] = answers + answers[-1:] * (DEEPEST - n)
            for q, mark in enumerate(marks[:MARKS]):
                mp[j, q], mj[j, q], mv[j, q] = mark
        return x, p, k, y, mp, mj, mv


BUILDER = None


def start_worker(tokenizer_path, corpus):
    global BUILDER
    BUILDER = Builder(tokenizer_path, corpus)


def work(job):
    kind, key, seed, count = job
    if kind == "stream":
        return job, BUILDER.stream(key, seed, count)
    if kind == "rows":
        return job, BUILDER.rows(*key, seed, count)
    texts = key
    return job[:1] + ("prose", seed, count), (np.array([t for s in texts for t in BUILDER.tokenizer.encode(s) + [END]], np.int16),)


def build(tokenizer_path, corpus, families, scale=1.0, processes=1, seed=0):
    """{"story": (ids, weights), "chat": …, "prose": …, "prose_held": …, "story_held": …, ("rows", family, level): arrays}"""
    kept, held = split_prose(corpus)
    jobs = [("stream", "story", seed + 100 + i, int(1.6e6 * scale)) for i in range(15)]
    jobs += [("stream", "chat", seed + 200 + i, int(1.0e6 * scale)) for i in range(15)]
    for family in families:
        for level in LEVELS:
            n = {2: 1, 3: 2, 4: 2, 5: 2, 6: 3, 8: 8}[level]
            jobs += [("rows", (family, level), seed + 1000 + 97 * level + i, max(24, int(9000 * scale))) for i in range(n)]
    step = max(1, len(kept) // 30)
    limit = len(kept) if scale >= 0.2 else 60
    jobs += [("prose", tuple(kept[i:i + step]), i, 0) for i in range(0, limit, step)]
    with multiprocessing.get_context("fork").Pool(processes, start_worker, (tokenizer_path, corpus)) as pool:
        done = pool.map(work, jobs, chunksize=1)
    pools = {}
    for (kind, key, _, _), arrays in done:
        name = ("rows",) + key if kind == "rows" else key
        pools.setdefault(name, []).append(arrays)
    out = {name: tuple(np.concatenate(parts) for parts in zip(*arrays)) for name, arrays in pools.items()}
    ids = out["prose"][0]
    first = np.concatenate([[True], ids[:-1] == END])
    out["prose"] = (ids, np.where(first, FIRST + 1, 1).astype(np.uint8))
    start_worker(tokenizer_path, corpus)
    out["prose_held"] = (np.array([t for s in held for t in BUILDER.tokenizer.encode(s) + [END]], np.int16),)
    r, ids = random.Random(seed + 99), []
    while len(ids) < 150000 * scale:
        ids += BUILDER.text(stories.tell(r)[3]) + [END]
    out["story_held"] = (np.array(ids, np.int16),)
    return out
