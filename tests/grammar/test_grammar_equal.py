#!/usr/bin/env python3
"""Grammars against independent judges: the `jsonschema` validator, Python's `re` and Python's `json`.

  build/venv/bin/python tests/grammar/test_grammar_equal.py --bin build/.../grammar_driver [--seed N] [--schemas N] [--walks N]

  schemas   texts written by random allowed tokens validate; instances made without the engine are accepted byte by byte; what
            is accepted after a small change validates still; masks equal a test of every single token
  soups     of keywords thrown together: each is refused, or what is written validates
  regexes   random expressions agree with re.fullmatch on random strings, and so does the same language written as GBNF
  objects   the grammar of any JSON object agrees with json.loads
  models    what pydantic says of models as schemas is read back by it
  refusals  unsupported schemas are refused with their pointer
  costs     compiling and each token stay short, whatever the source

Prints `N passed, N failed` and exits 1 on a failure.
"""
import argparse
import json
import random
import re
import sys

import make_schemas
from driver import Driver, large_vocab, small_vocab
from models import MODELS
from score import Score, judge, valid

def change(r, text):
    i = r.randrange(len(text))
    return r.choice([text[:i] + text[i + 1:], text[:i] + r.choice(["\"", ",", "}", "0", "-", "a", " ", "[", "]", ":"]) + text[i:],
                     text[:i] + text[i + 1:i + 2] + text[i:i + 1] + text[i + 2:]])


def one_schema(score, d, r, seed, walks, exact):
    s = make_schemas.document(r)
    answer = d.compile("schema", json.dumps(s))
    if not score.check(answer == "ok", "a supported schema compiles", s, answer):
        return
    validator = judge(s)
    for k in range(walks):
        text, ended = d.walk(seed * 100 + k, -40 if exact and k == 0 else r.choice([5, 40, 200]))
        if not ended:
            score.cut += 1
            continue
        why = valid(validator, text)
        score.check(why is None, "what was written validates", s, text, why)
    for _ in range(3):
        try:
            text = make_schemas.written(r, make_schemas.instance(r, s, s))
        except (make_schemas.TooDeep, RecursionError):
            continue
        if valid(validator, text) is not None:
            continue  # the generator's own mistake, such as a property of an allOf that stands twice
        answer = d.accept(text)
        score.check(answer == "yes", "an instance is accepted", s, text, answer)
        for _ in range(4):
            other = change(r, text)
            if d.accept(other) == "yes":
                why = valid(validator, other)
                score.check(why is None, "what is accepted validates", s, other, why)


def one_soup(score, d, r, seed):
    """Whatever is not refused is kept."""
    s = make_schemas.soup(r)
    if d.compile("schema", json.dumps(s)) != "ok":
        return 0
    validator = judge(s)
    for k in range(4):
        text, ended = d.walk(seed * 100 + k, (5, 40)[k % 2])
        if ended:
            why = valid(validator, text)
            score.check(why is None, "what was written validates", s, text, why)
    return 1


# ---- regular expressions ------------------------------------------------------------------------------------------------


def expression(r, depth=0):
    """The same random language as a regular expression and as GBNF."""
    kind = r.randrange(9 if depth < 3 else 4)
    if kind < 2:
        c = r.choice("abc")
        return c, f'"{c}"'
    if kind == 2:
        return r.choice([("[ab]", "[ab]"), ("[^a]", "[^a]"), ("[a-c]", "[a-c]"), ("\\d", "[0-9]"), ("[b-é]", "[b-é]"), ("é", '"é"')])
    if kind == 3:
        return "", '""'
    if kind < 6:
        parts = [expression(r, depth + 1) for _ in range(r.randint(1, 3))]
        return "".join(p for p, _ in parts), "(" + " ".join(g for _, g in parts) + ")"
    if kind == 6:
        parts = [expression(r, depth + 1) for _ in range(r.randint(2, 3))]
        return "(?:" + "|".join(p for p, _ in parts) + ")", "(" + " | ".join(g for _, g in parts) + ")"
    p, g = expression(r, depth + 1)
    times = r.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"])
    return f"(?:{p}){times}", f"({g}){times}"


def text_for(r):
    return "".join(r.choice("abcd1é") for _ in range(r.randrange(8)))


