"""Output that keeps to a form, adaptive depth, and many choices that end at once."""

import json
import re
import threading

import jsonschema
import pytest
from daemon import text_of

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


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["the other one", "nobody"]}, "number of them": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "number of them"],
}


@pytest.mark.parametrize("how", [{"temperature": 0}, {"seed": 4}, {"seed": 9, "frequency_penalty": 1, "top_p": 0.9}])
def test_forced_text_is_the_same_on_every_path(server, how):
    form = {"json_schema": PERSON, "max_tokens": 120, **how}
    prompt = list(range(20, 160))
    fresh = ask(server, prompt=prompt, pool="off", **form)
    tokens = fresh["choices"][0]["tokens"]
    jsonschema.validate(json.loads(texts(fresh)[0]), PERSON)
    one_by_one = ask(server, prompt=prompt, pool="off", return_logits_hash=True, **form)
    assert one_by_one["choices"][0]["tokens"] == tokens
    assert server.request("PUT", "/v1/prefix_caches/forced", {"prompt": prompt[:100]})[0] in (200, 201)
    assert ask(server, prompt=prompt[100:], prefix_cache="forced", **form)["choices"][0]["tokens"] == tokens
    server.request("DELETE", "/v1/prefix_caches/forced")
    used = {"prompt": prompt[:100], "loops_used": 2, "max_loops": 4}
    assert server.request("PUT", "/v1/resume_handles/forced", used)[0] in (200, 201)
    whole = ask(server, prompt=prompt, pool="off", loops=3, **form)["choices"][0]["tokens"]
    resumed = ask(server, prompt=prompt[100:], resume={"handle": "forced", "loops": 3}, **form)
    assert resumed["choices"][0]["tokens"] == whole
    server.request("DELETE", "/v1/resume_handles/forced")
    ask(server, prompt=prompt[:90], pool={"register_tokens": 90}, max_tokens=1)
    pooled = ask(server, prompt=prompt, pool="require", **form)
    assert pooled["choices"][0]["tokens"] == tokens and pooled["tinyloop"]["reuse"]["kind"] == "pool"


def test_a_stop_string_ends_a_form_early(server):
    reply = ask(server, regex="[a-z]{3}-[a-z]{3}", stop=["-"])
    assert re.fullmatch("[a-z]{3}", texts(reply)[0])
    assert reply["choices"][0]["finish_reason"] == "stop" and reply["tinyloop"]["stop_detail"] == "stop_sequence"
    for more in ({}, {"return_logits_hash": True}):  # within text that is run at once, and one by one
        reply = ask(server, regex="abcd-efgh-ijkl[0-9]", stop=["gh-"], **more)
        assert texts(reply) == ["abcd-ef"] and reply["usage"]["completion_tokens"] == 8


def test_a_bias_chooses_among_what_the_form_allows(server):
    assert texts(ask(server, regex="[xyz]{6}", logit_bias={str(ord("y")): 100})) == ["yyyyyy"]
    assert texts(ask(server, choice=["thin", "that"], logit_bias={str(ord("t")): 100, str(ord("h")): 100}, seed=1))[0] in ("thin", "that")
    reply = ask(server, expect=500, regex="[a-c]q", logit_bias={str(ord("q")): -100})
    assert reply["error"]["code"] == "grammar_no_continuation"


def test_blanks_come_to_an_end_however_much_they_are_wanted(server):
    wish = {str(ord(c)): 100 for c in " \n\t"}
    form = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "null"}, "minItems": 2}}, "required": ["a", "b"]}
    for temperature in (0, 1):
        reply = ask(server, json_schema=form, logit_bias=wish, max_tokens=600, temperature=temperature)
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert max(len(run) for run in re.findall(r"\s*", texts(reply)[0])) <= 41
        jsonschema.validate(json.loads(texts(reply)[0]), form)


def test_logprobs_are_those_after_the_mask(server):
    lp = ask(server, choice=["xylem", "quartz"], logprobs=5, seed=2)["choices"][0]["logprobs"]
    assert set(lp["top_logprobs"][0]) == {"x", "q"}
    assert 0.999 < sum(pow(2.718281828, x) for x in lp["top_logprobs"][0].values()) < 1.001
    assert lp["token_logprobs"][1:] == [0] * (len(lp["token_logprobs"]) - 1)  # nothing else could follow
    assert [len(top) for top in lp["top_logprobs"][1:]] == [1] * (len(lp["token_logprobs"]) - 1)


def test_every_choice_of_a_stream_keeps_to_the_form(server):
    form = {"json_schema": PERSON, "max_tokens": 120, "n": 3, "seed": 8, "temperature": 1}
    events = server.stream("ab", **form)
    assert [text_of(events, i) for i in range(3)] == texts(ask(server, **form))
    for i in range(3):
        jsonschema.validate(json.loads(text_of(events, i)), PERSON)


def test_a_complete_output_is_told_from_a_cut_off_one(server):
    cut = ask(server, regex="[a-z]{20}", max_tokens=5)
    assert cut["choices"][0]["finish_reason"] == "length"
    forced = ask(server, regex="abcdefghijklmnopqrst[0-9]", max_tokens=7)  # within text that is run at once
    assert forced["choices"][0]["finish_reason"] == "length" and len(forced["choices"][0]["tokens"]) == 7
    whole = ask(server, regex="abcdefghijklmnopqrst", max_tokens=60)
    assert whole["choices"][0]["finish_reason"] == "stop" and texts(whole) == ["abcdefghijklmnopqrst"]
    assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["tokens"])


def test_a_conflict_with_the_prompt_comes_before_any_byte_of_a_stream(server):
    body = {"model": "tiny", "prompt": "xy!", "regex": "xyz+", "grammar_scope": "full", "stream": True}
    status, reply, _ = server.request("POST", "/v1/completions", body)
    assert status == 422 and reply["error"]["code"] == "grammar_prefix_conflict"
    assert "'!'" in reply["error"]["message"] and reply["error"]["details"]["token_index"] == 2
    assert texts(ask(server, prompt="xy", regex="xyz{4}", grammar_scope="full")) == ["zzzz"]


def test_a_form_can_be_cancelled(slow_server):
    d, result = slow_server, {}
    d.wait_idle()

    def run():
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 400, "regex": "([a-z]{8}forced text as well){900}", "pool": "off"}
        result["reply"] = d.request("POST", "/v1/completions", body, headers={"X-Request-Id": "form"})

    t = threading.Thread(target=run)
    t.start()
    d.wait_running()
    assert d.request("DELETE", "/v1/requests/form")[0] == 202
    t.join(20)
    assert not t.is_alive() and result["reply"][0] == 409
    d.wait_idle()


@pytest.mark.parametrize(
    "fields, code, status",
    [
        ({"grammar": 'root ::= "a" ['}, "invalid_grammar", 400),
        ({"regex": "(a"}, "invalid_grammar", 400),
        ({"grammar": ""}, "invalid_grammar", 400),
        ({"grammar": 5}, "invalid_type", 400),
        ({"json_schema": "{}"}, "invalid_type", 400),
        ({"json_schema": {"$ref": "#"}}, "unsupported_schema", 400),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"if": {}}}}}, "unsupported_schema", 400),
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
