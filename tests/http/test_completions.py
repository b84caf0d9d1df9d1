"""POST /v1/completions without a stream, and the small routes around it."""
import openai
import pytest

from tinymodel import END


def test_reply_has_the_shape_clients_read(server):
    r = server.complete("the inner", max_tokens=5, ignore_eos=True)
    assert r["object"] == "text_completion" and r["id"].startswith("cmpl-") and r["model"] == "tiny"
    assert r["choices"][0]["finish_reason"] == "length" and r["choices"][0]["logprobs"] is None
    u = r["usage"]
    assert u["completion_tokens"] == 5 and u["total_tokens"] == u["prompt_tokens"] + 5
    assert u["prompt_tokens_details"]["cached_tokens"] == 0
    t = r["tinyloop"]
    assert t["exact"] is True and t["loops"] == 4 and t["stop_detail"] == "max_tokens" and t["reuse"]["kind"] == "none"
    assert t["timings"]["ttft_ms"] > 0


def test_server_timing_header(server):
    _, _, headers = server.request("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert headers["Server-Timing"].startswith("queue;dur=")


def test_text_and_its_ids_give_the_same(server):
    ids = server.request("POST", "/v1/tokenize", {"prompt": "the inner"})[1]["tokens"]
    a = server.complete("the inner", return_tokens=True, max_tokens=12)
    b = server.complete(ids, return_tokens=True, max_tokens=12)
    assert a["choices"][0]["tokens"] == b["choices"][0]["tokens"]
    assert a["choices"][0]["text"] == b["choices"][0]["text"]


def test_text_is_the_decoded_tokens(server):
    c = server.complete("ab", return_tokens=True, max_tokens=24, ignore_eos=True, seed=3, temperature=1,
                        logit_bias={str(t): -100 for t in range(267, 299)})["choices"][0]
    decoded = server.request("POST", "/v1/detokenize", {"tokens": c["tokens"]})[1]
    assert decoded["content"] == decoded["prompt"] == c["text"]


def test_choices_and_batches_equal_requests_alone(server):
    kw = dict(max_tokens=10, temperature=1, seed=7, ignore_eos=True, return_tokens=True)
    batch = server.complete(["the", "abc", "the"], n=2, **kw)["choices"]
    assert [c["index"] for c in batch] == [0, 1, 2, 3, 4, 5]
    for i, prompt in enumerate(["the", "abc", "the"]):
        alone = server.complete(prompt, n=2, **kw)["choices"]
        assert [c["tokens"] for c in alone] == [c["tokens"] for c in batch[2 * i:2 * i + 2]]
    assert batch[0]["tokens"] != batch[1]["tokens"]
    first = server.complete("the", **kw)["choices"][0]
    assert first["tokens"] == batch[0]["tokens"]


def test_a_prompt_of_many_choices_is_computed_once(server):
    rows = lambda: server.status()["worker"]["rows"]
    prompt = list(range(100))
    server.wait_idle()
    before = rows()
    r = server.complete(prompt, n=8, max_tokens=1, temperature=1)
    server.wait_idle()
    assert rows() - before < 2 * len(prompt)
    assert r["usage"]["prompt_tokens"] == 100 and len(r["choices"]) == 8
    before = rows()
    server.complete([prompt] * 8, max_tokens=1, temperature=1)
    server.wait_idle()
    assert rows() - before < 2 * len(prompt)


def test_without_a_seed_answers_differ_and_the_seed_is_told(server):
    r = server.complete("the", n=4, temperature=1, max_tokens=16, ignore_eos=True, return_tokens=True)
    assert len({tuple(c["tokens"]) for c in r["choices"]}) > 1
    again = server.complete("the", n=4, temperature=1, max_tokens=16, ignore_eos=True, return_tokens=True,
                            seed=r["tinyloop"]["seed"])
    assert [c["tokens"] for c in r["choices"]] == [c["tokens"] for c in again["choices"]]


def test_echo_and_logprobs_score_a_prompt(server):
    r = server.complete("hello", max_tokens=0, echo=True, logprobs=2)
    c = r["choices"][0]
    assert c["text"] == "hello" and r["usage"]["completion_tokens"] == 0
    lp = c["logprobs"]
    assert lp["tokens"] == ["he", "l", "l", "o"] and lp["text_offset"] == [0, 2, 3, 4]
    assert lp["token_logprobs"][0] is None and all(x < 0 for x in lp["token_logprobs"][1:])
    assert lp["top_logprobs"][0] is None and all(2 <= len(x) <= 3 for x in lp["top_logprobs"][1:])
    more = server.complete("hello", max_tokens=3, echo=True, logprobs=2, ignore_eos=True)["choices"][0]
    assert more["text"].startswith("hello") and len(more["logprobs"]["tokens"]) == 7
    assert more["logprobs"]["token_logprobs"][:4] == lp["token_logprobs"]


def test_greedy_logprobs_name_the_likeliest(server):
    lp = server.complete("the", max_tokens=6, logprobs=3, ignore_eos=True)["choices"][0]["logprobs"]
    for own, top in zip(lp["token_logprobs"], lp["top_logprobs"]):
        assert abs(max(top.values()) - own) < 1e-5


def test_max_tokens_zero_computes_the_prompt_alone(server):
    r = server.complete("the inner", max_tokens=0)
    assert r["choices"][0]["text"] == "" and r["usage"]["completion_tokens"] == 0


def test_depth_changes_the_answer_and_is_reported(server):
    a = server.complete("the inner", loops=1, max_tokens=16, ignore_eos=True)
    b = server.complete("the inner", loops=16, max_tokens=16, ignore_eos=True)
    assert a["tinyloop"]["loops"] == 1 and b["tinyloop"]["loops"] == 16
    assert a["choices"][0]["text"] != b["choices"][0]["text"]


def test_stop_token_ids_and_eos(server):
    base = server.complete("the", max_tokens=32, return_tokens=True, ignore_eos=True)["choices"][0]["tokens"]
    stop = base[5]
    r = server.complete("the", max_tokens=32, return_tokens=True, ignore_eos=True, stop_token_ids=[stop])
    assert r["choices"][0]["tokens"] == base[:base.index(stop)]
    assert r["choices"][0]["finish_reason"] == "stop" and r["tinyloop"]["stop_detail"] == "stop_token"


def test_min_tokens_bans_the_stop_ids_until_then(server):
    base = server.complete("the", max_tokens=32, return_tokens=True, ignore_eos=True)["choices"][0]["tokens"]
    r = server.complete("the", max_tokens=32, return_tokens=True, stop_token_ids=[base[0]], min_tokens=10, ignore_eos=True)
    assert len(r["choices"][0]["tokens"]) >= 10


def test_logit_bias_forces_a_token(server):
    c = server.complete("the", logit_bias={"65": 100}, max_tokens=5)["choices"][0]
    assert c["text"] == "AAAAA"


def test_models_and_limits(server):
    status, r, _ = server.get("/v1/models")
    assert status == 200 and r["data"][0]["id"] == "tiny"
    limits = server.get("/v1/models/tiny")[1]["limits"]
    assert limits["vocab_size"] == 300 and limits["max_loops"] == 16 and limits["max_stop"] == 4
    status, r, _ = server.get("/v1/models/other")
    assert status == 404 and r["error"]["code"] == "model_not_found"


def test_tokenize_pieces_and_aliases(server):
    r = server.request("POST", "/tokenize", {"content": "heä", "with_pieces": True})[1]
    assert r["tokens"][0] == {"id": 257, "piece": "he"} and r["tokens"][1]["piece"] == [0xC3]
    assert r["count"] == 3 and r["max_seq_len"] == 2048
    assert server.request("POST", "/v1/tokenize", {"prompt": "<|end|>"})[1]["tokens"] == [END]
    plain = server.request("POST", "/v1/tokenize", {"prompt": "<|end|>", "parse_special": False})[1]["tokens"]
    assert END not in plain
    assert server.request("POST", "/detokenize", {"tokens": plain})[1]["content"] == "<|end|>"


def test_a_long_text_is_tokenised_beside_the_loop(server):
    text = "the inner abcd " * 20000
    r = server.request("POST", "/v1/tokenize", {"prompt": text})[1]
    assert r["count"] > 100000
    status, r, _ = server.request("POST", "/v1/completions", {"model": "tiny", "prompt": text})
    assert status == 400 and r["error"]["code"] == "context_length_exceeded"
    assert r["error"]["details"]["prompt_tokens"] > 100000


def test_the_openai_client(server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["tiny"]
    r = client.completions.create(model="tiny", prompt="the", max_tokens=6, temperature=0, extra_body={"loops": 2})
    assert r.usage.completion_tokens <= 6 and r.tinyloop["loops"] == 2
    parts = list(client.completions.create(model="tiny", prompt="the", max_tokens=6, temperature=0, stream=True,
                                           stream_options={"include_usage": True}, extra_body={"loops": 2}))
    assert "".join(p.choices[0].text for p in parts if p.choices) == r.choices[0].text
    assert parts[-1].usage.completion_tokens == r.usage.completion_tokens and parts[-1].choices == []
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="tiny", prompt="the", temperature=9)
    assert e.value.code == "out_of_range" and e.value.param == "temperature" and e.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="the")


