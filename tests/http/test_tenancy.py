"""Keys, roles, tenants, limits: what one may do, and what others may not even guess."""
import hashlib
import statistics
import threading
import time

import pytest

from reuse import answer, ask, cached, error, fresh, post, prompt, put, reuse

P = prompt(8, 150)
KEYS = [("alice", "acme", "infer,cache", ""), ("adam", "acme", "infer", ""), ("bob", "bits", "infer,cache", ""),
        ("root", "ops", "infer,cache,admin", ""), ("cacheonly", "acme", "cache", "")]


def keys_file():
    return "".join(f"{n}:{hashlib.sha256(f'key-{n}'.encode()).hexdigest()}:{t}:{r}:{l}\n" for n, t, r, l in KEYS)


def wait_ready(daemon):
    daemon.wait_listening()
    end = time.time() + 30
    while daemon.get("/readyz")[0] != 200:
        assert time.time() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def d(model, tmp_path_factory):
    from daemon import Daemon
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(keys_file())
    daemon = Daemon(model, "--api-keys", path, "--tenant-entries", 6, "--log-level", "debug", wait=False)
    wait_ready(daemon)
    yield daemon
    daemon.stop()


def key(name):
    return {"Authorization": f"Bearer key-{name}"}


def clean(d, *names):
    for who in names:
        for path in ("/v1/prefix_caches", "/v1/resume_handles", "/v1/pool/entries"):
            for e in d.get(path, headers=key(who))[1]["data"]:
                d.request("DELETE", f"{path}/{e['id']}", headers=key(who))


ROUTES = [(m, p) for p in ("/v1/prefix_caches/x", "/v1/resume_handles/x", "/v1/pool/entries/x") for m in ("GET", "DELETE")] + [
    ("PUT", "/v1/prefix_caches/x"), ("PATCH", "/v1/prefix_caches/x"), ("GET", "/v1/prefix_caches"), ("POST", "/v1/prefix_caches"),
    ("POST", "/v1/prefix_caches/x/verify"), ("POST", "/v1/resume_handles"), ("PUT", "/v1/resume_handles/x"),
    ("PATCH", "/v1/resume_handles/x"), ("GET", "/v1/resume_handles"), ("POST", "/v1/resume_handles/x/promote"),
    ("POST", "/v1/resume_handles/x/verify"), ("GET", "/v1/pool"), ("GET", "/v1/pool/entries"), ("POST", "/v1/pool/entries"),
    ("POST", "/v1/pool/match"), ("POST", "/v1/estimate")]


@pytest.mark.parametrize("method,path", ROUTES)
def test_every_route_needs_a_key(d, method, path):
    body = {"prompt": [1]} if method in ("PUT", "POST", "PATCH") else None
    bodies = []
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key-alice"}, {"Authorization": "Bearer "},
                    {"Authorization": "Bearer key-alic"}, {"Authorization": "Bearer key-alice2"}):
        status, r, h = d.request(method, path, body, headers=headers)
        assert status == 401 and h["WWW-Authenticate"] == "Bearer", headers
        r["error"].pop("request_id")
        if headers:
            bodies.append(r)
    assert all(b == bodies[0] for b in bodies)


