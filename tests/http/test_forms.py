"""Output that keeps to a form, adaptive depth, and many choices that end at once."""

import json
import re

import jsonschema
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(server, expect=200, **fields):
    return server.complete(expect=expect, return_tokens=True, **{"prompt": "ab", "max_tokens": 60, "temperature": 1, **fields})


def texts(reply):
    return [c["text"] for c in reply["choices"]]


@pytest.mark.parametrize("n", [1, 5])
def test_a_choice_is_one_of_the_strings_in_every_choice(server, n):
    for text in texts(ask(server, choice=["yes", "no"], n=n, seed=3)):
        assert text in ("yes", "no")


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_choices_that_end_in_their_first_step_are_all_answered(server, max_tokens):
    reply = ask(server, n=6, max_tokens=max_tokens, ignore_eos=True)
    assert [len(c["tokens"]) for c in reply["choices"]] == [max_tokens] * 6


def test_a_regular_expression_holds(server):
    reply = ask(server, regex="[a-c]{2}-[0-9]{3}")
    assert re.fullmatch("[a-c]{2}-[0-9]{3}", texts(reply)[0])
    assert reply["tinyloop"]["stop_detail"] == "grammar_complete"


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
    ],
)
def test_a_finished_json_output_validates(server, form):
    reply = ask(server, max_tokens=200, seed=11, **form)
    if reply["choices"][0]["finish_reason"] == "stop":
        jsonschema.validate(json.loads(texts(reply)[0]), SCHEMA)
    else:
        assert reply["choices"][0]["finish_reason"] == "length"


def test_the_same_tokens_fresh_and_from_a_prefix_cache(server):
    form = {"regex": "[a-z]{1,30}[.]", "seed": 5}
    prompt = list(range(40, 140))
    fresh = ask(server, prompt=prompt, pool="off", **form)
    assert server.request("PUT", "/v1/prefix_caches/form-test", {"prompt": prompt[:70]})[0] in (200, 201)
    reused = ask(server, prompt=prompt[70:], prefix_cache="form-test", **form)
    assert reused["choices"][0]["tokens"] == fresh["choices"][0]["tokens"]
    assert reused["tinyloop"]["reuse"]["matched_tokens"] == 70
    server.request("DELETE", "/v1/prefix_caches/form-test")


@pytest.mark.parametrize(
    "fields, code, status",
    [
        ({"grammar": 'root ::= "a" ['}, "invalid_grammar", 400),
        ({"regex": "(a"}, "invalid_grammar", 400),
        ({"json_schema": {"not": {}}}, "unsupported_schema", 400),
        ({"choice": []}, "invalid_type", 400),
        ({"choice": ["a", 3]}, "invalid_type", 400),
        ({"regex": "a", "grammar": "root ::= [a]"}, "bad_param", 400),
        ({"response_format": {"type": "xml"}}, "out_of_range", 400),
        ({"regex": "z+", "grammar_scope": "full"}, "grammar_prefix_conflict", 422),
        ({"grammar_scope": "all"}, "out_of_range", 400),
        ({"loops": "auto"}, "unsupported", 400),
        ({"exit_threshold": 0.5}, "bad_param", 400),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_answer(server, fields, code, status):
    assert ask(server, expect=status, **fields)["error"]["code"] == code
