"""/v1/pool: the longest registered prefix wins, by itself, for every plain completion."""
import random
import threading
import time

import pytest

from test_chat import chat_model
from reuse import answer, ask, cached, error, fresh, post, prompt, put, reuse

ENTRIES = "/v1/pool/entries"


@pytest.fixture
def d(start):
    daemon = start("--pool-auto=false")
    yield daemon
    daemon.stop()


def register(d, tokens, expect=201, **fields):
    return post(d, ENTRIES, {"prompt": tokens, **fields}, expect)


def match(d, tokens, **fields):
    return post(d, "/v1/pool/match", {"prompt": tokens, **fields}, 200)


P = prompt(4, 200)


def test_registered_prefixes_are_found_by_every_plain_completion(d):
    e = register(d, P[:100], loops=4)
    assert e["object"] == "pool_entry" and e["tokens"] == 100 and e["created"] is True and e["id"].startswith("pe_")
    for fields in ({}, {"pool": "auto"}, {"pool": "require"}, {"pool": {}}):
        r = ask(d, P[:137], **fields)
        assert reuse(r)["kind"] == "pool" and reuse(r)["id"] == e["id"] and cached(r) == 100
        assert reuse(r)["suffix_tokens"] == 37 and answer(r) == answer(fresh(d, P[:137]))
    off = ask(d, P[:137], pool="off")
    assert cached(off) == 0 and reuse(off)["kind"] == "none"
    m = d.metrics()
    assert m["tinyloop_pool_hits_total"] >= 4 and m['tinyloop_prompt_tokens_cached_total{kind="pool"}'] == 400
    assert d.get(f"{ENTRIES}/{e['id']}")[1]["uses"] == 4


def test_registering_is_by_content(d):
    a = register(d, P[:50], loops=4)
    b = register(d, P[:50], 200, loops=4)
    assert a["id"] == b["id"] and b["created"] is False
    assert register(d, P[:50], loops=5)["id"] != a["id"]
    assert register(d, P[:50], loops=4, cache_window=32)["id"] != a["id"]
    assert register(d, P[:51], loops=4)["id"] != a["id"]
    pool = d.get("/v1/pool")[1]
    assert pool["by_loops"] == {"4": 3, "5": 1}
    assert pool["entries"] == 4 and pool["capacity"] == 16 and pool["bytes"] > 0 and pool["automatic_entries"] == 0


def test_the_whole_prompt_registered_needs_no_forward_pass(d):
    register(d, P, loops=4)
    want = answer(fresh(d, P))
    for _ in range(3):
        r = ask(d, P)
        assert cached(r) == len(P) and answer(r) == want


@pytest.mark.parametrize("order", range(6))
def test_the_longest_prefix_wins_in_any_order(start, order):
    d = start("--pool-auto=false", "--pool-capacity", 32)
    a, b = prompt(10, 20), prompt(11, 20)
    lists = [a, a + b, a + b + P[:20], a + P[:20], b]
    random.Random(order).shuffle(lists)
    ids = {len(t) if t[0] == a[0] else -len(t): register(d, t)["id"] for t in lists if t != a + P[:20]}
    other = register(d, a + P[:20])["id"]
    for tokens, n in [(a, 20), (a + [1], 20), (a + b + [1], 40), (a + b + P[:25], 60), (a + b + P[:19], 40), (b + [3], 20),
                      ([9] + a, 0), (a[:19], 0), (a[:19] + [a[19] ^ 1], 0), (a + b[:19] + [b[19] ^ 1], 20)]:
        m = match(d, tokens)
        assert m["matched_tokens"] == n and m["matched"] is (n > 0), (tokens, m)
        assert cached(ask(d, tokens, max_tokens=1)) == n
    assert match(d, a + P[:21])["entry"] == other
    d.stop()


def test_an_entry_longer_than_the_shared_part_is_not_used(d):
    p, q, r = prompt(20, 50), prompt(21, 30), prompt(22, 30)
    register(d, p + q)
    miss = ask(d, p + r)
    assert cached(miss) == 0 and answer(miss) == answer(fresh(d, p + r))
    register(d, p)
    hit = ask(d, p + r)
    assert cached(hit) == 50 and answer(hit) == answer(miss)