def test_roles(d):
    body = {"prompt": P[:20]}
    for method, path in (("PUT", "/v1/prefix_caches/x"), ("POST", "/v1/resume_handles"), ("POST", "/v1/pool/entries"),
                         ("DELETE", "/v1/prefix_caches/x"), ("PATCH", "/v1/prefix_caches/x")):
        status, r, _ = d.request(method, path, body, headers=key("adam"))
        assert (status, error(r)) == (403, "insufficient_role"), (method, path)
    assert error(ask(d, P, store_resume={}, headers=key("adam"), expect=403)) == "insufficient_role"
    assert error(ask(d, P, pool={"register_tokens": 5}, headers=key("adam"), expect=403)) == "insufficient_role"
    assert error(ask(d, P, headers=key("cacheonly"), expect=403)) == "insufficient_role"
    put(d, "/v1/prefix_caches/x", body, headers=key("cacheonly"))
    assert cached(ask(d, [1], prefix_cache="x", headers=key("adam"))) == 20 # the same tenant
    status, r, _ = d.request("PUT", "/v1/prefix_caches/y", {**body, "ttl_seconds": None}, headers=key("alice"))
    assert (status, error(r)) == (403, "insufficient_role")
    for field in ({"shared": True},):
        status, r, _ = d.request("POST", "/v1/pool/entries", {**body, **field}, headers=key("alice"))
        assert (status, error(r)) == (403, "insufficient_role")
    assert d.request("POST", "/admin/purge", {}, admin=True, headers=key("alice"))[0] == 403
    assert d.request("POST", "/admin/purge", {"tenant": "nobody"}, admin=True, headers=key("root"))[0] == 200
    clean(d, "alice")


def test_foreign_ids_are_unknown(d):
    put(d, "/v1/prefix_caches/secret", {"prompt": P[:40], "pool": True}, headers=key("alice"))
    put(d, "/v1/resume_handles/secret", {"prompt": P[:40], "loops_used": 2, "max_loops": 8}, headers=key("alice"))
    pe = post(d, "/v1/pool/entries", {"prompt": P[:50]}, headers=key("alice"))["id"]
    for path in ("/v1/prefix_caches/secret", "/v1/resume_handles/secret", f"/v1/pool/entries/{pe}"):
        unknown = d.get(path.rsplit("/", 1)[0] + "/never-was", headers=key("bob"))[1]
        for method in ("GET", "DELETE"):
            status, r, _ = d.request(method, path, headers=key("bob"))
            assert status == 404 and error(r) == error(unknown)
    assert error(ask(d, [1], prefix_cache="secret", headers=key("bob"), expect=404)) == "prefix_cache_not_found"
    assert error(ask(d, resume={"handle": "secret", "loops": 4}, headers=key("bob"), expect=404)) == "resume_handle_not_found"
    assert error(post(d, "/v1/resume_handles/secret/promote", {"loops": 4}, 404, headers=key("bob"))) == "resume_handle_not_found"
    r = post(d, "/v1/prefix_caches", {"from": {"pool_entry": pe}}, 404, headers=key("bob"))
    assert error(r) == "pool_entry_not_found"
    for path in ("/v1/prefix_caches", "/v1/resume_handles", "/v1/pool/entries"):
        assert d.get(path, headers=key("bob"))[1]["data"] == []
    # the same name is free for another tenant, and stays apart
    put(d, "/v1/prefix_caches/secret", {"prompt": P[:41]}, headers=key("bob"))
    assert d.get("/v1/prefix_caches/secret", headers=key("alice"))[1]["tokens"] == 40
    # deleting it does not tell the other one that it was there
    assert d.request("DELETE", "/v1/resume_handles/secret", headers=key("alice"))[0] == 204
    assert d.get("/v1/resume_handles/secret", headers=key("alice"))[0] == 410
    assert d.get("/v1/resume_handles/secret", headers=key("bob"))[0] == 404
    clean(d, "alice", "bob")


def test_pool_matches_stay_inside(d):
    post(d, "/v1/pool/entries", {"prompt": P[:100], "loops": 4}, headers=key("alice"))
    assert cached(ask(d, P, loops=4, headers=key("adam"), pool="auto")) == 100
    for more in ({}, {"cache_salt": "acme"}, {"prompt_cache_key": "acme"}, {"user": "alice"}):
        assert cached(ask(d, P, loops=4, headers=key("bob"), **more)) in (0, 128), more # 128: bob's own last one
    other = prompt(80, 150)
    post(d, "/v1/pool/entries", {"prompt": other[:100], "loops": 4}, headers=key("alice"))
    m = post(d, "/v1/pool/match", {"prompt": other[:90] + [1], "loops": 4}, 200, headers=key("bob"))
    assert m["matched"] is False and (m["nearest_miss"] is None or m["nearest_miss"]["common_tokens"] < 90)
    r = ask(d, other, loops=4, headers=key("bob"))
    assert cached(r) == 0 and reuse(r)["kind"] == "none"
    assert error(ask(d, prompt(81, 80), pool="require", headers=key("bob"), expect=422)) == "no_pool_match"
    clean(d, "alice", "bob")


