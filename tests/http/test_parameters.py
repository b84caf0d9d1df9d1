"""Values at and beyond the edges of every parameter."""
import pytest


def raw(server, text):
    body = b'{"model":"tiny","prompt":"a","max_tokens":2,' + text.encode() + b"}"
    return server.request("POST", "/v1/completions", body)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                                   "repetition_penalty"])
def test_non_finite_numbers(server, field):
    for value in ["1e999", "-1e999", "1e308", "-1e308"]:
        status, r, _ = raw(server, f'"{field}":{value}')
        assert status == 400 and r["error"]["param"] == field
    for value in ["NaN", "Infinity", '"nan"', '"1"']:
        assert raw(server, f'"{field}":{value}')[0] == 400
    assert raw(server, f'"{field}":{"1" if field == "repetition_penalty" else "-0.0"}')[0] == 200
    assert raw(server, '"logit_bias":{"5":1e999}')[0] == 400


def test_tiny_temperatures_tend_to_greedy(server):
    greedy = server.complete("the", max_tokens=12, ignore_eos=True, return_tokens=True)["choices"][0]["tokens"]
    for t in [1e-4, 1e-8, 1e-30, 5e-324]:
        c = server.complete("the", max_tokens=12, ignore_eos=True, return_tokens=True, temperature=t)["choices"][0]
        assert c["tokens"] == greedy
    for t in [1e-2, 1e-4, 1e-8, 5e-324]:
        assert server.complete("the", temperature=t, logit_bias={"65": 100, "66": -100}, max_tokens=3)["choices"][0]["text"] == "AAA"


@pytest.mark.parametrize("value", ["2147483647", "2147483648", "4294967295", "9.2e18", "1e18", "1e308", "3.7", "-1", "-2"])
def test_max_tokens_that_cannot_be(server, value):
    body = b'{"model":"tiny","prompt":[1,2,3],"max_tokens":' + value.encode() + b"}"
    status, r, _ = server.request("POST", "/v1/completions", body)
    assert status == 400, r
    assert r["error"]["code"] in ("context_length_exceeded", "out_of_range", "invalid_type")
    server.control()


def test_max_tokens_at_the_limit(server):
    limit = server.get("/v1/models/tiny")[1]["limits"]["max_seq_len"]
    prompt = [65] * (limit - 4)
    for n in [1, 3, 4]:
        r = server.complete(prompt, max_tokens=n, ignore_eos=True, loops=1)
        assert r["choices"][0]["finish_reason"] == "length" and r["usage"]["completion_tokens"] == n
    r = server.complete(prompt, max_tokens=5, expect=400)["error"]
    assert r["code"] == "context_length_exceeded"
    assert r["details"] == {"prompt_tokens": limit - 4, "cached_tokens": 0, "max_tokens": 5, "max_seq_len": limit}
    status, r, _ = server.request("POST", "/v1/completions", {"model": "tiny", "prompt": prompt, "ignore_eos": True, "loops": 1})
    assert status == 200 and r["usage"]["completion_tokens"] == 4  # absent: what fits, at most 128
    status, r, _ = server.request("POST", "/v1/completions", {"model": "tiny", "prompt": [1], "ignore_eos": True, "loops": 1})
    assert r["usage"]["completion_tokens"] == 128


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_longer_than_the_context(server, stream):
    limit = server.get("/v1/models/tiny")[1]["limits"]["max_seq_len"]
    assert server.complete([65] * limit, max_tokens=0, loops=1)["usage"]["prompt_tokens"] == limit
    for n in [limit, limit + 1, 2 * limit]:
        r = server.complete([65] * n, max_tokens=1, expect=400, stream=stream)["error"]
        assert r["code"] == "context_length_exceeded" and str(n) in r["message"] and str(limit) in r["message"]
    server.wait_idle()
    server.control()