def test_a_change_to_any_part_of_the_identity_is_a_miss(d):
    register(d, P[:64], loops=4, cache_window=0)
    assert cached(ask(d, P, loops=4)) == 64
    for i in (0, 1, 31, 62, 63):
        changed = P[:]
        changed[i] ^= 1
        r = ask(d, changed, loops=4)
        assert cached(r) == 0 and answer(r) == answer(fresh(d, changed, loops=4)), i
    for fields in ({"loops": 3}, {"loops": 5}, {"loops": 4, "cache_window": 32}, {"loops": 4, "cache_salt": "s"},
                   {"loops": 4, "prompt_cache_key": "s"}):
        assert cached(ask(d, P, **fields)) == 0, fields
    register(d, P[:64], loops=4, cache_salt="s")
    assert cached(ask(d, P, loops=4, cache_salt="s")) == 64 and cached(ask(d, P, loops=4, cache_salt="t")) == 0


def test_the_explanation(d):
    e = register(d, P[:100], loops=4)
    m = match(d, P[:130], loops=4)
    assert m["matched"] and m["entry"] == e["id"] and m["suffix_tokens"] == 30 and m["nearest_miss"] is None
    wrong = P[:80] + [P[80] ^ 1] + P[81:130]
    m = match(d, wrong, loops=4, explain=True)
    near = m["nearest_miss"]
    assert not m["matched"] and m["matched_tokens"] == 0 and near["entry"] == e["id"] and near["reason"] == "token_mismatch"
    assert near["common_tokens"] == near["diverges_at"] == 80
    assert near["expected"]["id"] == P[80] and near["got"]["id"] == P[80] ^ 1 and "piece" in near["got"]
    near = match(d, P[:60], loops=4)["nearest_miss"]
    assert near["reason"] == "prompt_shorter" and near["got"] is None and near["expected"]["id"] == P[60]
    assert match(d, P[:130], loops=5)["nearest_miss"]["reason"] == "loops_differ"
    assert match(d, P[:130], loops=4, cache_window=16)["nearest_miss"]["reason"] == "window_differs"
    assert match(d, wrong, loops=4, explain=False)["nearest_miss"] is None
    queries = d.get("/v1/pool")[1]["queries"]
    match(d, P, loops=4)
    assert d.get("/v1/pool")[1]["queries"] == queries # looking counts nothing


def test_require(d):
    r = ask(d, P, pool="require", expect=422)
    assert error(r) == "no_pool_match"
    register(d, P[:50], loops=4)
    r = ask(d, P[:30] + [P[30] ^ 1], pool="require", loops=4, expect=422)
    assert error(r) == "no_pool_match" and r["error"]["details"]["nearest_common_tokens"] == 30
    assert error(ask(d, P, pool="require", loops=5, expect=422)) == "no_pool_match"
    with d.raw() as c: # also of a stream: a real status, not an event
        c.post("/v1/completions", {"model": "tiny", "prompt": P, "loops": 5, "pool": "require", "stream": True})
        assert c.answer()[0] == 422
    assert error(ask(d, P, pool="sometimes", expect=400)) == "out_of_range"
    assert error(ask(d, P, pool={"mode": "auto", "x": 1}, expect=400)) == "unknown_field"


def test_the_least_recently_used_goes(start):
    d = start("--pool-capacity", 2, "--pool-auto=false")
    a, b, c = (register(d, prompt(30 + i, 40))["id"] for i in range(3))
    status, r, _ = d.get(f"{ENTRIES}/{a}")
    assert (status, error(r)) == (410, "resource_gone") and r["error"]["details"]["reason"] == "evicted"
    assert d.request("DELETE", f"{ENTRIES}/{a}")[0] == 410
    ask(d, prompt(31, 40))
    register(d, prompt(33, 40))
    assert d.get(f"{ENTRIES}/{b}")[0] == 200 and d.get(f"{ENTRIES}/{c}")[0] == 410
    assert d.get("/v1/pool")[1]["evictions"] == 2
    d.stop()


