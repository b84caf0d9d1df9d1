"""Server-sent events: framing, whole characters, stop strings, equality with the answer in one piece."""
import json
import random
import time

import pytest

from daemon import SLOW, text_of


def test_events_have_the_shape_clients_read(server):
    events = server.stream("the", max_tokens=5, ignore_eos=True, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    chunks = [e for e in events if isinstance(e, dict)]
    assert len({(c["id"], c["created"]) for c in chunks}) == 1
    assert all(c["usage"] is None for c in chunks[:-1]) and chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["choices"] == [] and chunks[-1]["tinyloop"]["stop_detail"] == "max_tokens"
    finishes = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert finishes[-1] == "length" and not any(finishes[:-1])


def test_without_usage_the_last_chunk_carries_the_rest(server):
    chunks = [e for e in server.stream("the", max_tokens=3, ignore_eos=True) if isinstance(e, dict)]
    assert "usage" not in chunks[0] and chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["tinyloop"]["loops"] == 4 and "tinyloop" not in chunks[0]


def test_headers_of_a_stream(server):
    with server.raw() as r:
        r.post("/v1/completions", {"model": "tiny", "prompt": "the", "max_tokens": 2, "stream": True})
        status, headers = r.head()
        assert status == 200 and headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-store" and headers["x-accel-buffering"] == "no"


def test_streamed_text_equals_the_text_in_one_piece(server):
    rng = random.Random(5)
    for i in range(40):
        prompt = "".join(rng.choice("abcdethinr \n\t-*_#1ä€😀") for _ in range(rng.randint(1, 30)))
        kw = dict(max_tokens=rng.randint(1, 40), temperature=1, seed=i, echo=i % 5 == 0)
        if i % 3 == 0:
            kw["stop"] = [rng.choice("abcdefgh"), "xy"]
        one = server.complete(prompt, **kw)["choices"][0]
        events = server.stream(prompt, **kw)
        assert text_of(events) == one["text"], (prompt, kw)
        last = [e for e in events if isinstance(e, dict)][-1]
        assert last["choices"][0]["finish_reason"] == one["finish_reason"]


def test_every_event_is_whole_utf8(server):
    # urllib hands lines out; decoding each strictly is the check. Bytes of "€" are forced one token at a time.
    for text in ["é", "€", "😀", "👩\u200d👧"]:
        raw = text.encode()
        bias = {str(b): 100 for b in set(raw)}
        events = server.stream("a", max_tokens=30, temperature=1, seed=2, logit_bias=bias)
        assert text_of(events) == server.complete("a", max_tokens=30, temperature=1, seed=2, logit_bias=bias)["choices"][0]["text"]


def forced(server, letters, n, **kw):
    """A greedy run over a fixed text is not to be had from random weights; a seeded one among few letters is."""
    bias = {str(ord(c)): 100 for c in letters}
    kw = dict(max_tokens=n, temperature=1, seed=11, logit_bias=bias, ignore_eos=True, **kw)
    return kw, server.complete("x", **kw)["choices"][0]["text"]


@pytest.mark.parametrize("make", [
    lambda t: [t[5:12]], lambda t: [t[3:4]], lambda t: [t[8:10], t[2:9]], lambda t: [t[4:6], t[4:7]],
    lambda t: ["zz", t[10:13]], lambda t: [t[20:30]], lambda t: ["never there"],
])
def test_stop_strings_end_the_text_where_they_begin(server, make):
    kw, full = forced(server, "ab", 40)
    stops = make(full)
    ends = [(full.find(s) + len(s), -len(s), s) for s in stops if s in full]
    want = full if not ends else full[:min(ends)[0] - len(min(ends)[2])]
    one = server.complete("x", **kw, stop=stops)
    events = server.stream("x", **kw, stop=stops)
    assert one["choices"][0]["text"] == want == text_of(events)
    assert one["choices"][0]["finish_reason"] == ("stop" if ends else "length")
    assert one["tinyloop"]["stop_detail"] == ("stop_sequence" if ends else "max_tokens")
    for s in stops:
        assert s not in text_of(events)


def test_a_stop_string_that_never_comes_holds_nothing_back(server):
    kw, full = forced(server, "ab", 60)
    events = [e for e in server.stream("x", **kw, stop="c" * 200) if isinstance(e, dict)]
    assert text_of(events) == full
    assert sum(1 for e in events if e["choices"][0]["text"]) == 60


def test_bad_stops_are_refused(server):
    for stop in ["", [""], ["a", ""], 5, [None], ["x"] * 5, "x" * 100000, {}, ["x"] * 10000]:
        r = server.complete("a", stop=stop, expect=400)
        assert r["error"]["param"] == "stop", stop
    for stop in [[], None]:
        server.complete("a", stop=stop)
    server.control()


def test_streams_of_several_choices_interleave_by_index(server):
    kw = dict(max_tokens=12, temperature=1, seed=4, n=3, ignore_eos=True)
    events = server.stream("the", **kw)
    one = server.complete("the", **kw)["choices"]
    for c in one:
        assert text_of(events, c["index"]) == c["text"]
    assert sum(1 for e in events if isinstance(e, dict) and e["choices"] and e["choices"][0]["finish_reason"]) == 3


def test_streamed_tokens_and_logprobs(server):
    kw = dict(max_tokens=10, temperature=0, ignore_eos=True, logprobs=2, return_tokens=True, echo=True)
    c = server.complete("hello", **kw)["choices"][0]
    chunks = [e["choices"][0] for e in server.stream("hello", **kw) if isinstance(e, dict)]
    assert sum((x["tokens"] for x in chunks if "tokens" in x), []) == c["tokens"]
    joined = {k: [] for k in c["logprobs"]}
    for x in chunks:
        for k in joined:
            joined[k] += x["logprobs"][k] if x["logprobs"] else []
    assert joined == c["logprobs"]


def test_progress_comments(slow_server):
    events = slow_server.stream(list(range(200)) * 6, max_tokens=1, return_progress=True, loops=16, pool="off")
    marks = [e for e in events if isinstance(e, str) and e.startswith(": prefill")]
    done = [int(m.split()[2].split("/")[0]) for m in marks]
    assert len(marks) >= 2 and done == sorted(done) and marks[-1].endswith("/1200")


def test_time_of_a_token_does_not_grow_with_the_text(server):
    stamps = [time.monotonic() for _ in server.stream_events("the", max_tokens=1500, ignore_eos=True, loops=1,
                                                             stop=["never %d" % i for i in range(4)],
                                                             logit_bias={"65": 100})]
    early, late = stamps[300] - stamps[100], stamps[-10] - stamps[-210]
    assert late < 4 * early + 0.2 * SLOW  # attention over more tokens is allowed its share


def test_headers_wait_for_the_start(start, deep_model):
    d = start("--max-running", 1, "--stream-hold-seconds", 0.5, "--ping-seconds", 0.2, model_dir=deep_model)
    first = d.stream_events("the", max_tokens=1500, ignore_eos=True, loops=16)
    next(first)
    # queued longer than it wants: a real HTTP error, although it asked for a stream
    t = time.monotonic()
    status, r, h = d.request("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "stream": True, "max_queue_ms": 200})
    assert status == 503 and r["error"]["code"] == "queue_timeout" and 1 <= int(h["Retry-After"]) <= 60
    assert 0.15 < time.monotonic() - t < 2 * SLOW
    # held back for a while, then opened with a comment
    with d.raw() as c:
        c.post("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 1})
        t = time.monotonic()
        assert c.head()[0] == 200 and time.monotonic() - t > 0.3
        text = c.chunk() + c.chunk()
        assert text.startswith(b": queued position=1\n\n") and b": ping\n\n" in text
    first.close()
    d.wait_idle()
    d.stop()


def test_json_escapes_survive(server):
    for prompt in ['"\\/\b\f\n\r\t', "\u2028\x7f", "😀"]:
        a = server.complete(prompt, echo=True, max_tokens=0)["choices"][0]["text"]
        assert a == prompt
    raw = b'{"model":"tiny","prompt":"\\ud83d\\ude00","max_tokens":0,"echo":true}'
    assert server.request("POST", "/v1/completions", raw)[1]["choices"][0]["text"] == "😀"
    json.dumps(a)