def one_regex(score, d, r):
    pattern, gbnf = expression(r)
    texts = [text_for(r) for _ in range(12)]
    want = [re.fullmatch(pattern, t) is not None for t in texts]
    for kind, source in (("regex", pattern), ("gbnf", "root ::= " + gbnf)):
        answer = d.compile(kind, source)
        if not score.check(answer == "ok", "an expression compiles", source, answer):
            continue
        for t, w in zip(texts, want):
            score.check((d.accept(t) == "yes") == w, "an expression agrees with re", source, t, w)
        text, ended = d.walk(r.randrange(1 << 30), 10)
        if ended:
            score.check(re.fullmatch(pattern, text.decode(), re.S) is not None, "what an expression writes matches", source, text)


# ---- JSON, refusals -------------------------------------------------------------------------------------------------------


def objects(score, d, r, n):
    score.check(d.compile("object", "") == "ok", "any object compiles")
    for i in range(n):
        value = {name: make_schemas._value(r, 0) for name in r.sample(make_schemas.NAMES, 3)}
        text = make_schemas.written(r, value)
        score.check(d.accept(text) == "yes", "an object is accepted", text)
        other = change(r, text)
        if d.accept(other) == "yes":
            score.check(valid(judge({"type": "object"}), other) is None, "what is accepted is JSON", other)
        written, ended = d.walk(i, 60)
        if ended:
            score.check(valid(judge({"type": "object"}), written) is None, "what was written is an object", written)


REFUSED = [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a/not"),
    ({"type": "array", "items": {"type": "number", "multipleOf": 0.1}}, "#/items/multipleOf"),
    ({"type": "string", "format": "duration"}, "#/format"), ({"type": "string", "pattern": "a(?=b)"}, "#/pattern"),
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems"), ({"$ref": "http://example.com/x"}, "#/$ref"), ({"$ref": "#/$defs/x"}, "#/$ref"),
    ({"type": "object", "patternProperties": {"a": {}}}, "#/patternProperties"), ({"if": {}, "then": {}}, "#/if"),
    ({"allOf": [{"type": "string"}, {"minLength": 3}]}, "#/allOf/0/type"), ({"type": "string", "minLength": 3, "maxLength": 2}, "#/maxLength"),
    ({"$defs": {"n/m": {"type": "array", "items": {"type": "set"}}}, "$ref": "#/$defs/n~1m"}, "#/$defs/n~1m/items/type"),
    ({"type": "string", "maxLength": 10 ** 9}, "#/maxLength"), ({"type": "integer", "minimum": 5, "maximum": 4}, "#/maximum"),
    ({"enum": [1, 2], "type": "string"}, "#/enum"), ({"anyOf": []}, "#/anyOf"), ({"const": 1, "minimum": 3}, "#/minimum"), ({"frobnicate": 1}, "#/frobnicate"),
    (False, "#"), ([], "#"), ({"type": "string", "pattern": "^a+b+$", "maxLength": 4}, "#/pattern"),
]


def refusals(score, d):
    for s, pointer in REFUSED:
        answer = d.compile("schema", json.dumps(s))
        score.check(answer.startswith("error unsupported") and f"at {pointer}:" in answer, "a schema is refused with its pointer", s, answer)
    for s in ({"$ref": "#"}, {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}):
        score.check(d.compile("schema", json.dumps(s)).startswith("error unsupported"), "a schema that is itself is refused", s)


def models(score, d, n):
    for model in MODELS:
        answer = d.compile("schema", json.dumps(model.model_json_schema()))
        score.check(answer == "ok", "a model compiles", model, answer)
        for seed in range(n):
            text, ended = d.walk(seed, 40)
            try:
                score.check(not ended or model.model_validate_json(text), "a model is read back", model)
            except ValueError as e:
                score.check(False, "a model is read back", model, text, str(e))


