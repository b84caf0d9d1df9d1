"""What was confirmed is there again after a restart or a kill at any moment; a changed model is an answer, not a wrong one."""
import pathlib
import random
import signal
import threading
import time

import pytest

import tinymodel
from daemon import SLOW, TINYLOOP
from reuse import answer, ask, cached, error, fresh, post, prompt, put, reuse

P = prompt(6, 150)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def kill(d):
    d.process.send_signal(signal.SIGKILL)
    d.process.wait()


def test_entries_are_stored_then_answer_again(start, state):
    d = start("--state-dir", state)
    put(d, "/v1/prefix_caches/pc", {"prompt": P[:100], "loops": 3, "metadata": {"rev": "42"}, "pool": True, "ttl_seconds": None})
    put(d, "/v1/resume_handles/rh", {"prompt": P[:90], "loops_used": 2, "max_loops": 8})
    pe = post(d, "/v1/pool/entries", {"prompt": P[:80], "loops": 5})["id"]
    put(d, "/v1/prefix_caches/gone", {"prompt": P[:20]})
    put(d, "/v1/prefix_caches/memory-only", {"prompt": P[:21], "persist": "none"})
    d.request("DELETE", "/v1/prefix_caches/gone")
    before = d.get("/v1/prefix_caches/pc")[1]
    want = [answer(fresh(d, P, loops=n)) for n in (3, 6, 5)]
    kill(d)
    d = start("--state-dir", state)
    r = d.get("/v1/prefix_caches/pc")[1]
    assert r["status"] == "stored" and r["bytes"] == 0
    for field in ("content_digest", "etag", "metadata", "created_at", "expires_at", "tokens", "loops", "pool", "model_fingerprint"):
        assert r[field] == before[field], field
    assert d.get("/v1/resume_handles/rh")[1]["status"] == "stored"
    assert d.get("/v1/prefix_caches/gone")[0] == 404 and d.get("/v1/prefix_caches/memory-only")[0] == 404
    assert [e["id"] for e in d.get("/v1/prefix_caches?status=stored")[1]["data"]] == ["pc"]
    assert d.memory()["kv_used"] == 0 # nothing was computed yet
    got = ask(d, P[100:], prefix_cache="pc") # the first use waits for it
    assert answer(got) == want[0] and cached(got) == 100
    assert d.get("/v1/prefix_caches/pc")[1]["status"] == "ready"
    assert answer(ask(d, P[90:], resume={"handle": "rh", "loops": 6})) == want[1]
    got = ask(d, P, loops=5) # so does a first match
    assert answer(got) == want[2] and reuse(got)["id"] == pe and cached(got) == 80
    for name in ("pc",):
        assert post(d, f"/v1/prefix_caches/{name}/verify", {}, 200)["equal"] is True
    d.stop()