def test_unsupported_parts_are_refused_by_name(server):
    for field, value in [("suffix", "x"), ("best_of", 3), ("tools", [])]:
        r = server.complete("a", expect=400, **{field: value})
        assert r["error"]["code"] == "unsupported_parameter" and r["error"]["param"] == field
    server.complete("a", best_of=1, pool="auto", suffix=None, unheard_of=5)


def test_problem_json_on_request(server):
    status, r, headers = server.get("/v1/models/other", headers={"Accept": "application/problem+json", "X-Request-Id": "abc"})
    assert status == 404 and headers["Content-Type"] == "application/problem+json"
    assert r["type"].endswith("model_not_found") and r["instance"] == "abc" and r["status"] == 404


def test_request_ids(server):
    _, r, headers = server.get("/v1/models/other", headers={"X-Request-Id": "my-id.1"})
    assert headers["X-Request-Id"] == r["error"]["request_id"] == "my-id.1"
    for bad in ["a b", "x" * 129, 'q"']:
        assert server.get("/livez", headers={"X-Request-Id": bad})[2]["X-Request-Id"].startswith("req_")


def test_a_model_without_a_tokenizer_takes_ids(start, tmp_path):
    import tinymodel
    from daemon import TINYLOOP
    d = start(model_dir=tinymodel.make(TINYLOOP, tmp_path / "bare", tokenizer=False))
    r = d.complete([1, 2, 3], model="bare", max_tokens=4, ignore_eos=True, return_tokens=True)
    assert len(r["choices"][0]["tokens"]) == 4 and r["choices"][0]["text"] == ""
    assert d.complete("the", model="bare", expect=400)["error"]["code"] == "unsupported"
    assert d.complete([1], model="bare", stop="x", expect=400)["error"]["param"] == "stop"
    assert len(d.stream([1, 2], model="bare", max_tokens=3, ignore_eos=True, return_tokens=True)) > 3
    d.stop()
