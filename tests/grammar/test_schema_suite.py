#!/usr/bin/env python3
"""JSON schemas against the public JSON-Schema-Test-Suite, as the source package of the validator `jsonschema` carries it.

  build/venv/bin/python tests/grammar/test_schema_suite.py --bin build/.../grammar_driver [--suite DIR] [--walks N]

Of every schema of every draft: it is refused by name, or
  - each instance, in three layouts, is accepted exactly if the schema as it is documented to be read (`read_as`, below, which is
    README.md's list written as another schema) validates it; so no instance that the suite calls invalid is accepted, but
    for those that only `oneOf` forbids
  - what random allowed tokens write validates, by the schema's own draft and by the suite's schema unchanged.

Prints `N passed, N failed` and exits 1 on a failure.
"""
import argparse
import glob
import json
import os
import re
import sys

import jsonschema

from driver import Driver, small_vocab
from score import Score, judge, valid

DRAFTS = {"draft2020-12": jsonschema.Draft202012Validator, "draft2019-09": jsonschema.Draft201909Validator, "draft7": jsonschema.Draft7Validator,
          "draft6": jsonschema.Draft6Validator, "draft4": jsonschema.Draft4Validator}
NOTES = {"title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "id", "deprecated", "readOnly", "writeOnly",
         "$defs", "definitions", "discriminator"}