def test_many_first_uses_at_once_are_one_computation(start, state):
    d = start("--state-dir", state)
    put(d, "/v1/prefix_caches/x", {"prompt": P, "loops": 4})
    kill(d)
    d = start("--state-dir", state)
    results = []
    threads = [threading.Thread(target=lambda: results.append(answer(ask(d, [5], prefix_cache="x")))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [answer(fresh(d, P + [5], loops=4))] * 8
    time.sleep(0.6)
    assert d.metrics()['tinyloop_builds_total{kind="prefix_cache",result="built"}'] == 1
    d.stop()


def test_rebuilding_at_the_start(start, state):
    d = start("--state-dir", state)
    for i in range(4):
        put(d, f"/v1/prefix_caches/x{i}", {"prompt": P[:40 + i], "loops": 4})
    d.stop()
    d = start("--state-dir", state, "--rebuild-at-start")
    end = time.time() + 20
    while len(d.get("/v1/prefix_caches?status=ready")[1]["data"]) < 4:
        assert time.time() < end
        time.sleep(0.02)
    d.stop()


def test_changes_are_durable_too(start, state):
    d = start("--state-dir", state)
    put(d, "/v1/prefix_caches/x", {"prompt": P[:40], "loops": 4})
    tag = put(d, "/v1/prefix_caches/x", {"prompt": P[:50], "loops": 4}, headers={"If-Match": "*"})[1]["ETag"]
    r = d.request("PATCH", "/v1/prefix_caches/x", {"ttl_seconds": 5000, "metadata": {"a": "b"}})
    assert r[2]["ETag"] != tag
    put(d, "/v1/prefix_caches/short", {"prompt": P[:30], "ttl_seconds": 1})
    put(d, "/v1/prefix_caches/slides", {"prompt": P[:31], "ttl_seconds": 5, "ttl_mode": "sliding"})
    time.sleep(2.7)
    ask(d, [1], prefix_cache="slides")
    time.sleep(2.7) # past its first end, but it was used
    kill(d)
    d = start("--state-dir", state)
    got = d.get("/v1/prefix_caches/x")
    assert got[1]["tokens"] == 50 and got[1]["metadata"] == {"a": "b"} and got[2]["ETag"] == r[2]["ETag"]
    assert d.get("/v1/prefix_caches/short")[0] in (404, 410)
    assert d.get("/v1/prefix_caches/slides")[0] == 200
    d.stop()
    assert not list(pathlib.Path(state).glob("*.tmp")) and not list(pathlib.Path(state).glob("*.bad"))


def test_another_model_makes_them_gone(start, state, tmp_path):
    d = start("--state-dir", state)
    put(d, "/v1/prefix_caches/x", {"prompt": P[:40], "loops": 4})
    d.stop()
    (tmp_path / "other").mkdir()
    other = tinymodel.make(TINYLOOP, tmp_path / "other" / "tiny", core_layers=3)
    d = start("--state-dir", state, model_dir=other)
    status, r, _ = d.get("/v1/prefix_caches/x")
    assert (status, error(r)) == (410, "resource_gone") and r["error"]["details"]["reason"] == "model_changed"
    assert error(ask(d, [1], prefix_cache="x", expect=410)) == "resource_gone"
    put(d, "/v1/prefix_caches/x", {"prompt": P[:41], "loops": 4}) # may be made again
    d.stop()


def test_damaged_files_are_set_aside_with_one_line_each(start, state):
    d = start("--state-dir", state)
    for i in range(3):
        put(d, f"/v1/prefix_caches/x{i}", {"prompt": P[:40 + i], "loops": 4})
    d.stop()
    files = sorted(pathlib.Path(state).glob("*.def"))
    files[0].write_bytes(files[0].read_bytes()[:-10])
    raw = bytearray(files[1].read_bytes())
    raw[len(raw) // 2] ^= 4
    files[1].write_bytes(raw)
    (pathlib.Path(state) / "strange.def").write_text("hello")
    d = start("--state-dir", state)
    assert len(d.get("/v1/prefix_caches")[1]["data"]) == 1
    assert d.log.count("set aside") == 3
    d.control()
    d.stop()
    d = start("--state-dir", state)
    assert d.log.count("set aside") == 0
    d.stop()


def test_one_server_per_directory(start, state):
    d = start("--state-dir", state)
    second = start("--state-dir", state, wait=False)
    assert second.wait(10) == 2 and "in use by another server" in second.log
    d.stop()


def test_a_directory_that_cannot_be_written(start, state, tmp_path):
    d = start("--state-dir", state)
    put(d, "/v1/prefix_caches/before", {"prompt": P[:40]})
    moved = tmp_path / "elsewhere"
    pathlib.Path(state).rename(moved)
    status, r, _ = d.request("PUT", "/v1/prefix_caches/x", {"prompt": P[:41]})
    assert (status, error(r)) == (500, "io_error")
    assert d.get("/v1/prefix_caches/x")[0] in (404, 410) # what is not safe does not exist
    moved.rename(state)
    put(d, "/v1/prefix_caches/x", {"prompt": P[:41]})
    d.control()
    d.stop()


def test_handles_left_by_completions_are_durable_before_the_answer(start, state, tmp_path):
    d = start("--state-dir", state)
    want = answer(fresh(d, P, loops=9))
    kept = ask(d, P, loops=4, store_resume={"max_loops": 12}, max_tokens=1)["tinyloop"]["resume_handle"]
    assert kept["durable"] is True and d.get(f"/v1/resume_handles/{kept['id']}")[1]["persist"] == "definition"
    events = d.stream(P[:60], loops=4, store_resume={})
    streamed = events[-2]["tinyloop"]["resume_handle"]
    assert streamed["durable"] is True
    warm = ask(d, P[:70], loops=4, store_resume={}, max_tokens=0)["tinyloop"]["resume_handle"]
    assert warm["durable"] is True
    passing = ask(d, P, loops=4, store_resume={"persist": "none"})["tinyloop"]["resume_handle"]
    assert passing["durable"] is False and d.get(f"/v1/resume_handles/{passing['id']}")[1]["persist"] == "none"
    moved = tmp_path / "elsewhere"
    pathlib.Path(state).rename(moved) # no place to write to: the answer is given, and says so
    lost = ask(d, P, loops=4, store_resume={})["tinyloop"]["resume_handle"]
    assert lost["durable"] is False and d.get(f"/v1/resume_handles/{lost['id']}")[1]["persist"] == "none"
    assert "will not outlast this process" in d.log
    moved.rename(state)
    assert answer(ask(d, resume={"handle": lost["id"], "loops": 9})) == want # of use all the same
    gone = ask(d, P, loops=4, store_resume={})["tinyloop"]["resume_handle"]
    assert d.request("DELETE", f"/v1/resume_handles/{gone['id']}")[0] == 204
    kill(d)
    d = start("--state-dir", state)
    assert {e["id"] for e in d.get("/v1/resume_handles")[1]["data"]} == {kept["id"], streamed["id"], warm["id"]}
    assert answer(ask(d, resume={"handle": kept["id"], "loops": 9})) == want
    d.stop()
    d = start() # without a state directory
    assert ask(d, P, loops=4, store_resume={})["tinyloop"]["resume_handle"]["durable"] is False
    assert error(ask(d, P, loops=4, store_resume={"persist": "definition"}, expect=400)) == "bad_param"
    assert error(ask(d, P, loops=4, store_resume={"persist": "perhaps"}, expect=400)) == "out_of_range"
    d.stop()


def test_a_client_that_leaves_takes_its_handle_with_it(start, state, deep_model):
    d = start("--state-dir", state, model_dir=deep_model)
    for i in range(12):
        with d.raw() as c:
            c.post("/v1/completions", {"model": "tiny", "prompt": prompt(i, 40), "loops": 16, "store_resume": {},
                                       "max_tokens": 1900, "ignore_eos": True})
            time.sleep(0.01 * i * SLOW)
    d.wait_idle()
    assert d.get("/v1/resume_handles")[1]["data"] == []
    end = time.time() + 5
    while list(pathlib.Path(state).glob("*.def")):
        assert time.time() < end
        time.sleep(0.02)
    want = ask(d, P, loops=4, store_resume={}, max_tokens=300, expect=200) # one that is purged meanwhile ends well
    reply = []
    t = threading.Thread(target=lambda: reply.append(ask(d, P, loops=16, store_resume={}, max_tokens=300)))
    t.start()
    while len(d.get("/v1/resume_handles")[1]["data"]) < 2:
        time.sleep(0.005)
    d.request("POST", "/admin/purge", {"kinds": ["resume_handle"], "force": True}, admin=True)
    t.join()
    kept = reply[0]["tinyloop"]["resume_handle"]
    assert kept["durable"] is False and d.get(f"/v1/resume_handles/{kept['id']}")[0] == 410
    assert d.get(f"/v1/resume_handles/{want['tinyloop']['resume_handle']['id']}")[0] == 410
    d.stop()


def test_idempotency_keys_outlast_a_restart(start, state):
    body, headers = {"prompt": P[:33], "loops": 2}, {"Idempotency-Key": "k-2"}
    d = start("--state-dir", state)
    made = post(d, "/v1/prefix_caches", body, 201, headers=headers)
    kill(d)
    d = start("--state-dir", state)
    again = post(d, "/v1/prefix_caches", body, 200, headers=headers)
    assert again["id"] == made["id"] and again["status"] == "stored"
    other = post(d, "/v1/prefix_caches", {"prompt": P[:34], "loops": 2}, 422, headers=headers)
    assert error(other) == "idempotency_key_reused"
    assert post(d, "/v1/prefix_caches", body, 201)["id"] != made["id"]
    d.stop()


def test_ending_during_a_build(start, state, deep_model):
    d = start("--state-dir", state, "--shutdown-timeout", 0, model_dir=deep_model)
    d.request("PUT", "/v1/prefix_caches/slow", {"prompt": prompt(1, 1500), "loops": 16}, headers={"Prefer": "respond-async"})
    c = d.raw()
    c.post("/v1/resume_handles", {"prompt": prompt(2, 1500), "loops_used": 8, "max_loops": 16})
    time.sleep(0.05)
    d.signal()
    assert d.wait() == 0, d.log
    d = start("--state-dir", state, model_dir=deep_model)
    # nobody was told that they exist: they are gone, or were finished in time and are whole
    assert d.get("/v1/prefix_caches/slow")[0] in (404, 200) and "set aside" not in d.log
    for e in d.get("/v1/resume_handles")[1]["data"]:
        assert e["status"] == "stored" and e["tokens"] == 1500
    d.stop()


@pytest.mark.parametrize("seed", range(6))
def test_kill_at_any_moment(start, state, seed):
    """Clients create, replace, change and delete; the process is killed. What was confirmed holds, the rest is whole or absent."""
    r = random.Random(seed)
    d = start("--state-dir", state)
    confirmed, asked = {}, {}
    lock = threading.Lock()

    def client(k):
        rnd = random.Random(seed * 100 + k)
        while True:
            name, n = f"c{k}-{rnd.randrange(6)}", rnd.randrange(10, 60)
            with lock:
                asked[name] = asked.get(name, set()) | {n}
            try:
                if rnd.random() < 0.3:
                    with lock:
                        asked[name].add(None)
                    status, _, _ = d.request("DELETE", f"/v1/prefix_caches/{name}")
                    value = None
                else:
                    status, _, _ = d.request("PUT", f"/v1/prefix_caches/{name}", {"prompt": P[:n], "loops": 2},
                                             headers={"If-Match": "*"} if name in confirmed and confirmed[name] else {})
                    value = n
            except Exception:
                return # killed in between: not confirmed
            if status in (200, 201, 204):
                with lock:
                    confirmed[name] = value
                    asked[name] = {value}

    threads = [threading.Thread(target=client, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    time.sleep((0.15 + r.random() * 0.5) * SLOW)
    kill(d)
    for t in threads:
        t.join()
    assert confirmed
    d = start("--state-dir", state)
    there = {e["id"]: e["tokens"] for e in d.get("/v1/prefix_caches?limit=100")[1]["data"]}
    assert "set aside" not in d.log
    for name in set(asked) | set(there):
        # the last confirmed state, or what was asked for when the process died
        assert there.get(name) in asked[name] | {confirmed.get(name)}, (name, there.get(name), asked[name], confirmed.get(name))
    some = [n for n in there][:3]
    for name in some:
        assert answer(ask(d, [7], prefix_cache=name)) == answer(fresh(d, P[:there[name]] + [7], loops=2))
    d.stop()
    assert not list(pathlib.Path(state).glob("*.tmp"))
