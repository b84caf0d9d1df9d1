"""/v1/prefix_caches: the life of a named prefix, and every way to get it wrong."""
import threading
import time

import pytest

from daemon import text_of
from reuse import answer, ask, cached, error, fresh, post, prompt, put, reuse

P = prompt(1, 150)
PATH = "/v1/prefix_caches"


@pytest.fixture
def cache(server, request):
    """A prefix cache of its own per test, named after it."""
    name = request.node.name.replace("[", "-").replace("]", "")[:60]
    reply, headers = put(server, f"{PATH}/{name}", {"model": "tiny", "prompt": P[:100], "loops": 3, "metadata": {"rev": "42"}})
    reply["ETag"] = headers["ETag"]
    yield reply
    server.request("DELETE", f"{PATH}/{name}")


def test_created_entry_has_the_documented_shape(server, cache):
    assert cache["object"] == "prefix_cache" and cache["status"] == "ready" and cache["tokens"] == 100
    assert cache["loops"] == 3 and cache["cache_window"] == 0 and cache["bytes"] > 0 and cache["uses"] == 0
    assert cache["in_flight"] == 0 and cache["pool"] is False and cache["metadata"] == {"rev": "42"}
    assert cache["model_fingerprint"].startswith("sha256:") and cache["content_digest"].startswith("sha256:")
    assert cache["ttl_seconds"] == 3600 and cache["expires_at"] == cache["created_at"] + 3600
    assert cache["last_used_at"] is None and cache["timings"]["prefill_ms"] > 0
    status, got, headers = server.get(f"{PATH}/{cache['id']}")
    assert status == 200 and headers["ETag"] == cache["ETag"] and got["content_digest"] == cache["content_digest"]


def test_location_and_server_made_id(server):
    status, r, headers = server.request("POST", PATH, {"prompt": P[:20]})
    assert status == 201 and r["id"].startswith("pc_") and len(r["id"]) == 29
    assert headers["Location"] == f"{PATH}/{r['id']}"
    assert server.request("DELETE", headers["Location"])[0] == 204


def test_a_hit_prefills_only_the_suffix_and_counters_move(server, cache):
    before = server.metrics()
    r = ask(server, P[100:], prefix_cache=cache["id"])
    assert cached(r) == 100 and reuse(r)["suffix_tokens"] == 50 and reuse(r)["kind"] == "prefix_cache"
    assert reuse(r)["id"] == cache["id"] and r["usage"]["prompt_tokens"] == 150
    after = server.metrics()
    key = 'tinyloop_prompt_tokens_cached_total{kind="prefix_cache"}'
    assert after[key] - before[key] == 100
    assert server.get(f"{PATH}/{cache['id']}")[1]["uses"] == 1
    assert answer(r) == answer(fresh(server, P, loops=3))


def test_an_empty_suffix_runs_nothing_of_the_stack(server, cache):
    server.wait_idle()
    before = server.status()["worker"]["row_loops"]
    r = ask(server, prefix_cache=cache["id"], max_tokens=1)
    server.wait_idle()
    assert server.status()["worker"]["row_loops"] == before and cached(r) == 100 and reuse(r)["suffix_tokens"] == 0
    for nothing in ("", []):
        assert answer(ask(server, nothing, prefix_cache=cache["id"], max_tokens=1)) == answer(r)
    assert answer(r) == answer(fresh(server, P[:100], loops=3, max_tokens=1))


def test_max_tokens_default_leaves_room_for_the_prefix(server):
    limit = server.get("/v1/models/tiny")[1]["limits"]["max_seq_len"]
    put(server, f"{PATH}/nearly-full", {"prompt": prompt(3, limit - 3), "loops": 1})
    body = {"model": "tiny", "prompt": [5], "prefix_cache": "nearly-full", "ignore_eos": True}
    status, r, _ = server.request("POST", "/v1/completions", body)
    assert status == 200 and r["usage"]["completion_tokens"] == 2
    r = ask(server, [5], prefix_cache="nearly-full", max_tokens=3, expect=400)
    assert error(r) == "context_length_exceeded"
    d = r["error"]["details"]
    assert d["prompt_tokens"] == limit - 2 and d["cached_tokens"] == limit - 3 and d["max_tokens"] == 3
    server.request("DELETE", f"{PATH}/nearly-full")