def test_entries_are_read_and_deleted(d):
    e = register(d, P[:40], ttl_seconds=50, metadata={"a": "b"})
    status, r, _ = d.get(f"{ENTRIES}/{e['id']}")
    assert status == 200 and r["metadata"] == {"a": "b"} and r["ttl_seconds"] == 50
    assert [x["id"] for x in d.get(ENTRIES)[1]["data"]] == [e["id"]]
    assert d.request("DELETE", f"{ENTRIES}/{e['id']}")[0] == 204
    assert cached(ask(d, P)) == 0 and d.memory()["kv_used"] == 0
    assert error(d.get(f"{ENTRIES}/pe_never")[1]) == "pool_entry_not_found"
    for body, code in (({"prompt": []}, "empty_prompt"), ({"prompt": [1], "loops": 0}, "loops_out_of_range"),
                       ({"prompt": [1], "id": "x"}, "unknown_field")):
        assert error(post(d, ENTRIES, body, 400)) == code


def test_prefix_caches_take_part_without_a_second_copy(d):
    put(d, "/v1/prefix_caches/named", {"prompt": P[:70], "loops": 4, "pool": True})
    used = d.memory()["kv_used"]
    r = ask(d, P, loops=4)
    assert reuse(r)["kind"] == "pool" and reuse(r)["id"] == "named" and cached(r) == 70
    e = register(d, P[:70], loops=4)
    assert d.memory()["kv_used"] == used
    r, _ = put(d, "/v1/prefix_caches/from-pool", {"from": {"pool_entry": e["id"]}})
    assert r["tokens"] == 70 and r["loops"] == 4 and d.memory()["kv_used"] == used
    assert answer(ask(d, P[70:], prefix_cache="from-pool")) == answer(fresh(d, P, loops=4))
    assert d.request("DELETE", "/v1/prefix_caches/named")[0] == 204
    assert cached(ask(d, P, loops=4)) == 70 # the registered one is still there


def test_register_tokens_after_a_completion(d):
    ask(d, P, pool={"register_tokens": 90}, loops=4)
    end = time.time() + 10
    while not [e for e in d.get(ENTRIES)[1]["data"] if e["status"] == "ready"]:
        assert time.time() < end
        time.sleep(0.02)
    r = ask(d, P[:90] + [1, 2], loops=4)
    assert cached(r) == 90 and answer(r) == answer(fresh(d, P[:90] + [1, 2], loops=4))
    assert error(ask(d, P, pool={"register_tokens": 0}, expect=400)) == "out_of_range"


def test_text_is_tokenised_as_a_whole(d):
    """Where the cut falls inside a token, the registered prefix does not match; it is never spliced."""
    for first, rest in [("Hello wor", "ld the end"), ("the th", "e inner"), ("trailing ", " space"), ("newlines\n\n", "\nmore"),
                        ("half 😀"[:-1] + "ab", "cd an")]:
        register(d, first)
        r = ask(d, first + rest)
        ids = d.request("POST", "/v1/tokenize", {"prompt": first + rest})[1]["tokens"]
        head = d.request("POST", "/v1/tokenize", {"prompt": first})[1]["tokens"]
        assert cached(r) == (len(head) if ids[:len(head)] == head else 0)
        assert answer(r) == answer(fresh(d, first + rest)) == answer(fresh(d, ids))


def test_every_form_of_a_request_reuses_alike(d):
    text = "the inner thing and the other one"
    ids = d.request("POST", "/v1/tokenize", {"prompt": text})[1]["tokens"]
    register(d, ids[:10], loops=4)
    plain = ask(d, ids)
    assert cached(plain) == 10
    assert cached(ask(d, text)) == 10 and answer(ask(d, text)) == answer(plain)
    batch = ask(d, [ids, ids[:12]])
    assert answer(batch)[0] == answer(plain)[0] and cached(batch) == 20
    for prompt_ in (ids, text):
        events = d.stream(prompt_, stream_options={"include_usage": True}, ignore_eos=True)
        assert events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 10
        assert events[-2]["tinyloop"]["reuse"]["kind"] == "pool"
    scored = ask(d, ids, echo=True, logprobs=1) # the one exception: scores of the prompt need it computed
    assert cached(scored) == 0 and reuse(scored)["kind"] == "none"


def test_pool_limits_can_be_changed(d):
    for i in range(5):
        register(d, prompt(60 + i, 20))
    r = d.request("PATCH", "/admin/pool", {"capacity": 2}, admin=True)[1]
    assert r["capacity"] == 2 and r["entries"] == 2
    assert d.request("PATCH", "/admin/pool", {"capacity": 0}, admin=True)[0] == 400


