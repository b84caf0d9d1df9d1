"""Bodies that are not what they should be. Every one gets a 400 that says why, and the server goes on."""
import json

import pytest

ROUTES = ["/v1/completions", "/v1/tokenize", "/v1/detokenize"]


def post(server, body, route="/v1/completions", **headers):
    return server.request("POST", route, body, headers=headers)


def with_prompt(raw):
    return b'{"model":"tiny","max_tokens":0,"prompt":' + raw + b"}"


@pytest.mark.parametrize("raw", [b"\xff", b"\xc0\xaf", b"\xe2\x82", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\x80"])
def test_bytes_that_are_not_utf8(server, raw):
    for body in [with_prompt(b'"' + raw + b'"'), b'{"' + raw + b'":1}', b'{"model":"' + raw + b'"}']:
        for route in ROUTES:
            status, r, _ = post(server, body, route)
            assert status == 400 and r["error"]["code"] == "invalid_json"
    server.control()


def test_bad_bytes_in_path_and_query(server):
    with server.raw() as r:
        assert r.get("/v1/models/\xff\xc0").answer()[0] == 404
        assert r.get("/v1/models/%ff%c0%af").answer()[0] == 404
        assert r.get("/livez?x=\xff").answer()[0] == 200
        r.get("/v1/models/%00tiny")
        assert r.answer()[0] == 400
    server.control()
    server.log.encode("utf-8")


@pytest.mark.parametrize("encode", [
    lambda s: s.encode("gbk"), lambda s: s.encode("latin-1", "replace"), lambda s: s.encode("utf-16"),
    lambda s: b"\xef\xbb\xbf" + s.encode(),
])
def test_other_encodings(server, encode):
    body = encode('{"model":"tiny","max_tokens":0,"prompt":"汉字é"}')
    status, r, _ = post(server, body)
    if b"?" in body and body[0] == 0x7B:  # what latin-1 cannot say became "?", the rest a lone 0xE9
        assert status == 400
    assert status == 400 and r["error"]["code"] == "invalid_json"
    assert server.request("POST", "/v1/completions", with_prompt(b'"a"'), headers={
        "Content-Type": "application/json; charset=utf-16"})[0] == 415
    assert server.request("POST", "/v1/completions", with_prompt(b'"a"'), headers={
        "Content-Type": "application/json; charset=UTF-8"})[0] == 200


@pytest.mark.parametrize("raw", [b'"abc\\u0000def"', b'"\\uX000"', b'"\\u12"', b'"\\u-001"', b'"a\x00b"', b'"\\x41"',
                                 b'"\\ud800"', b'"\\udc00x"', b'"\\ud800\\u0041"', b'"a\nb"'])
def test_nul_and_malformed_escapes(server, raw):
    status, r, _ = post(server, with_prompt(raw))
    assert status == 400 and r["error"]["code"] == "invalid_json"
    status, r, _ = post(server, b'{"model":"tiny","prompt":"a","stop":' + raw + b"}")
    assert status == 400


@pytest.mark.parametrize("depth", [33, 64, 999, 1000, 1001, 10000, 1000000])
def test_deep_nesting(server, depth):
    for route in ROUTES:
        for opening, closing in [(b"[", b"]"), (b'{"a":', b"}")]:
            if depth * len(opening) > 4000000:
                continue
            status, r, _ = post(server, with_prompt(opening * depth + b"1" + closing * depth), route)
            assert status == 400 and "nested" in r["error"]["message"]
            assert post(server, b'{"unknown":' + opening * depth, route)[0] == 400
    server.control()


def test_flat_bodies_of_the_same_size_are_read(server):
    status, r, _ = post(server, with_prompt(b'"' + b"a" * 1000000 + b'"'))
    assert status == 400 and r["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("body", [b'{"model":"tiny","prompt":"a"}}}}', b'{"model":"tiny","prompt":"a"}xyz', b"{}{}", b"", b" \n",
                                  b"null", b"[]", b"5", b'"x"', b"{", b"{]", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{,}",
                                  b'{"a":1 "b":2}', b"{'a':1}", b'{"a":tru}', b'{"a":NaN}', b'{"a":Infinity}', b'{"a":+1}',
                                  b'{"a":01}', b'{"a":1.}', b'{"a":.5}', b'{"a":1e}', b'{"a":-}', b'{"a":0x10}', b"//x\n{}"])
def test_only_one_object_is_json_here(server, body):
    for route in ROUTES:
        status, r, _ = post(server, body, route)
        assert status == 400 and r["error"]["code"] == "invalid_json", r


def test_duplicate_keys(server):
    for body in [b'{"prompt":"a","prompt":"b","model":"tiny"}', b'{"model":"tiny","prompt":"a","\\u0070rompt":"b"}',
                 b'{"model":"tiny","prompt":"a","x":{"y":1,"y":2}}']:
        status, r, _ = post(server, body)
        assert status == 400 and "duplicate" in r["error"]["message"]
    assert post(server, b'{"model":"tiny","prompt":"a","max_tokens":0,"x":{"y":1},"z":{"y":1}}')[0] == 200


def test_too_many_values(server):
    status, r, _ = post(server, with_prompt(b"[" + b"1," * 500000 + b"1]"))
    assert status == 400 and r["error"]["code"] == "invalid_json" and "values" in r["error"]["message"]


WRONG = [True, 5, 5.5, "x", [], {}, [1, "a"], [-1], [1e9]]
ACCEPTS = {  # which of the values above are right for the field
    "prompt": lambda v: v == "x", "max_tokens": lambda v: v == 5 and v is not True, "temperature": lambda v: False,
    "top_p": lambda v: False, "min_p": lambda v: False, "n": lambda v: v == 5 and v is not True,
    "stream": lambda v: v is True, "stream_options": lambda v: False, "logprobs": lambda v: v == 5 and v is not True,
    "echo": lambda v: v is True, "stop": lambda v: v in ("x", []), "seed": lambda v: v == 5 and v is not True,
    "logit_bias": lambda v: v == {}, "presence_penalty": lambda v: False, "frequency_penalty": lambda v: False,
    "loops": lambda v: v == 5 and v is not True, "cache_window": lambda v: v == 5 and v is not True,
    "top_k": lambda v: v == 5 and v is not True, "min_tokens": lambda v: v == 5 and v is not True,
    "ignore_eos": lambda v: v is True, "return_tokens": lambda v: v is True, "return_progress": lambda v: v is True,
    "repetition_penalty": lambda v: v in (5, 5.5) and v is not True, "stop_token_ids": lambda v: v == [],
    "max_queue_ms": lambda v: False, "timeout_ms": lambda v: False, "model": lambda v: False, "user": lambda v: v == "x",
}


@pytest.mark.parametrize("field", ACCEPTS)
def test_every_field_refuses_the_wrong_type_by_name(server, field):
    for value in WRONG:
        if ACCEPTS[field](value):
            continue
        if field in ("max_queue_ms", "timeout_ms") and value == 5 and value is not True:
            continue
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1, field: value}
        status, r, _ = post(server, body)
        assert status in (400, 404), (field, value, r)
        assert r["error"]["param"] == field, (field, value, r)
        assert field in r["error"]["message"] or field == "model", r
    if field not in ("prompt", "model"):
        assert post(server, {"model": "tiny", "prompt": "a", "max_tokens": 1, field: None})[0] == 200