def test_text_suffix_has_no_special_tokens(server):
    put(server, f"{PATH}/text", {"prompt": "the inner ", "loops": 3})
    ids = server.request("POST", "/v1/tokenize", {"prompt": "the inner "})[1]["tokens"]
    more = server.request("POST", "/v1/tokenize", {"prompt": "ring", "add_special": False})[1]["tokens"]
    r = ask(server, "ring", prefix_cache="text")
    assert r["usage"]["prompt_tokens"] == len(ids) + len(more)
    assert answer(r) == answer(fresh(server, ids + more, loops=3))
    server.request("DELETE", f"{PATH}/text")


def test_if_missing_plain(server, cache):
    start = {"id": cache["id"], "if_missing": "plain"}
    hit = ask(server, P, prefix_cache=start, prompt_is_full=True)
    miss = ask(server, P, prefix_cache={"id": "never-was", "if_missing": "plain"}, prompt_is_full=True, loops=3, pool="off")
    assert cached(hit) == 100 and cached(miss) == 0 and reuse(miss)["kind"] == "none" and answer(hit) == answer(miss)
    assert error(ask(server, P, prefix_cache=start, expect=400)) == "bad_param"
    wrong = ask(server, P[:40] + [P[40] ^ 1] + P[41:], prefix_cache=start, prompt_is_full=True, expect=422)
    assert error(wrong) == "prefix_mismatch" and wrong["error"]["details"]["common_tokens"] == 40
    short = ask(server, P[:99], prefix_cache=start, prompt_is_full=True, expect=422)
    assert error(short) == "prefix_mismatch"


def test_streams_say_what_they_reused(server, cache):
    events = server.stream(P[100:], prefix_cache=cache["id"], ignore_eos=True)
    assert events[-1] == "[DONE]" and events[-2]["tinyloop"]["reuse"]["kind"] == "prefix_cache"
    assert events[-2]["tinyloop"]["reuse"]["matched_tokens"] == 100


def test_choices_and_batches_share_the_prefix(server, cache):
    kw = dict(prefix_cache=cache["id"], temperature=1, seed=11)
    r = ask(server, [P[100:120], P[100:130]], n=2, **kw)
    for i, cut in enumerate((120, 130)):
        alone = ask(server, P[:cut], loops=3, pool="off", n=2, temperature=1, seed=11)
        assert answer(alone) == answer(r)[2 * i:2 * i + 2]


# -- contract errors of the reference

def test_depth_and_window_must_be_the_entrys(server, cache):
    r = ask(server, prefix_cache=cache["id"], loops=5, expect=422)
    assert error(r) == "loop_depth_mismatch" and r["error"]["details"] == {"cache_loops": 3, "requested_loops": 5}
    assert r["error"]["param"] == "loops"
    r = ask(server, prefix_cache=cache["id"], cache_window=32, expect=422)
    assert error(r) == "cache_window_mismatch"
    assert r["error"]["details"] == {"entry_window": 0, "requested_window": 32}
    ask(server, prefix_cache=cache["id"], loops=3, cache_window=0)
    server.control()


def test_a_grammar_over_the_whole_text_must_accept_the_prefix(server):
    put(server, f"{PATH}/prose", {"prompt": "hello", "loops": 4})
    put(server, f"{PATH}/open", {"prompt": '{"a":', "loops": 4})
    put(server, "/v1/resume_handles/prose", {"prompt": "hello", "loops_used": 2, "max_loops": 4})
    post(server, "/v1/pool/entries", {"prompt": "hello", "loops": 4})
    rule = {"regex": '\\{"a":[0-9]{1,3}\\}', "max_tokens": 20, "ignore_eos": False}
    for start in ({"prefix_cache": "prose"}, {"resume": {"handle": "prose", "loops": 4}}):
        r = ask(server, "", grammar_scope="full", expect=422, **start, **rule)
        assert error(r) == "grammar_prefix_conflict" and r["error"]["details"]["token_index"] == 0
        text = ask(server, "", grammar_scope="completion", **start, **rule)["choices"][0]["text"]
        assert text.startswith('{"a":') and text.endswith("}")
    assert error(ask(server, "hello", grammar_scope="full", expect=422, **rule)) == "grammar_prefix_conflict"
    r = ask(server, "", prefix_cache="open", grammar_scope="full", **rule)
    assert r["choices"][0]["text"].endswith("}") and "{" not in r["choices"][0]["text"]
    assert answer(r) == answer(fresh(server, '{"a":', grammar_scope="full", **rule))
    for path in (f"{PATH}/prose", f"{PATH}/open", "/v1/resume_handles/prose"):
        server.request("DELETE", path)