ABOUT = {"object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
         "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
         "string": {"minLength", "maxLength", "pattern", "format"},
         "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}}
MARK = "see "  # before a reference that is one: others stand in constants
LAYOUTS = ({}, {"separators": (",", ":")}, {"indent": 2})


def node_at(document, pointer):
    for part in pointer.split("/")[1:]:
        part = re.sub("%([0-9A-Fa-f]{2})", lambda m: chr(int(m[1], 16)), part).replace("~1", "/").replace("~0", "~")
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def members(s, root, names, required, others):
    """Properties of an object schema and of all it is put together from, in order; those that only "required" names are None."""
    for part in ([node_at(root, s["$ref"])] if "$ref" in s else []) + s.get("allOf", []):
        members(part, root, names, required, others)
    names.update({k: read_as(v, root) for k, v in s.get("properties", {}).items()})
    for k in s.get("required", []):
        names.setdefault(k, None)
        required.append(k)
    others["named"] = others.get("named") or "properties" in s
    others["said"] = s.get("additionalProperties", others.get("said"))


def as_object(s, root):
    names, required, others = {}, [], {}
    members(s, root, names, required, others)
    said = others["said"]
    rest = read_as(said if said is not None else not others["named"], root)
    out = {"type": "object", "properties": {k: ({} if said is None else rest) if v is None else v for k, v in names.items()},
           "required": required, "additionalProperties": rest}
    out.update({k: s[k] for k in ("minProperties", "maxProperties") if k in s})
    return out


def as_array(s, root):
    first, rest = s.get("prefixItems"), s.get("items")
    if first is None and isinstance(rest, list):
        first, rest = rest, s.get("additionalItems")
    first = first or []
    if rest is None:
        rest = not (first and s.get("minItems", 0) <= len(first))
    out = {"type": "array", "prefixItems": [read_as(k, root) for k in first], "items": read_as(rest, root)}
    out.update({k: s[k] for k in ("minItems", "maxItems") if k in s})
    return out if first else {k: v for k, v in out.items() if k != "prefixItems"}


def as_number(s, kind):
    out = {"type": kind}
    for limit, open_limit in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if s.get(open_limit) is True:
            out[open_limit] = s[limit]
        else:
            out.update({k: s[k] for k in (limit, open_limit) if k in s and not isinstance(s[k], bool)})
    return out


def read_as(s, root):
    """The schema that says, in the words of draft 2020-12, how the engine documents to read s. References are kept."""
    if isinstance(s, bool):
        return s
    says = {k for k in s if k not in NOTES}
    if s.get("nullable") is True:
        return {"anyOf": [{"type": "null"}, read_as({k: v for k, v in s.items() if k != "nullable"}, root)]}
    if says == {"$ref"}:
        return {"$ref": MARK + s["$ref"]}
    if says == {"allOf"} and len(s["allOf"]) == 1:
        return read_as(s["allOf"][0], root)
    if says & {"$ref", "allOf"}:
        return as_object(s, root)
    for key in ("anyOf", "oneOf"):
        if key in s:
            return {"anyOf": [read_as(k, root) for k in s[key]]}
    if says & {"enum", "const"}:
        return {k: s[k] for k in ("enum", "const", "type") if k in s}
    kinds = s.get("type", [k for k in ABOUT if says & ABOUT[k]])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds:
        return True
    return {"anyOf": [as_object(s, root) if k == "object" else as_array(s, root) if k == "array" else as_number(s, k) if k in ("integer", "number")
                      else {"type": k, **({x: s[x] for x in ABOUT["string"] if x in s} if k == "string" else {})} for k in kinds]}


class Reading:
    """A document read that way; the targets of references one by one, where they stand."""

    def __init__(self, document):
        defs, todo = {}, [document]
        while todo:
            s = todo.pop()
            if isinstance(s, dict):
                if isinstance(s.get("$ref"), str) and s["$ref"] not in defs:
                    defs[s["$ref"]] = node_at(document, s["$ref"])
                    todo.append(defs[s["$ref"]])
                todo.extend(s.values())
            elif isinstance(s, list):
                todo.extend(s)
        names = {ref: "d%d" % i for i, ref in enumerate(defs)}
        schema = {"$defs": {names[ref]: read_as(s, document) for ref, s in defs.items()}, "allOf": [read_as(document, document)]}
        text = json.dumps(schema)
        for ref, name in names.items():
            text = text.replace('"$ref": %s' % json.dumps(MARK + ref), '"$ref": "#/$defs/%s"' % name)
        schema = json.loads(text)
        self.validator, self.order = judge(schema), {}
        self.see(schema)

    def see(self, s):
        """Names as they stand in lists of properties and in constants."""
        for k in list(s.get("properties", s)) + list(s.values()) if isinstance(s, dict) else s if isinstance(s, list) else []:
            if isinstance(k, str):
                self.order.setdefault(k, len(self.order))
            else:
                self.see(k)

    def written(self, v):
        """A value as the engine documents to write it: names in order, no point in whole numbers."""
        if isinstance(v, dict):
            return {k: self.written(v[k]) for k in sorted(v, key=lambda k: self.order.get(k, len(self.order)))}
        if isinstance(v, list):
            return [self.written(k) for k in v]
        return int(v) if isinstance(v, float) and v == int(v) and abs(v) <= 2 ** 53 else v


def past_limits(text):
    """Numbers that the engine documents not to write: past 20 digits, or past its powers of ten."""
    return re.search(r"\d{21}|[eE]\+?(2[89]|[3-9]\d)\d", text) is not None


def one_group(score, d, draft, group, seed, walks):
    s = group["schema"]
    answer = d.compile("schema", json.dumps(s))
    if answer != "ok":
        named = re.match(r"error unsupported_schema json_schema at (#[^:]*(:[^ ][^:]*)*): ", answer)
        nul = "NUL character" in answer and "\\u0000" in json.dumps(s)  # text of JSON that no C string holds
        score.check(named or nul, "what is not supported is refused by its pointer", s, answer)
        score.refused += 1
        return
    score.supported += 1
    text_of = json.dumps(s)
    reading = Reading(s)
    loose = judge(json.loads(text_of.replace('"oneOf"', '"anyOf"')), DRAFTS[draft])
    for t in group["tests"]:
        value = reading.written(t["data"])
        want = reading.validator.is_valid(value)
        score.check(t["valid"] or not want or '"oneOf"' in text_of or '"format"' in text_of, "the documented reading allows nothing more", s, t)
        for layout in LAYOUTS:
            text = json.dumps(value, ensure_ascii=False, **layout)
            got = d.accept(text) == "yes"
            if got and not t["valid"]:
                score.check('"oneOf"' in text_of and loose.is_valid(value), "an invalid instance is refused", s, text)
            elif '"format"' in text_of or "\\\\s" in text_of or past_limits(text):
                score.check(not got or want, "a narrower one stays within the documented reading", s, text)
            else:
                score.check(got == want, "accepted as documented", s, text, "accepted" if got else "refused")
            score.accepted += got
    for k in range(walks):
        text, ended = d.walk(seed * 100 + k, (5, 40, 200)[k % 3])
        if ended:
            why = valid(loose, text)
            score.check(why is None, "what was written validates", s, text, why)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", required=True)
    p.add_argument("--suite", default="build/json-schema-suite")
    p.add_argument("--walks", type=int, default=3)
    a = p.parse_args()
    score = Score()
    score.supported = score.refused = score.accepted = 0
    d = Driver(a.bin, small_vocab())
    seed = 0
    for draft in DRAFTS:
        files = sorted(glob.glob(os.path.join(a.suite, draft, "**", "*.json"), recursive=True))
        score.check(len(files) > 30, "the suite is there", draft, len(files))
        for name in files:
            if "zeroTerminatedFloats" in name:  # whether 1.0 is an integer: written as 1
                continue
            with open(name, encoding="utf-8") as f:
                for group in json.load(f):
                    one_group(score, d, draft, group, seed := seed + 1, a.walks)
    score.check(d.close() == 0, "the driver ends well")
    print(f"{score.supported} schemas supported, {score.refused} refused by name, {score.accepted} texts accepted")
    print(f"{score.passed} passed, {score.failed} failed")
    sys.exit(score.failed != 0)


if __name__ == "__main__":
    main()