def test_automatic_entries_stay_inside(d):
    mine = prompt(82, 200)
    ask(d, mine, loops=4, headers=key("alice"))
    assert cached(ask(d, mine, loops=4, headers=key("alice"))) >= 128
    assert cached(ask(d, mine, loops=4, headers=key("bob"))) == 0
    assert cached(ask(d, mine, loops=4, cache_salt="x", headers=key("alice"))) == 0


def test_shared_entries_are_for_everybody(d):
    tokens = prompt(83, 80)
    post(d, "/v1/pool/entries", {"prompt": tokens, "loops": 4, "shared": True}, headers=key("root"))
    for who in ("alice", "bob"):
        r = ask(d, tokens + [1], loops=4, headers=key(who))
        assert cached(r) == 80
    assert d.get("/v1/pool/entries", headers=key("bob"))[1]["data"] == []
    clean(d, "root")


def test_guessing_a_foreign_prefix_gains_nothing(d):
    secret = prompt(84, 600)
    post(d, "/v1/pool/entries", {"prompt": secret, "loops": 4}, headers=key("alice"))
    right, wrong = [], []
    for i in range(30):
        guess = secret + [i]
        other = prompt(1000 + i, 601)
        for tokens, times in ((guess, right), (other, wrong)):
            r = ask(d, tokens, loops=4, max_tokens=1, headers=key("bob"), cache_salt=f"{i}")
            assert cached(r) == 0
            times.append(r["tinyloop"]["timings"]["ttft_ms"])
    # the same work: medians within a factor that a hit, which skips 600 of 601 rows, would be far outside of
    assert 0.5 < statistics.median(right) / statistics.median(wrong) < 2
    hit = ask(d, secret + [1], loops=4, max_tokens=1, headers=key("alice"))
    assert cached(hit) == 600
    clean(d, "alice")


def test_limits_of_a_tenant(d):
    for i in range(6):
        put(d, f"/v1/prefix_caches/q{i}", {"prompt": P[:10 + i]}, headers=key("alice"))
    status, r, h = d.request("PUT", "/v1/prefix_caches/q6", {"prompt": P[:30]}, headers=key("alice"))
    assert (status, error(r)) == (429, "entry_quota_exceeded") and h["x-should-retry"] == "false"
    assert r["error"]["details"] == {"limit": 6, "used": 6}
    assert error(ask(d, P, store_resume={}, headers=key("alice"), expect=429)) == "entry_quota_exceeded"
    put(d, "/v1/prefix_caches/q6", {"prompt": P[:30]}, headers=key("bob"))
    put(d, "/v1/prefix_caches/q5", {"prompt": P[:15]}, 200, headers=key("alice")) # the same again
    put(d, "/v1/prefix_caches/q5", {"prompt": P[:16]}, 201, headers={**key("alice"), "If-Match": "*"}) # in its place
    root = dict(admin=True, headers=key("root"))
    r = d.request("PUT", "/admin/quotas/acme", {"entries": 8}, **root)[1]
    assert r["entries"] == 8 and r["entries_used"] == 6 and r["bytes_used"] > 0
    put(d, "/v1/prefix_caches/q6", {"prompt": P[:30]}, headers=key("alice"))
    d.request("PUT", "/admin/quotas/acme", {"bytes": r["bytes_used"] + 1}, **root)
    d.request("DELETE", "/v1/prefix_caches/q6", headers=key("alice"))
    d.request("DELETE", "/v1/prefix_caches/q5", headers=key("alice"))
    status, e, _ = d.request("PUT", "/v1/prefix_caches/big", {"prompt": prompt(85, 1500)}, headers=key("alice"))
    assert (status, error(e)) == (429, "entry_quota_exceeded")
    r = d.request("DELETE", "/admin/quotas/acme", **root)[1]
    assert r["entries"] == 6 and r["bytes"] is None
    clean(d, "alice", "bob")