@pytest.mark.parametrize("body,code,status", [
    ({"prompt": []}, "empty_prompt", 400),
    ({"prompt": ""}, "empty_prompt", 400),
    ({}, "invalid_type", 400),
    ({"prompt": 5}, "invalid_type", 400),
    ({"prompt": [1, 300]}, "token_out_of_vocab", 400),
    ({"prompt": [1, -1]}, "token_out_of_vocab", 400),
    ({"prompt": [1, 1.5]}, "invalid_token", 400),
    ({"prompt": [1], "loops": 0}, "loops_out_of_range", 400),
    ({"prompt": [1], "loops": 1000}, "loops_out_of_range", 400),
    ({"prompt": [1], "loops": "8"}, "invalid_type", 400),
    ({"prompt": [1], "loops": 2.5}, "invalid_type", 400),
    ({"prompt": [1], "cache_window": -1}, "cache_window_out_of_range", 400),
    ({"prompt": [1], "cache_window": 10**9}, "cache_window_out_of_range", 400),
    ({"prompt": [1] * 100000}, "context_length_exceeded", 400),
    ({"prompt": [1], "ttl_seconds": 0}, "out_of_range", 400),
    ({"prompt": [1], "ttl_seconds": -5}, "out_of_range", 400),
    ({"prompt": [1], "ttl_mode": "sometimes"}, "out_of_range", 400),
    ({"prompt": [1], "metadata": {"a": 1}}, "invalid_type", 400),
    ({"prompt": [1], "metadata": {str(i): "x" for i in range(17)}}, "out_of_range", 400),
    ({"prompt": [1], "metadata": {"k": "x" * 513}}, "out_of_range", 400),
    ({"prompt": [1], "colour": "red"}, "unknown_field", 400),
    ({"prompt": [1], "model": "other"}, "model_not_found", 404),
    ({"prompt": [1], "persist": "definition"}, "bad_param", 400),
    ({"prompt": [1], "persist": "everything"}, "out_of_range", 400),
    ({"messages": [{"role": "user", "content": "x"}]}, "unsupported", 400), # no chat template here
    ({"prompt": [1], "messages": [{"role": "user", "content": "x"}]}, "conflicting_reuse", 400),
    ({"prompt": [1], "add_generation_prompt": True}, "bad_param", 400),
    ({"from": {"pool_entry": "pe_nothing"}}, "pool_entry_not_found", 404),
    (b"{", "invalid_json", 400),
])
def test_refused_creations(server, body, code, status):
    got, r, _ = server.request("PUT", f"{PATH}/refused", body)
    assert (got, error(r)) == (status, code), r
    assert server.get(f"{PATH}/refused")[0] == 404 # nothing was left


