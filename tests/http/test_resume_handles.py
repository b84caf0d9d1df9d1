"""/v1/resume_handles: going on deeper without computing the first iterations again."""
import threading

import pytest

from reuse import answer, ask, cached, error, fresh, post, prompt, put, reuse

P = prompt(2, 120)
PATH = "/v1/resume_handles"


@pytest.fixture(scope="module")
def handle(server):
    r, _ = put(server, f"{PATH}/h", {"model": "tiny", "prompt": P[:90], "loops_used": 4, "max_loops": 8, "ttl_seconds": 600})
    yield r
    server.request("DELETE", f"{PATH}/h")


def test_shape(server, handle):
    assert handle["object"] == "resume_handle" and handle["loops_used"] == 4 and handle["max_loops"] == 8
    assert handle["tokens"] == 90 and handle["bytes"] > handle["bytes_unused"] > 0 and handle["resumes"] == 0
    r = post(server, PATH, {"prompt": P[:30], "loops_used": 1, "max_loops": 16, "cache_window": 0})
    assert r["id"].startswith("rh_")
    assert server.request("DELETE", f"{PATH}/{r['id']}")[0] == 204


@pytest.mark.parametrize("loops", [4, 5, 6, 8])
@pytest.mark.parametrize("suffix", [0, 30])
def test_resume_runs_only_the_missing_iterations(server, handle, loops, suffix):
    r = ask(server, P[90:90 + suffix], resume={"handle": "h", "loops": loops})
    assert reuse(r) == {"kind": "resume_handle", "id": "h", "matched_tokens": 90, "suffix_tokens": suffix,
                        "iterations_run": loops - 4, "iterations_skipped": 4}
    assert cached(r) == 90 and r["usage"]["prompt_tokens"] == 90 + suffix and r["tinyloop"]["loops"] == loops
    assert r["tinyloop"]["exact"] is True
    assert answer(r) == answer(fresh(server, P[:90 + suffix], loops=loops))


def test_the_rows_of_a_resume_are_counted(server, handle):
    row_loops = lambda: server.status()["worker"]["row_loops"]
    server.wait_idle()
    start = row_loops()
    ask(server, resume={"handle": "h", "loops": 8}, max_tokens=1)
    server.wait_idle()
    middle = row_loops()
    fresh(server, P[:90], loops=8, max_tokens=1)
    server.wait_idle()
    assert middle - start == 90 * 4 and row_loops() - middle == 90 * 8


def test_a_handle_never_changes(server, handle):
    first = {}
    for loops in (8, 6, 8, 5, 8, 4, 7, 6):
        a = answer(ask(server, P[90:], resume={"handle": "h", "loops": loops}))
        assert first.setdefault(loops, a) == a
    assert server.get(f"{PATH}/h")[1]["bytes"] == handle["bytes"]