def test_seeds_keep_their_precision(server):
    def tokens(seed):
        r = server.complete("a", seed=seed, temperature=1, max_tokens=12, ignore_eos=True, return_tokens=True)
        assert str(r["tinyloop"]["seed"]) == str(seed)
        return r["choices"][0]["tokens"]

    ok = [0, 2**31, 2**32, 2**53 - 1, str(2**53), str(2**53 + 1), str(2**63), str(2**64 - 1)]
    seen = [tokens(s) for s in ok]
    assert seen == [tokens(s) for s in ok]
    assert len({tuple(t) for t in seen}) == len(ok)
    assert tokens(5) == server.complete("a", seed="5", temperature=1, max_tokens=12, ignore_eos=True,
                                        return_tokens=True)["choices"][0]["tokens"]
    for bad in ["-1", "9007199254740992", "9007199254740993", "1.5", "1e300", '"18446744073709551616"', '"-1"', '""', '"1x"',
                '"99999999999999999999"', "true"]:
        status, r, _ = raw(server, f'"seed":{bad}')
        assert status == 400 and r["error"]["param"] == "seed", bad


def test_logit_bias_keys_and_values(server):
    assert raw(server, '"logit_bias":{"299":-100,"0":100}')[0] == 200
    for bad in ['{"300":1}', '{"2147483648":1}', '{"99999999":1}', '{"-1":1}', '{"x":1}', '{"":1}', '{"1.0":1}', '{"5":101}',
                '{"5":-101}', '{"5":1e9}', '{"5":"1"}', '{"5":1,"05":2}', "[1]"]:
        status, r, _ = raw(server, f'"logit_bias":{bad}')
        assert status == 400 and r["error"]["param"] == "logit_bias", bad
    many = ",".join(f'"{i}":1' for i in range(100000))
    assert raw(server, '"logit_bias":{' + many + "}")[0] == 400


def test_top_k_has_one_meaning(server):
    kw = dict(max_tokens=8, ignore_eos=True, return_tokens=True, seed=1, temperature=1)
    off = server.complete("the", **kw)["choices"][0]["tokens"]
    for k in [0, -1, 300, 301, 9999999]:
        assert server.complete("the", top_k=k, **kw)["choices"][0]["tokens"] == off
    greedy = server.complete("the", **{**kw, "temperature": 0})["choices"][0]["tokens"]
    assert server.complete("the", top_k=1, **kw)["choices"][0]["tokens"] == greedy
    assert server.complete("the", top_p=0, **kw)["choices"][0]["tokens"] == greedy
    for bad in ["-2", "2147483648", "1.5"]:
        assert raw(server, f'"top_k":{bad}')[0] == 400


def test_depth_and_window_ranges(server):
    for loops in [0, 17, -1, 65, 2**40]:
        r = server.complete("a", loops=loops, expect=400)["error"]
        assert r["code"] == "loops_out_of_range" and r["details"] == {"min": 1, "max": 16, "got": loops}
    first = server.complete("a", model=5, loops=17, expect=400)["error"]  # of two mistakes the first, and nothing of the second
    assert first["param"] == "model" and "details" not in first
    for window in [-1, 2049]:
        assert server.complete("a", cache_window=window, expect=400)["error"]["code"] == "cache_window_out_of_range"
    server.complete("the inner", cache_window=2)


def test_counts_of_choices_are_bounded(server):
    server.complete("a", n=64, max_tokens=1)
    for n in [0, 65, 129, 2**31]:
        assert server.complete("a", n=n, expect=400)["error"]["param"] == "n"
    r = server.complete(["a"] * 33, n=2, expect=400)["error"]
    assert r["param"] == "prompt" and r["code"] == "out_of_range"
    for v in [6, -1, 20]:
        assert server.complete("a", logprobs=v, expect=400)["error"]["param"] == "logprobs"
    assert server.complete("a", stream_options={"include_usage": True}, expect=400)["error"]["param"] == "stream_options"


def test_a_deadline_ends_with_what_there_is(slow_server):
    r = slow_server.complete("the", max_tokens=1500, ignore_eos=True, loops=16, timeout_ms=400)
    assert r["choices"][0]["finish_reason"] == "length" and r["tinyloop"]["stop_detail"] == "deadline"
    assert 0 < r["usage"]["completion_tokens"] < 1500
    # also in the middle of a prompt, for all choices
    r = slow_server.complete([1 + i % 250 for i in range(2000)], max_tokens=5, n=3, loops=16, timeout_ms=300,
                             pool="off")
    assert [c["finish_reason"] for c in r["choices"]] == ["length"] * 3 and r["tinyloop"]["stop_detail"] == "deadline"
    assert r["usage"]["completion_tokens"] == 0
    slow_server.wait_idle()