# What is made to be dear: compiles or is refused, writes or gives up, and never takes long over it.
def hostile():
    far = 70000
    yield "schema", json.dumps({"enum": ["value %d of many" % i for i in range(30000)]})
    yield "schema", json.dumps({"type": "string", "maxLength": 16000})
    yield "schema", json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 49000})
    yield "schema", json.dumps({"properties": {"name%d" % i: {"type": "string", "maxLength": 50} for i in range(800)}, "additionalProperties": True})
    yield "schema", json.dumps({"properties": {"name%d" % i: {"format": "date-time"} for i in range(1400)}})
    yield "schema", json.dumps({"$defs": {**{"d%d" % i: {"allOf": [{"$ref": "#/$defs/d%d" % (i + 1)}] * 2} for i in range(28)}, "d28": {"properties": {}}},
                                "$ref": "#/$defs/d0", "required": []})
    yield "schema", json.dumps({"$defs": {"a": {"$ref": "#/$defs/b", "properties": {k: {"$ref": "#/$defs/a", "maxProperties": 9} for k in "xyz"}},
                                          "b": {"required": []}}, "$ref": "#/$defs/a", "maxProperties": 9})
    yield "schema", json.dumps({"pattern": "a.{900}b"})
    yield "schema", json.dumps({"pattern": "^(" + "|".join("abc%d" % i for i in range(20000)) + ")$"})
    yield "regex", "(a?){60000}"
    yield "regex", "((a{1,200}){1,200}){1,3}"
    yield "regex", "|".join("word%d" % i for i in range(40000))
    yield "regex", "".join("[^%s]" % chr(0x1000 + 2 * i) for i in range(9000))
    yield "regex", "." * 12000
    yield "gbnf", "root ::= r0\n" + "\n".join('r%d ::= r%d | "a%d"' % (i, i + 1, i) for i in range(15000)) + '\nr15000 ::= "z"'
    yield "gbnf", "root ::= " + " ".join("r%d" % i for i in range(15000)) + "\n" + "\n".join('r%d ::= "a"?' % i for i in range(15000))
    yield "gbnf", "root ::= " + " ".join('("a" | "b")?' for _ in range(20000))
    yield "gbnf", "root ::= " + " | ".join('"word %d"' % i for i in range(40000))
    yield "gbnf", "root ::= " + " | ".join("[a-z%d] x" % (i % 10) for i in range(30000)) + '\nx ::= "q"'
    yield "gbnf", "root ::= ([a]{0,1500} [b]?){50}"
    yield "gbnf", 'root ::= "a" root | "a" root root | "a"'
    yield "gbnf", "root ::= [abc]{0,%d}" % far


def costs(score, d, limit_ms=250):
    """The limit is ten times what is seen: for busy machines and slow ones."""
    for kind, source in hostile():
        d.worst_ms()
        answer = d.compile(kind, source)
        compiling = d.worst_ms()
        score.check(compiling < limit_ms, "compiling is bounded", kind, source[:200], answer, compiling)
        if answer != "ok":
            continue
        for seed in range(3):
            try:
                d.walk(seed, 60)
            except AssertionError as e:
                score.check("invalid_grammar" in str(e), "only a limit ends a text", kind, source[:200], str(e)[-200:])
        running = d.worst_ms()
        score.check(running < limit_ms, "a token is bounded", kind, source[:200], running)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", required=True)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--schemas", type=int, default=1000)
    p.add_argument("--soups", type=int, default=1500)
    p.add_argument("--regexes", type=int, default=300)
    p.add_argument("--walks", type=int, default=4)
    a = p.parse_args()
    score, r = Score(), random.Random(a.seed)
    d = Driver(a.bin, small_vocab())
    for i in range(a.schemas):
        one_schema(score, d, r, a.seed * 100000 + i, a.walks, exact=i % 10 == 0)
    kept = sum(one_soup(score, d, r, a.seed * 100000 + i) for i in range(a.soups))
    score.check(kept * 20 >= a.soups, "some of the soups can be kept", kept)
    for _ in range(a.regexes):
        one_regex(score, d, r)
    objects(score, d, r, 100)
    models(score, d, max(a.walks * 10, a.schemas // 20))
    refusals(score, d)
    costs(score, d)
    score.check(d.close() == 0, "the driver ends well")
    d = Driver(a.bin, large_vocab())
    for i in range(a.schemas // 20):
        one_schema(score, d, r, a.seed * 100000 + i, 2, exact=False)
    score.check(d.close() == 0, "the driver ends well")
    score.check(score.cut < a.schemas * a.walks // 20, "few texts are cut", score.cut)
    print(f"{score.cut} texts were cut at the limit of steps")
    print(f"{score.passed} passed, {score.failed} failed")
    sys.exit(score.failed != 0)


if __name__ == "__main__":
    main()