def test_purge_reports_the_truth(d):
    register(d, P[:70])
    put(d, "/v1/prefix_caches/x", {"prompt": P[:71]})
    r = d.request("POST", "/admin/purge", {"kinds": ["prefix_cache"]}, admin=True)[1]
    assert r["freed"] == 1 and r["busy"] == 0 and r["bytes"] > 0
    assert d.get("/v1/pool")[1]["entries"] == 1
    assert d.request("POST", "/admin/purge", {}, admin=True)[1]["freed"] == 1
    assert d.request("POST", "/admin/purge", {"kinds": ["everything"]}, admin=True)[0] == 400
    assert d.memory()["kv_used"] == 0


# -- what conversations leave behind

def test_the_next_turn_of_a_chat_is_a_hit_by_itself(start):
    d = start()
    history = prompt(70, 80)
    for turn in range(6):
        r = ask(d, history, max_tokens=20)
        n = len(history)
        if turn:
            assert reuse(r)["kind"] == "pool" and reuse(r)["id"] is None
            assert cached(r) >= previous // 64 * 64 # a whole block of the last turn at least
        assert answer(r) == answer(fresh(d, history, max_tokens=20))
        previous = n
        history = history + r["choices"][0]["tokens"] + prompt(71 + turn, 30)
    pool = d.get("/v1/pool")[1]
    assert pool["automatic_entries"] > 0 and pool["entries"] == 0 and pool["auto"] is True
    m = match(d, history)
    assert m["automatic"] is True and m["entry"] is None and m["matched_tokens"] % 64 == 0
    d.request("POST", "/admin/purge", {"kinds": ["automatic"]}, admin=True)
    assert d.get("/v1/pool")[1]["automatic_entries"] == 0 and d.memory()["kv_used"] == 0
    d.stop()


def test_a_chat_that_sends_its_whole_history_again_is_a_hit(start, model, tmp_path):
    d = start(model_dir=chat_model(model, tmp_path / "tiny"))
    messages, seen = [{"role": "user", "content": "the other inner thing " * 6}], 0
    for turn in range(4):
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0,
                "logit_bias": {str(i): -100 for i in range(299) if not 32 <= i < 127}} # so that text and ids agree
        status, r, _ = d.request("POST", "/v1/chat/completions", body)
        assert status == 200, r
        if turn:
            assert r["tinyloop"]["reuse"]["kind"] == "pool" and cached(r) >= seen // 64 * 64 > 0
        off = d.request("POST", "/v1/chat/completions", {**body, "pool": "off"})[1]
        assert off["choices"] == r["choices"] and cached(off) == 0
        seen = r["usage"]["prompt_tokens"]
        messages = messages + [{"role": "assistant", "content": r["choices"][0]["message"]["content"]},
                               {"role": "user", "content": f"and another {turn} " * 4}]
    d.stop()


def test_pool_off_leaves_nothing(start):
    d = start()
    ask(d, P, pool="off")
    assert d.get("/v1/pool")[1]["automatic_entries"] == 0
    ask(d, P)
    assert d.get("/v1/pool")[1]["automatic_entries"] == 1
    d.stop()


def test_automatic_entries_never_cost_explicit_ones(start):
    d = start("--max-seq-len", 512)
    m = d.memory()
    d.stop()
    budget = m["weights"] + m["scratch"] + 600 * m["page_bytes"]
    d = start("--max-seq-len", 512, "--memory-bytes", budget)
    e = register(d, P[:100], loops=4)
    put(d, "/v1/prefix_caches/kept", {"prompt": P[:150], "loops": 4})
    for i in range(40):
        ask(d, prompt(200 + i, 300), max_tokens=4)
    assert d.get(f"{ENTRIES}/{e['id']}")[0] == 200 and cached(ask(d, P[:100] + [1])) == 100
    assert cached(ask(d, [1], prefix_cache="kept")) == 150
    assert d.get("/v1/pool")[1]["evictions"] > 0
    d.stop()


