#!/usr/bin/env python3
"""Writes server/openapi_json.inc, what GET /openapi.json answers, from server/openapi.yaml. The result is kept in the tree,
so that building needs a C compiler alone; test_document.py checks that both agree."""
import json
import pathlib

import yaml

SERVER = pathlib.Path(__file__).resolve().parents[2] / "server"
SOURCE, EMBEDDED = SERVER / "openapi.yaml", SERVER / "openapi_json.inc"


def load():
    document = yaml.safe_load(SOURCE.read_text())
    document.pop("x-shared")  # anchors only
    return document


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def pieces(document):
    """The JSON text in lines as a change would touch them: one per path, schema, response and so on."""
    line, first = "{", True
    for key, value in document.items():
        parts = value.items() if key == "paths" else None
        line += ("" if first else ",") + compact(key) + ":"
        first = False
        if key == "components":
            yield line + "{"
            for i, (section, members) in enumerate(value.items()):
                yield ("," if i else "") + compact(section) + ":{"
                for j, (name, member) in enumerate(members.items()):
                    yield ("," if j else "") + compact(name) + ":" + compact(member)
                yield "}"
            line = "}"
        elif parts is not None:
            yield line + "{"
            for i, (name, member) in enumerate(parts):
                yield ("," if i else "") + compact(name) + ":" + compact(member)
            line = "}"
        else:
            line += compact(value)
    yield line + "}"


def embedded(document):
    lines = list(pieces(document))
    assert json.loads("".join(lines)) == document
    quoted = ['"' + line.replace("\\", "\\\\").replace('"', '\\"') + '"' for line in lines]
    assert not any("??" in q for q in quoted), "a trigraph"
    head = "/* Written by tests/openapi/embed.py from openapi.yaml: change that, then run `make openapi`. */"
    return "\n".join([head, *quoted, ""])


if __name__ == "__main__":
    EMBEDDED.write_text(embedded(load()))