def test_seeded_sampling_is_the_same_on_every_path(server, handle):
    kw = dict(temperature=0.8, seed=42, max_tokens=24)
    want = answer(fresh(server, P, loops=6, **kw))
    for _ in range(2):
        assert answer(ask(server, P[90:], resume={"handle": "h", "loops": 6}, **kw)) == want
    results = []
    threads = [threading.Thread(target=lambda: results.append(answer(ask(server, P[90:], resume={"handle": "h", "loops": 6}, **kw))))
               for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [want] * 6


def test_decode_depth(server, handle):
    r = ask(server, resume={"handle": "h", "loops": 8}, loops=5)
    assert r["tinyloop"]["exact"] is False
    assert answer(r) == answer(ask(server, resume={"handle": "h", "loops": 8}, loops=5))
    assert ask(server, resume={"handle": "h", "loops": 8}, loops=8)["tinyloop"]["exact"] is True
    r = ask(server, resume={"handle": "h", "loops": 6}, loops=7, expect=422)
    assert error(r) == "decode_depth_unpopulated" and r["error"]["details"] == {"available": 6, "got": 7}


def test_choices_of_a_resume_are_those_of_a_fresh_request(server, handle):
    kw = dict(n=3, temperature=1, seed=9)
    assert answer(ask(server, resume={"handle": "h", "loops": 7}, **kw)) == answer(fresh(server, P[:90], loops=7, **kw))


@pytest.mark.parametrize("loops,status,code", [
    (3, 422, "resume_depth_out_of_range"), (9, 422, "resume_depth_out_of_range"), (0, 422, "resume_depth_out_of_range"),
    (-1, 422, "resume_depth_out_of_range"), (10**9, 422, "resume_depth_out_of_range"), (4.5, 400, "invalid_type"),
    ("8", 400, "invalid_type"), (None, 400, "invalid_type"), (True, 400, "invalid_type"),
])
def test_depths_that_the_handle_has_not(server, handle, loops, status, code):
    r = ask(server, resume={"handle": "h", "loops": loops}, expect=status)
    assert error(r) == code
    if status == 422:
        assert r["error"]["details"]["loops_used"] == 4 and r["error"]["details"]["max_loops"] == 8
    server.control()


@pytest.mark.parametrize("body,code", [
    ({"loops_used": 0, "max_loops": 8}, "loops_used_out_of_range"),
    ({"loops_used": 9, "max_loops": 8}, "loops_used_out_of_range"),
    ({"loops_used": -1, "max_loops": 8}, "loops_used_out_of_range"),
    ({"loops_used": 4, "max_loops": 65}, "max_loops_exceeded"),
    ({"loops_used": 4, "max_loops": 2147483648}, "max_loops_exceeded"),
    ({"loops_used": 4, "max_loops": 4294967300}, "max_loops_exceeded"),
    ({"loops_used": 4.5, "max_loops": 8}, "invalid_type"),
    ({"loops_used": "4", "max_loops": 8}, "invalid_type"),
    ({"loops_used": 4, "max_loops": [8]}, "invalid_type"),
    ({"loops": 4}, "unknown_field"),
    ({"loops_used": 4, "max_loops": 8, "prompt": []}, "empty_prompt"),
    ({"loops_used": 4, "max_loops": 8, "cache_window": -2}, "cache_window_out_of_range"),
])
def test_refused_creations(server, body, code):
    status, r, _ = server.request("POST", PATH, {"prompt": P[:20], **body})
    assert (status, error(r)) == (400, code), r
    server.control()


def test_unknown_handles(server):
    assert error(ask(server, resume={"handle": "never", "loops": 4}, expect=404)) == "resume_handle_not_found"
    assert error(server.get(f"{PATH}/never")[1]) == "resume_handle_not_found"
    put(server, "/v1/prefix_caches/is-a-pc", {"prompt": P[:20]})
    assert error(ask(server, resume={"handle": "is-a-pc", "loops": 4}, expect=404)) == "resume_handle_not_found"
    server.request("DELETE", "/v1/prefix_caches/is-a-pc")


def test_windowed_handles(server):
    put(server, f"{PATH}/w", {"prompt": P[:100], "loops_used": 3, "max_loops": 8, "cache_window": 64})
    r = ask(server, P[100:], resume={"handle": "w", "loops": 6})
    assert answer(r) == answer(fresh(server, P, loops=6, cache_window=64))
    assert answer(r) != answer(fresh(server, P, loops=6))
    r = ask(server, P[100:], resume={"handle": "w", "loops": 6}, cache_window=32, expect=422)
    assert error(r) == "cache_window_mismatch" and r["error"]["details"] == {"entry_window": 64, "requested_window": 32}
    ask(server, prompt(50, 400), max_tokens=4)
    assert answer(ask(server, P[100:], resume={"handle": "w", "loops": 6})) == answer(fresh(server, P, loops=6, cache_window=64))
    server.request("DELETE", f"{PATH}/w")


def test_promote(server, handle):
    r = post(server, f"{PATH}/h/promote", {"loops": 7, "id": "deep", "ttl_seconds": 60})
    assert r["object"] == "prefix_cache" and r["loops"] == 7 and r["tokens"] == 90 and r["id"] == "deep"
    assert r["timings"]["resume_ms"] > 0 and r["timings"]["prefill_ms"] == 0
    hit = ask(server, P[90:], prefix_cache="deep")
    assert reuse(hit)["iterations_run"] == 0 and cached(hit) == 90
    assert answer(hit) == answer(fresh(server, P, loops=7))
    assert answer(ask(server, P[90:], resume={"handle": "h", "loops": 6})) == answer(fresh(server, P, loops=6))
    for loops in (3, 9):
        r = post(server, f"{PATH}/h/promote", {"loops": loops, "id": "other"}, 422)
        assert error(r) == "resume_depth_out_of_range" and r["error"]["details"]["got"] == loops
    assert error(post(server, f"{PATH}/h/promote", {"id": "other"}, 400)) == "invalid_type"
    assert error(post(server, f"{PATH}/never/promote", {"loops": 6}, 404)) == "resume_handle_not_found"
    assert error(post(server, f"{PATH}/h/promote", {"loops": 8, "id": "deep"}, 409)) == "id_already_exists"
    named = post(server, f"{PATH}/h/promote", {"loops": 4})
    assert named["id"].startswith("pc_")
    for name in ("deep", named["id"]):
        assert server.request("DELETE", f"/v1/prefix_caches/{name}")[0] == 204


def test_think_deeper_without_sending_the_prompt_again(server):
    draft = ask(server, P, loops=4, store_resume={"max_loops": 16, "ttl_seconds": 300})
    kept = draft["tinyloop"]["resume_handle"]
    assert kept["loops_used"] == 4 and kept["max_loops"] == 16
    assert answer(draft) == answer(fresh(server, P, loops=4))
    state = server.get(f"{PATH}/{kept['id']}")[1]
    assert state["tokens"] == len(P) and state["ttl_seconds"] == 300 and state["status"] == "ready"
    deeper = ask(server, resume={"handle": kept["id"], "loops": 12})
    assert answer(deeper) == answer(fresh(server, P, loops=12)) and reuse(deeper)["iterations_run"] == 8
    events = server.stream(P, loops=4, store_resume={}, ignore_eos=True)
    assert events[-2]["tinyloop"]["resume_handle"]["id"].startswith("rh_")
    assert error(ask(server, P, store_resume={"max_loops": 65}, expect=400)) == "max_loops_exceeded"
    assert error(ask(server, P, store_resume={}, n=2, expect=400)) == "unsupported_parameter"
    assert ask(server, P, store_resume={}, loops="auto", expect=400)
    assert error(ask(server, P, loops=6, store_resume={"max_loops": 5}, expect=400)) == "loops_used_out_of_range"
    for e in server.get(PATH)[1]["data"]:
        if e["id"].startswith("rh_"):
            server.request("DELETE", f"{PATH}/{e['id']}")


def test_verify_at_every_depth(server, handle):
    for loops in (4, 5, 8):
        r = post(server, f"{PATH}/h/verify", {"loops": loops, "max_tokens": 16}, 200)
        assert r["equal"] is True and r["reused"]["iterations_run"] == loops - 4
    assert error(post(server, f"{PATH}/h/verify", {"loops": 9}, 422)) == "resume_depth_out_of_range"


def test_one_resume_to_the_bottom_never_fails_for_memory(start):
    d = start("--max-seq-len", 512)
    page, m = d.memory()["page_bytes"], d.memory()
    d.stop()
    budget = m["weights"] + m["scratch"] + 700 * page
    d = start("--max-seq-len", 512, "--memory-bytes", budget)
    d.request("PUT", f"{PATH}/big", {"prompt": prompt(3, 200), "loops_used": 2, "max_loops": 16})
    want = answer(ask(d, resume={"handle": "big", "loops": 16}, max_tokens=4))
    i, status = 0, 201
    while status == 201: # fill what is left with named entries
        status, r, h = d.request("PUT", f"/v1/prefix_caches/fill{i}", {"prompt": prompt(100 + i, 130), "loops": 4})
        i += 1
        assert i < 200
    assert (status, error(r)) == (507, "out_of_device_memory") and h["x-should-retry"] == "false"
    assert r["error"]["details"]["needed"] > r["error"]["details"]["free"]
    results = []
    threads = [threading.Thread(target=lambda: results.append(ask(d, resume={"handle": "big", "loops": 16}, max_tokens=4)))
               for _ in range(4)]
    for t in threads: # more at once wait for their turn
        t.start()
    for t in threads:
        t.join()
    assert [answer(r) for r in results] == [want] * 4
    d.stop()


def test_memory_that_a_handle_lends_serves_every_form_of_a_request(start):
    """Several choices, several suffixes and the pool's deepening: with memory full they take turns, and none fails."""
    d = start("--max-seq-len", 512, "--pool-auto=true")
    page, m = d.memory()["page_bytes"], d.memory()
    d.stop()
    d = start("--max-seq-len", 512, "--memory-bytes", m["weights"] + m["scratch"] + 700 * page)
    big = prompt(3, 200)
    d.request("PUT", f"{PATH}/big", {"prompt": big, "loops_used": 2, "max_loops": 16, "pool": True})
    asks = {"choices": dict(n=3, resume={"handle": "big", "loops": 16}, seed=5, temperature=1),
            "batch": dict(tokens=[[1], [2, 3], [4]], resume={"handle": "big", "loops": 16}),
            "both": dict(tokens=[[1], [2, 3]], n=2, resume={"handle": "big", "loops": 16}),
            "pool": dict(tokens=big + [1, 2], loops=16)}
    roomy = {name: ask(d, max_tokens=4, **how) for name, how in asks.items()}
    assert roomy["pool"]["tinyloop"]["reuse"]["id"] == "big" and reuse(roomy["pool"])["iterations_run"] == 14
    i, status = 0, 201
    while status == 201:
        status, r, _ = d.request("PUT", f"/v1/prefix_caches/fill{i}", {"prompt": prompt(100 + i, 130), "loops": 4})
        i += 1
        assert i < 200
    for name, how in asks.items():
        tight = ask(d, max_tokens=4, **how)
        assert answer(tight) == answer(roomy[name]), name
        assert reuse(tight)["id"] == "big" and reuse(tight)["iterations_run"] == 14
    results = []
    threads = [threading.Thread(target=lambda how=how: results.append(answer(ask(d, max_tokens=4, **how))))
               for how in asks.values()]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(map(str, results)) == sorted(str(answer(r)) for r in roomy.values())
    d.wait_idle()
    d.stop()
