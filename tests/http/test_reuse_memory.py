"""One budget for everything: caches can be refused, what was admitted cannot fail, and deleted means free."""
import pathlib
import threading

import pytest

from reuse import answer, ask, cached, error, fresh, post, prompt, put, reuse

PAGES = 600


@pytest.fixture
def small(start):
    """A daemon whose budget for state is PAGES pages."""
    d = start("--max-seq-len", 512)
    m = d.memory()
    d.stop()
    d = start("--max-seq-len", 512, "--memory-bytes", m["weights"] + m["scratch"] + PAGES * m["page_bytes"])
    yield d
    d.wait_idle()
    d.stop()


def fill(d):
    """Named entries until one is refused; their names, and the refusal."""
    names = []
    for i in range(200):
        status, r, headers = d.request("PUT", f"/v1/prefix_caches/fill{i}", {"prompt": prompt(i, 128), "loops": 4})
        if status != 201:
            return names, status, r, headers
        names.append(f"fill{i}")
    raise AssertionError("nothing was refused")


def test_creation_past_the_budget_is_507_and_leaves_nothing(small):
    names, status, r, headers = fill(small)
    assert (status, error(r)) == (507, "out_of_device_memory") and headers["x-should-retry"] == "false"
    assert r["error"]["type"] == "insufficient_storage_error" and r["error"]["details"]["needed"] > r["error"]["details"]["free"]
    m = small.memory()
    assert m["kv_held"] + m["kv_sequence_reserve"] <= m["kv_total"]
    entry = small.get("/v1/prefix_caches/fill0")[1]
    assert m["entries"]["prefix_cache"]["bytes"] == entry["bytes"] * len(names) == m["kv_held"]
    e = post(small, "/v1/estimate", {"tokens": 128, "loops": 4}, 200)
    assert e["fits"] is False and e["bytes"] == entry["bytes"]
    assert error(post(small, "/v1/pool/entries", {"prompt": prompt(999, 128), "loops": 4}, 507)) == "out_of_device_memory"
    r = post(small, "/v1/resume_handles", {"prompt": prompt(998, 128), "loops_used": 4, "max_loops": 8}, 507)
    assert error(r) == "out_of_device_memory"
    assert small.request("DELETE", f"/v1/prefix_caches/{names[0]}")[0] == 204
    put(small, "/v1/prefix_caches/again", {"prompt": prompt(77, 128), "loops": 4})


def test_generation_cannot_run_out_because_of_caches(small):
    want = answer(fresh(small, prompt(500, 400), max_tokens=100))
    names = fill(small)[0]
    assert answer(ask(small, prompt(500, 400), max_tokens=100)) == want # the longest one there is
    results = []
    def one(i):
        results.append((i, answer(ask(small, prompt(i, 20), prefix_cache=names[i % len(names)], max_tokens=50))))
    threads = [threading.Thread(target=one, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 16
    for i, got in results[:4]:
        assert got == answer(fresh(small, prompt(i % len(names), 128) + prompt(i, 20), loops=4, max_tokens=50))


def test_a_request_larger_than_everything(start):
    d = start("--max-seq-len", 2048)
    m = d.memory()
    d.stop()
    d = start("--max-seq-len", 1000, "--memory-bytes", m["weights"] + m["scratch"] + 400 * m["page_bytes"])
    r = ask(d, prompt(1, 900), loops=16, expect=400)
    assert error(r) == "request_exceeds_memory" and r["error"]["details"]["needed"] > r["error"]["details"]["budget"]
    status, r, _ = d.request("PUT", "/v1/prefix_caches/x", {"prompt": prompt(1, 900), "loops": 16})
    assert status in (400, 507), r
    d.stop()


def test_idle_pool_entries_give_way_before_a_refusal(small):
    for i in range(6):
        post(small, "/v1/pool/entries", {"prompt": prompt(i, 64), "loops": 4})
    names, status, r, _ = fill(small)
    assert status == 507 and small.get("/v1/pool")[1]["entries"] == 0
    assert all(small.get(f"/v1/prefix_caches/{n}")[0] == 200 for n in names)


def test_idle_pool_entries_count_as_free(small):
    big = {"tokens": 400, "loops": 4}
    before = post(small, "/v1/estimate", big, 200)
    assert before["bytes_evictable"] == 0 and before["fits"] is True
    for i in range(16): # as many as the pool holds; each is the beginning of the next, so their pages are shared
        post(small, "/v1/pool/entries", {"prompt": prompt(5, 20 * (i + 1)), "loops": 4})
    for i in range(40): # what conversations leave behind
        ask(small, prompt(300 + i, 300), max_tokens=2)
    small.wait_idle()
    now = post(small, "/v1/estimate", big, 200)
    assert now["bytes_free"] < now["bytes"] and now["fits"] is True
    assert now["bytes_evictable"] == small.memory()["kv_held"] # nothing else holds anything
    put(small, "/v1/prefix_caches/big", {"prompt": prompt(7, 400), "loops": 4})


def test_clones_share_one_copy(small):
    put(small, "/v1/prefix_caches/x", {"prompt": prompt(5, 256), "loops": 4})
    held = small.memory()["kv_held"]
    threads = [threading.Thread(target=lambda: ask(small, [1], prefix_cache="x", max_tokens=8, pool="off")) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    small.wait_idle()
    m = small.memory()
    assert m["kv_held"] == held and m["kv_used_peak"] - held < 16 * 40 * m["page_bytes"]


def rss(d):
    for line in pathlib.Path(f"/proc/{d.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])


def test_nothing_is_left_by_many_lives(start):
    """Create, use, fail and delete again and again: memory and descriptors stay where they are."""
    d = start("--pool-auto=false")
    def round_(i):
        put(d, f"/v1/prefix_caches/a{i}", {"prompt": prompt(i, 70), "loops": 2, "metadata": {"k": "v" * 100}})
        ask(d, [1], prefix_cache=f"a{i}", max_tokens=2)
        ask(d, [1], prefix_cache=f"a{i}", loops=7, expect=422)
        ask(d, [1], prefix_cache="none", expect=404)
        d.request("PUT", f"/v1/prefix_caches/a{i}", {"prompt": [1, 2]})
        d.request("PATCH", f"/v1/prefix_caches/a{i}", {"metadata": {"z": "y" * 200}})
        d.request("POST", "/v1/pool/match", {"prompt": prompt(i, 200)})
        d.request("DELETE", f"/v1/prefix_caches/a{i}")
    for i in range(60):
        round_(i)
    d.wait_idle()
    before, files = rss(d), len(list(pathlib.Path(f"/proc/{d.process.pid}/fd").iterdir()))
    for i in range(60, 260):
        round_(i)
    d.wait_idle()
    assert rss(d) - before < 1600 # kB over 1600 requests
    assert len(list(pathlib.Path(f"/proc/{d.process.pid}/fd").iterdir())) <= files + 2
    assert d.memory()["kv_used"] == 0
    d.stop()