def test_wrong_types_on_the_native_routes(server):
    for field, values in {"prompt": [1, [], {}, True], "add_special": [1, "x"], "with_pieces": [0, []]}.items():
        for v in values:
            body = {"prompt": "a", field: v}
            status, r, _ = post(server, body, "/v1/tokenize")
            assert status == 400 and r["error"]["param"] == field
    for v in [None, 1, "x", {}, ["a"], [-1], [1.5], [300], [1e9], [None]]:
        status, r, _ = post(server, {"tokens": v}, "/v1/detokenize")
        assert status == 400 and r["error"]["param"] == "tokens", v


def test_unknown_fields_are_refused_on_native_routes_alone(server):
    status, r, _ = post(server, {"prompt": "a", "temprature": 1}, "/v1/tokenize")
    assert status == 400 and r["error"]["code"] == "unknown_field" and r["error"]["param"] == "temprature"
    server.complete("a", temprature=1, loop=3)


def test_aliases_of_max_tokens(server):
    body = {"model": "tiny", "prompt": "a", "ignore_eos": True}
    for alias in ["max_completion_tokens", "n_predict"]:
        assert post(server, {**body, alias: 3})[1]["usage"]["completion_tokens"] == 3
        assert post(server, {**body, alias: 3, "max_tokens": 3})[0] == 200
        status, r, _ = post(server, {**body, alias: 3, "max_tokens": 4})
        assert status == 400 and r["error"]["param"] == alias


def test_token_ids_are_checked_one_by_one(server):
    for ids, code in [([1, 300], "token_out_of_vocab"), ([1, -1], "token_out_of_vocab"), ([1, 1.5], "invalid_token"),
                      ([1, "a"], "invalid_token"), ([1, None], "invalid_token"), ([1, True], "invalid_token"),
                      ([1, 1e300], "invalid_token"), ([1, [2]], "invalid_token")]:
        status, r, _ = post(server, {"model": "tiny", "prompt": ids})
        assert status == 400 and r["error"]["code"] == code and r["error"]["details"]["index"] == 1, r
    status, r, _ = post(server, {"model": "tiny", "prompt": [1, 300]})
    assert r["error"]["details"] == {"index": 1, "value": 300, "vocab_size": 300}


@pytest.mark.parametrize("prompt", [[], "", [[]], [[1], []], ["a", ""], [[1], "a"], ["a", [1]], None, [None], [[[1]]]])
def test_prompts_that_are_none(server, prompt):
    status, r, _ = post(server, {"model": "tiny", "prompt": prompt})
    assert status == 400 and r["error"]["param"] == "prompt", r


def test_a_missing_model_or_prompt(server):
    assert post(server, {"prompt": "a"})[1]["error"]["param"] == "model"
    assert post(server, {"model": "tiny"})[1]["error"]["param"] == "prompt"


def test_message_of_bad_input_is_valid_json_itself(server):
    status, r, _ = post(server, json.dumps({"model": '"\\\u0007<>&é' * 20, "prompt": "a"}).encode())
    assert status == 404 and r["error"]["code"] == "model_not_found"