@pytest.mark.parametrize("name", ["-x", ".x", "a%20b", "a/b", "x" * 65, "%2e%2e", "a%00b", "é"])
def test_names_that_are_none(server, name):
    path = f"{PATH}/{name.encode('utf-8').decode('latin-1') if name == 'é' else name}"
    with server.raw() as c:
        body = b'{"prompt":[1,2]}'
        c.send(f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
               f"Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body)
        status, _, _ = c.answer()
    assert status in (400, 404)


def test_unknown_and_odd_ids_in_requests(server):
    for bad in ["", "x" * 300, "../x", "a b", 5, ["x"]]:
        r = ask(server, [1], prefix_cache=bad, expect=400)
        assert error(r) in ("invalid_id", "invalid_type", "unknown_field"), (bad, r)
    r = ask(server, [1], prefix_cache="never-was", expect=404)
    assert error(r) == "prefix_cache_not_found" and r["error"]["type"] == "not_found_error"
    for method in ("GET", "PATCH", "DELETE"):
        status, r, _ = server.request(method, f"{PATH}/never-was", {"ttl_seconds": 5} if method == "PATCH" else None)
        assert (status, error(r)) == (404, "prefix_cache_not_found")
    assert error(post(server, f"{PATH}/never-was/verify", {}, 404)) == "prefix_cache_not_found"


def test_two_sources_at_once(server, cache):
    for more in ({"resume": {"handle": "x", "loops": 4}}, {"pool": "require"}):
        r = ask(server, [1], prefix_cache=cache["id"], expect=400, **more)
        assert error(r) == "conflicting_reuse"
    r = ask(server, [1], resume={"handle": "x", "loops": 4}, pool="require", expect=400)
    assert error(r) == "conflicting_reuse"
    r = ask(server, [1], prefix_cache=cache["id"], store_resume={}, expect=400)
    assert error(r) == "conflicting_reuse"


# -- idempotence, tags, replacement

def test_the_same_again_is_200_and_refreshes_the_time(server, cache):
    body = {"model": "tiny", "prompt": P[:100], "loops": 3, "ttl_seconds": 7200}
    built = server.metrics()['tinyloop_builds_total{kind="prefix_cache",result="built"}']
    r, headers = put(server, f"{PATH}/{cache['id']}", body, 200)
    assert r["expires_at"] >= cache["created_at"] + 7200 and headers["ETag"] == cache["ETag"]
    time.sleep(0.6)
    assert server.metrics()['tinyloop_builds_total{kind="prefix_cache",result="built"}'] == built


def test_other_content_is_409_unless_the_tag_matches(server, cache):
    path, body = f"{PATH}/{cache['id']}", {"prompt": P[:90], "loops": 3}
    status, r, headers = server.request("PUT", path, body)
    assert (status, error(r)) == (409, "id_already_exists") and headers["x-should-retry"] == "false"
    assert cache["ETag"].strip('"') in r["error"]["message"]
    status, r, _ = server.request("PUT", path, body, headers={"If-Match": '"00000000-1"'})
    assert (status, error(r)) == (412, "precondition_failed")
    r, headers = put(server, path, body, 201, headers={"If-Match": cache["ETag"]})
    assert r["tokens"] == 90 and headers["ETag"] != cache["ETag"]
    assert cached(ask(server, [1], prefix_cache=cache["id"])) == 90
    status, r, _ = server.request("PUT", path, {"prompt": P[:80]}, headers={"If-Match": cache["ETag"]})
    assert (status, error(r)) == (412, "precondition_failed")
    put(server, path, {"prompt": P[:80]}, 201, headers={"If-Match": "*"})


def test_a_failed_replacement_leaves_the_old_one(server, cache):
    path = f"{PATH}/{cache['id']}"
    before = answer(ask(server, P[100:], prefix_cache=cache["id"]))
    for body in ({"prompt": []}, {"prompt": [1] * 100000}, b"["):
        assert server.request("PUT", path, body, headers={"If-Match": "*"})[0] == 400
    assert answer(ask(server, P[100:], prefix_cache=cache["id"])) == before
    assert server.get(path)[2]["ETag"] == cache["ETag"]


def test_conditional_requests(server, cache):
    path = f"{PATH}/{cache['id']}"
    status, r, _ = server.request("PUT", path, {"prompt": P[:100], "loops": 3}, headers={"If-None-Match": "*"})
    assert (status, error(r)) == (412, "precondition_failed")
    assert server.get(path, headers={"If-None-Match": cache["ETag"]})[0] == 304
    assert server.get(path, headers={"If-None-Match": '"other"'})[0] == 200
    with server.raw() as c:
        c.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, _, headers = c.answer(head_only=True)
        assert status == 200 and headers["etag"] == cache["ETag"] and int(headers["content-length"]) > 0
        c.get("/version")
        assert c.answer()[0] == 200
    status, r, _ = server.request("DELETE", path, headers={"If-Match": '"00000000-1"'})
    assert (status, error(r)) == (412, "precondition_failed")
    assert server.request("DELETE", path, headers={"If-Match": cache["ETag"]})[0] == 204


def test_patch_changes_what_may_change(server, cache):
    path = f"{PATH}/{cache['id']}"
    status, r, headers = server.request("PATCH", path, {"ttl_seconds": 50, "ttl_mode": "sliding", "metadata": {"a": "b"},
                                                        "pool": True})
    assert status == 200 and headers["ETag"] != cache["ETag"]
    assert r["ttl_seconds"] == 50 and r["ttl_mode"] == "sliding" and r["metadata"] == {"a": "b"} and r["pool"] is True
    assert reuse(ask(server, P[:110], loops=3))["id"] == cache["id"]
    assert server.request("PATCH", path, {"pool": False, "metadata": None})[1]["metadata"] == {}
    assert server.request("PATCH", path, {"expires_at": 4102444800})[1]["expires_at"] == 4102444800
    for field in ("loops", "prompt", "id", "cache_window", "model", "nonsense"):
        status, r, _ = server.request("PATCH", path, {field: 1})
        assert (status, error(r)) == (422, "immutable_field") and r["error"]["param"] == field
    status, r, _ = server.request("PATCH", path, {"ttl_seconds": 9}, headers={"If-Match": cache["ETag"]})
    assert (status, error(r)) == (412, "precondition_failed")


def test_time_to_live(server):
    put(server, f"{PATH}/short", {"prompt": P[:20], "ttl_seconds": 1})
    put(server, f"{PATH}/slides", {"prompt": P[:21], "ttl_seconds": 3, "ttl_mode": "sliding"})
    put(server, f"{PATH}/forever", {"prompt": P[:22], "ttl_seconds": None})
    assert server.get(f"{PATH}/forever")[1]["expires_at"] is None
    for _ in range(6):
        time.sleep(0.7)
        ask(server, [1], prefix_cache="slides")
    status, r, _ = server.get(f"{PATH}/short")
    assert (status, error(r)) == (410, "resource_gone") and r["error"]["details"]["reason"] == "expired"
    assert error(ask(server, [1], prefix_cache="short", expect=410)) == "resource_gone"
    assert server.get(f"{PATH}/slides")[0] == 200
    for name in ("slides", "forever"):
        server.request("DELETE", f"{PATH}/{name}")


# -- lists

def test_lists_page_and_filter(start):
    d = start()
    for i in range(7):
        put(d, f"{PATH}/x{i}", {"prompt": P[:10 + i], "loops": 1 + i % 2})
    def ids(query):
        return [e["id"] for e in d.get(f"{PATH}?{query}")[1]["data"]]
    page = d.get(f"{PATH}?limit=3")[1]
    assert [e["id"] for e in page["data"]] == ["x0", "x1", "x2"] and page["has_more"]
    assert page["first_id"] == "x0" and page["last_id"] == "x2" and page["object"] == "list"
    assert ids("limit=3&after=x2") == ["x3", "x4", "x5"] and ids("after=x5") == ["x6"]
    assert ids("order=desc&limit=2") == ["x6", "x5"] and ids("loops=2") == ["x1", "x3", "x5"]
    assert ids("status=ready&limit=100") == [f"x{i}" for i in range(7)] and ids("status=building") == []
    for bad in ("limit=0", "limit=101", "limit=x", "order=up", "status=odd", "loops=99", "after=.."):
        status, r, _ = d.get(f"{PATH}?{bad}")
        assert status == 400, (bad, r)
    d.stop()


# -- many at once

def test_identical_concurrent_puts_are_one_build(slow_server):
    d = slow_server
    body = {"prompt": prompt(77, 600), "loops": 4}
    built = d.metrics()['tinyloop_builds_total{kind="prefix_cache",result="built"}']
    got = []
    def go(name):
        got.append(d.request("PUT", f"{PATH}/{name}", body)[0])
    threads = [threading.Thread(target=go, args=("same" if i % 2 else "twin",)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(got) == [200] * 6 + [201] * 2
    time.sleep(0.6)
    assert d.metrics()['tinyloop_builds_total{kind="prefix_cache",result="built"}'] - built == 1
    for name in ("same", "twin"):
        assert d.request("DELETE", f"{PATH}/{name}")[0] == 204


def test_respond_async(slow_server):
    d = slow_server
    path, body = f"{PATH}/later", {"prompt": prompt(5, 900), "loops": 8}
    status, r, headers = d.request("PUT", path, body, headers={"Prefer": "respond-async"})
    assert status == 202 and r["status"] == "building" and headers["Location"] == path
    assert headers["Preference-Applied"] == "respond-async"
    r = ask(d, [1], prefix_cache="later", expect=409)
    assert error(r) == "resource_building"
    end = time.time() + 30
    while d.get(path)[1]["status"] != "ready":
        assert time.time() < end
        time.sleep(0.02)
    assert cached(ask(d, [1], prefix_cache="later")) == 900
    d.request("DELETE", path)


def test_delete_during_a_build(slow_server):
    d = slow_server
    path = f"{PATH}/stopped"
    d.request("PUT", path, {"prompt": prompt(6, 900), "loops": 8}, headers={"Prefer": "respond-async"})
    assert d.request("DELETE", path)[0] in (204, 202)
    assert d.get(path)[0] == 410
    d.wait_idle()


def test_delete_while_in_use(slow_server):
    d = slow_server
    path = f"{PATH}/used"
    put(d, path, {"prompt": P, "loops": 4})
    whole = answer(ask(d, [7], prefix_cache="used", max_tokens=300))
    result = []
    t = threading.Thread(target=lambda: result.append(ask(d, [7], prefix_cache="used", max_tokens=300)))
    t.start()
    d.wait_running()
    status, r, headers = d.request("DELETE", f"{path}?if_busy=fail")
    assert (status, error(r)) == (409, "resource_in_use") and r["error"]["details"]["in_flight"] == 1
    assert "Retry-After" in headers
    status, r, _ = d.request("DELETE", path)
    assert status == 202 and r == {"id": "used", "status": "deleting", "in_flight": 1}
    assert error(d.request("DELETE", path)[1]) == "resource_gone"
    r = ask(d, [7], prefix_cache="used", expect=410)
    assert r["error"]["details"]["reason"] == "deleting"
    put(d, path, {"prompt": P[:50], "loops": 2}) # the name is free
    t.join()
    assert answer(result[0]) == whole
    assert cached(ask(d, [1], prefix_cache="used")) == 50
    d.request("DELETE", path)
    r = ask(d, [7], prefix_cache="used", expect=410)
    assert r["error"]["details"]["reason"] == "deleted"


def test_in_use_through_the_pool(slow_server):
    d = slow_server
    path, tokens = f"{PATH}/pooled", prompt(31, 100)
    want = answer(fresh(d, tokens + [7], loops=4, max_tokens=300))
    put(d, path, {"prompt": tokens, "loops": 4, "pool": True})
    result = []
    t = threading.Thread(target=lambda: result.append(ask(d, tokens + [7], loops=4, max_tokens=300)))
    t.start()
    d.wait_running()
    assert d.get(path)[1]["in_flight"] == 1
    status, r, _ = d.request("DELETE", f"{path}?if_busy=fail")
    assert (status, error(r)) == (409, "resource_in_use") and r["error"]["details"]["in_flight"] == 1
    status, r, _ = d.request("DELETE", path)
    assert status == 202 and r["in_flight"] == 1 and d.get(path)[0] == 410
    t.join()
    assert reuse(result[0])["id"] == "pooled" and answer(result[0]) == want


def test_replace_while_in_use(slow_server):
    d = slow_server
    path = f"{PATH}/swapped"
    put(d, path, {"prompt": P, "loops": 4})
    whole = answer(ask(d, [7], prefix_cache="swapped", max_tokens=200))
    result = []
    t = threading.Thread(target=lambda: result.append(ask(d, [7], prefix_cache="swapped", max_tokens=200)))
    t.start()
    d.wait_running()
    put(d, path, {"prompt": P[:50], "loops": 2}, headers={"If-Match": "*"})
    assert cached(ask(d, [7], prefix_cache="swapped")) == 50
    t.join()
    assert answer(result[0]) == whole
    d.request("DELETE", path)


def test_delete_frees_the_memory(start):
    d = start()
    put(d, f"{PATH}/a", {"prompt": P, "loops": 4})
    assert d.memory()["kv_held"] > 0
    assert d.request("DELETE", f"{PATH}/a")[0] == 204
    d.wait_idle()
    assert d.memory()["kv_used"] == 0 and d.memory()["kv_held"] == 0
    d.stop()


def test_a_client_that_leaves_a_post_leaves_nothing(slow_server):
    d = slow_server
    c = d.raw()
    c.post(PATH, {"prompt": prompt(8, 1000), "loops": 16})
    end = time.time() + 10
    while not d.status()["worker"]["sequences_running"]:
        assert time.time() < end
    c.sock.close()
    end = time.time() + 10
    while [e for e in d.get(PATH)[1]["data"] if e["tokens"] == 1000]:
        assert time.time() < end
        time.sleep(0.02)
    d.wait_idle()


def test_idempotency_key(server):
    body, headers = {"prompt": P[:33], "loops": 2}, {"Idempotency-Key": "k-1"}
    a = post(server, PATH, body, 201, headers=headers)
    b = post(server, PATH, body, 200, headers=headers)
    assert a["id"] == b["id"]
    assert error(post(server, PATH, {"prompt": P[:34], "loops": 2}, 422, headers=headers)) == "idempotency_key_reused"
    server.request("DELETE", f"{PATH}/{a['id']}")


def test_verify_proves_equality(server, cache):
    r = post(server, f"{PATH}/{cache['id']}/verify", {"max_tokens": 32}, 200)
    assert r["equal"] is True and r["tokens_compared"] == 32 and r["first_difference"] is None
    assert r["fresh"]["prefilled_tokens"] == 100 and r["reused"]["prefilled_tokens"] == 0
    assert r["reused"]["reused_tokens"] == 100 and r["reused"]["row_loops"] == r["fresh"]["row_loops"] - 300
    with_default = server.request("POST", f"{PATH}/{cache['id']}/verify")
    assert with_default[0] == 200 and with_default[1]["equal"] is True
    assert error(post(server, f"{PATH}/{cache['id']}/verify", {"max_tokens": 0}, 400)) == "out_of_range"


def test_estimate_is_what_is_measured(server):
    for kind, path, extra in (("prefix_cache", PATH, {"loops": 5}),
                              ("resume_handle", "/v1/resume_handles", {"loops_used": 2, "max_loops": 6})):
        e = post(server, "/v1/estimate", {"kind": kind, "tokens": 130, **extra}, 200)
        r = post(server, path, {"prompt": P[:130], **extra})
        assert e["bytes"] == r["bytes"] and e["fits"] is True and e["bytes_free"] > 0
        assert e["bytes_unused"] == r.get("bytes_unused", 0)
        server.request("DELETE", f"{path}/{r['id']}")
    assert post(server, "/v1/estimate", {"prompt": P[:77]}, 200)["tokens"] == 77
    assert post(server, "/v1/estimate", {"tokens": 100}, 200)["prefill_ms"] > 0
    assert error(post(server, "/v1/estimate", {"kind": "soup", "tokens": 1}, 400)) == "out_of_range"


def test_echo_is_the_whole_prompt(server):
    put(server, f"{PATH}/said", {"prompt": "the end of \u00e9", "loops": 2})
    plain = server.complete("the end of \u00e9 another", loops=2, echo=True, pool="off", max_tokens=0)["choices"][0]["text"]
    assert plain == "the end of \u00e9 another"
    suffix = server.complete(" another", prefix_cache="said", echo=True, max_tokens=6)
    text = suffix["choices"][0]["text"]
    assert text.startswith(plain) and cached(suffix) > 0
    assert text == plain + server.complete(" another", prefix_cache="said", max_tokens=6)["choices"][0]["text"]
    assert server.complete([], prefix_cache="said", echo=True, max_tokens=0)["choices"][0]["text"] == "the end of \u00e9"
    whole = server.complete("the end of \u00e9 another", prefix_cache="said", prompt_is_full=True, echo=True, max_tokens=0)
    assert whole["choices"][0]["text"] == plain
    events = server.stream(" another", prefix_cache="said", echo=True)
    assert text_of(events).startswith(plain)
    put(server, f"{PATH}/cut", {"prompt": [0xC3], "loops": 2}) # half a character, completed by the suffix
    assert server.complete([0xA9], prefix_cache="cut", echo=True, max_tokens=0)["choices"][0]["text"] == "\u00e9"
    r = server.complete(" another", prefix_cache="said", echo=True, logprobs=1, expect=400)
    assert error(r) == "unsupported_parameter" and r["error"]["param"] == "logprobs"
    for name in ("said", "cut"):
        server.request("DELETE", f"{PATH}/{name}")