def test_keys_are_not_in_the_log(d):
    assert "key-" not in d.log.replace("api-keys", "").replace("key=", "")


def test_the_state_of_the_pool_shows_own_entries_alone(d):
    before = d.get("/v1/pool", headers=key("bob"))[1]
    post(d, "/v1/pool/entries", {"prompt": prompt(90, 40), "loops": 4}, headers=key("alice"))
    ask(d, prompt(90, 40), loops=4, headers=key("alice"), pool="require")
    assert d.get("/v1/pool", headers=key("bob"))[1] == before and "queries" not in before
    mine = d.get("/v1/pool", headers=key("alice"))[1]
    assert mine["entries"] == 1 and mine["by_loops"] == {"4": 1} and mine["hits"] == 1
    assert d.get("/v1/pool", headers=key("root"))[1]["queries"] > 0
    clean(d, "alice")


def test_requests_of_others_are_not_listed(d):
    t = threading.Thread(target=lambda: ask(d, P, max_tokens=500, headers=key("alice")))
    t.start()
    for _ in range(20):
        assert d.get("/v1/requests", headers=key("bob"))[1]["data"] == []
    t.join()


def test_what_is_free_is_for_administrators(d):
    """The bytes that are free tell what other tenants do."""
    body = {"tokens": 100, "loops": 4}
    for who in ("alice", "adam", "cacheonly"):
        r = post(d, "/v1/estimate", body, 200, headers=key(who))
        assert "bytes_free" not in r and r["fits"] is True and r["bytes"] > 0
    assert post(d, "/v1/estimate", body, 200, headers=key("root"))["bytes_free"] > 0


def test_whether_it_fits_tells_nothing_about_others(start, tmp_path):
    free = start("--max-seq-len", 512)
    m = free.memory()
    free.stop()
    (tmp_path / "keys").write_text(keys_file())
    d = start("--max-seq-len", 512, "--memory-bytes", m["weights"] + m["scratch"] + 200 * m["page_bytes"],
              "--api-keys", tmp_path / "keys", wait=False)
    wait_ready(d)

    def estimate(who, tokens=128, loops=4):
        r = post(d, "/v1/estimate", {"tokens": tokens, "loops": loops}, 200, headers=key(who))
        return {k: v for k, v in r.items() if k != "prefill_ms"}

    shapes = [(128, 4), (512, 4), (512, 16)]
    before = [estimate("alice", *s) for s in shapes]
    assert [e["fits"] for e in before] == [True, True, False] # the last is more than the whole budget
    assert [estimate("root", *s)["fits"] for s in shapes] == [True, True, False]
    status = 201
    for i in range(200):
        status, r, _ = d.request("PUT", f"/v1/prefix_caches/b{i}", {"prompt": prompt(i, 128), "loops": 4}, headers=key("bob"))
        if status != 201:
            break
    assert status == 507
    assert [estimate("alice", *s) for s in shapes] == before
    now = estimate("root")
    assert now["fits"] is False and now["bytes_free"] < now["bytes"] and now["bytes_evictable"] == 0
    # the caller's own limits count: bytes, and entries
    root = dict(admin=True, headers=key("root"))
    d.request("PUT", "/admin/quotas/acme", {"bytes": before[0]["bytes"] - 1}, **root)
    assert estimate("alice")["fits"] is False
    d.request("PUT", "/admin/quotas/acme", {"bytes": before[0]["bytes"]}, **root)
    assert estimate("alice") == before[0]
    d.request("PUT", "/admin/quotas/acme", {"entries": 1}, **root)
    clean(d, "bob")
    put(d, "/v1/prefix_caches/mine", {"prompt": P[:20], "loops": 1}, headers=key("alice"))
    assert estimate("alice")["fits"] is False and estimate("root")["fits"] is True
    d.stop()