def test_a_shallower_entry_that_keeps_its_state_is_deepened(start):
    """Across depths: no entry of the requested depth matches, so only the missing iterations run."""
    d = start("--pool-auto=false")
    put(d, "/v1/resume_handles/shallow", {"prompt": P[:100], "loops_used": 3, "max_loops": 8, "pool": True})
    r = ask(d, P, loops=7)
    assert reuse(r)["kind"] == "pool" and reuse(r)["id"] == "shallow" and reuse(r)["iterations_run"] == 4
    assert reuse(r)["iterations_skipped"] == 3 and cached(r) == 100
    assert answer(r) == answer(fresh(d, P, loops=7))
    assert match(d, P, loops=7)["deepens"] is True
    register(d, P[:80], loops=7) # the requested depth comes first, though it is shorter
    r = ask(d, P, loops=7)
    assert cached(r) == 80 and reuse(r)["iterations_run"] == 0
    assert d.request("PATCH", "/v1/resume_handles/shallow", {"pool": False})[0] == 200
    assert cached(ask(d, P, loops=6)) == 0
    e = register(d, P[:50], loops=2, max_loops=6) # registered so that it keeps its state
    r = ask(d, P, loops=6)
    assert reuse(r)["id"] == e["id"] and reuse(r)["iterations_run"] == 4 and cached(r) == 50
    assert answer(r) == answer(fresh(d, P, loops=6))
    d.stop()


# -- many at once

def test_nothing_foreign_under_concurrent_eviction(start):
    d = start("--pool-capacity", 2)
    prefixes = [prompt(300 + i, 70) for i in range(8)]
    want = [answer(fresh(d, p + [i])) for i, p in enumerate(prefixes)]
    wrong = []
    def client(k):
        r = random.Random(k)
        for _ in range(25):
            i = r.randrange(8)
            if r.random() < 0.3:
                d.request("POST", ENTRIES, {"prompt": prefixes[i]})
            elif answer(ask(d, prefixes[i] + [i])) != want[i]:
                wrong.append(i)
    threads = [threading.Thread(target=client, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    d.wait_idle()
    d.stop()


def test_history_does_not_show(start):
    """Ten prompts, each first on its own, then in many orders and mixed with every kind of reuse."""
    d = start()
    prompts = [prompt(400 + i, 20 + 17 * i) for i in range(10)]
    want = [answer(fresh(d, p)) for p in prompts]
    r = random.Random(5)
    for i in range(0, 10, 3):
        put(d, f"/v1/prefix_caches/h{i}", {"prompt": prompts[i][:15], "loops": 4, "pool": i % 2 == 0})
    put(d, "/v1/resume_handles/h", {"prompt": prompts[9][:64], "loops_used": 2, "max_loops": 4})
    for _ in range(12):
        order = list(range(10))
        r.shuffle(order)
        for i in order:
            kind = r.choice(["plain", "off", "named"])
            if kind == "named" and i % 3 == 0:
                got = ask(d, prompts[i][15:], prefix_cache=f"h{i}")
            elif kind == "named" and i == 9:
                got = ask(d, prompts[9][64:], resume={"handle": "h", "loops": 4})
            else:
                got = ask(d, prompts[i], pool="off" if kind == "off" else "auto")
            assert answer(got) == want[i], (i, kind)
    d.stop()


def test_every_prompt_of_a_batch_says_what_it_began_from(d):
    a, b = register(d, P[:100], loops=4)["id"], register(d, P[50:120], loops=4)["id"]
    prompts = [P[:90], P[:130], P[50:140], P[:130]] # a miss, two hits, one of them twice
    for n in (1, 2):
        r = ask(d, prompts, n=n)
        starts = r["tinyloop"]["reuse_by_prompt"]
        assert [(s["kind"], s["id"], s["matched_tokens"], s["suffix_tokens"]) for s in starts] == [
            ("none", None, 0, 90), ("pool", a, 100, 30), ("pool", b, 70, 20), ("pool", a, 100, 30)]
        assert {k: r["tinyloop"]["reuse"][k] for k in starts[0]} == starts[0] # the first one's, as ever
    assert "reuse_by_prompt" not in ask(d, prompts[0])["tinyloop"]
    last = d.stream(prompts, ignore_eos=True)[-2]
    assert [s["id"] for s in last["tinyloop"]["reuse_by_prompt"]] == [None, a, b, a]
