#!/usr/bin/env python3
"""Byte-level BPE: trainer, encoder and the Hugging Face tokenizer.json that holds it. Standard library only.

    python3 tokenizer.py --corpus .data/corpus --out .data/tokenizer.json

Pre-tokens: a word, one digit or one other character, each with at most one leading blank; runs of white space. Words
that answers consist of are forced in as one token, bare and with a leading blank.
"""
import argparse
import collections
import json
import random
import re

SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|spare4|>", "<|spare5|>", "<|spare6|>", "<|spare7|>"]
END, USER, ASSISTANT, SYSTEM = range(4)
VOCABULARY_SIZE = 4096
# The same pattern for Oniguruma/PCRE (in tokenizer.json) and for Python's re (no \p classes there).
PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"
PYTHON_PATTERN = re.compile(r" ?[^\W\d_]+| ?\d| ?(?:[^\s\w]|_)|\s+(?!\S)|\s+")


def byte_alphabet():
    """The usual printable stand-ins for the 256 bytes."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, extra = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


BYTE_TO_CHAR = byte_alphabet()
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


def to_chars(text):
    return "".join(BYTE_TO_CHAR[b] for b in text.encode())


def merge_word(symbols, a, b):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and symbols[i] == a and symbols[i + 1] == b:
            out.append(a + b)
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


def train(counts, forced, size=VOCABULARY_SIZE):
    """Merges, in order, out of pre-token counts. Forced words count as very frequent, so that they end as one token."""
    counts = collections.Counter(counts)
    peak = max(counts.values())
    for word in forced:
        counts[word] += peak
    words = [[list(to_chars(w)), n] for w, n in counts.items()]
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for i, (symbols, n) in enumerate(words):
        for pair in zip(symbols, symbols[1:]):
            pairs[pair] += n
            where[pair].add(i)
    merges = []
    seen = set(BYTE_TO_CHAR.values())
    while len(seen) + len(SPECIALS) < size:
        (a, b), n = max(pairs.items(), key=lambda e: (e[1], e[0]))
        if n <= 0:
            break
        merges.append((a, b))
        seen.add(a + b)
        for i in list(where[(a, b)]):
            symbols, n = words[i]
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] -= n
            symbols = words[i][0] = merge_word(symbols, a, b)
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] += n
                where[pair].add(i)
        pairs.pop((a, b), None)
    return merges


def document(merges):
    """The tokenizer.json of these merges."""
    vocabulary = {s: i for i, s in enumerate(SPECIALS)}
    for c in sorted(BYTE_TO_CHAR.values()):
        vocabulary[c] = len(vocabulary)
    for a, b in merges:
        vocabulary.setdefault(a + b, len(vocabulary))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True} for i, s in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}, level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary,
                  "merges": [[a, b] for a, b in merges]},
    }


class Tokenizer:
    """Encodes and decodes with a tokenizer.json; every pre-token is encoded once and remembered."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as f:
            model = json.load(f)["model"]
        self.vocabulary = model["vocab"]
        self.ranks = {tuple(m): i for i, m in enumerate(model["merges"])}
        self.words = {i: s for s, i in self.vocabulary.items()}
        self.cache = {}

    def encode_word(self, word):
        symbols = list(to_chars(word))
        while len(symbols) > 1:
            best = min(zip(symbols, symbols[1:]), key=lambda p: self.ranks.get(p, 1 << 30))
            if best not in self.ranks:
                break
            symbols = merge_word(symbols, *best)
        return [self.vocabulary[s] for s in symbols]

    def encode(self, text):
        """Ids of plain text; special tokens are not recognised here."""
        out, cache = [], self.cache
        for word in PYTHON_PATTERN.findall(text):
            ids = cache.get(word)
            if ids is None:
                ids = cache[word] = self.encode_word(word)
            out += ids
        return out

    def decode(self, ids):
        data = bytearray()
        for i in ids:
            if i >= len(SPECIALS):
                data += bytes(CHAR_TO_BYTE[c] for c in self.words[i])
        return data.decode("utf-8", "replace")


def sample_text(corpus, r):
    """Generated text and, where there is a corpus, prose: what the merges are learned from."""
    import chat
    import stories
    import tasks
    from data import load_definitions, load_prose
    defs, words = load_definitions(corpus)
    for _ in range(12000):
        yield stories.tell(r)[3]
    for _ in range(6000):
        yield "\n".join(chat.turns(r, defs, words)[:2])
    for family in tasks.FAMILIES:
        for _ in range(600):
            facts, questions = tasks.make(family, r, 6, 3)
            yield " ".join(facts) + " " + " ".join(q for q, _, _ in questions)
    yield from (text for _, text in load_prose(corpus))


def main():
    from world import single_token_words
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default=".data/corpus")
    parser.add_argument("--out", default=".data/tokenizer.json")
    args = parser.parse_args()
    counts = collections.Counter()
    for text in sample_text(args.corpus, random.Random(3)):
        counts.update(PYTHON_PATTERN.findall(text))
    forced = [p + w for w in single_token_words() for p in ("", " ")]
    merges = train({w: n for w, n in counts.items() if n > 1}, forced)
    with open(args.out, "w", encoding="utf-8") as f:
        json.dump(document(merges), f, ensure_ascii=False)
    tokenizer = Tokenizer(args.out)
    split = [w for w in forced if len(tokenizer.encode(w)) != 1]
    print(len(tokenizer.vocabulary), "entries; answer words that are more than one token:", split)
    assert not split and len(tokenizer.vocabulary) == VOCABULARY_SIZE


if __name__ == "__main__":
    main()
