"""Entries of a boot manifest stand when the server says that it is ready; what cannot be made ends the start with a sentence."""
import hashlib
import json
import subprocess
import time

import pytest

from daemon import SLOW, TINYLOOPD, Daemon, clean_env
from reuse import answer, ask, cached, fresh, post, prompt, put, reuse

P = prompt(9, 120)


def write(path, entries):
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return path


@pytest.fixture
def boot(tmp_path):
    return lambda entries: write(tmp_path / "boot.json", entries)


THREE = [
    {"kind": "prefix_cache", "id": "rules", "prompt": P[:100], "loops": 4, "metadata": {"rev": "7"}},
    {"kind": "resume_handle", "id": "think", "prompt": P[:90], "loops_used": 2, "max_loops": 8, "ttl_seconds": 600},
    {"kind": "pool_entry", "id": "opening", "prompt": P[:80], "loops": 5},
]


def test_entries_are_ready_before_the_server_is(start, boot):
    d = start("--boot-manifest", boot(THREE))
    r = d.get("/v1/prefix_caches/rules")[1]
    assert r["status"] == "ready" and r["tokens"] == 100 and r["metadata"] == {"rev": "7"} and r["expires_at"] is None
    assert d.get("/v1/resume_handles/think")[1]["expires_at"] is not None
    assert d.get("/v1/pool/entries/opening")[1]["status"] == "ready"
    want = [answer(fresh(d, P, loops=n)) for n in (4, 6, 5)]
    got = ask(d, P[100:], prefix_cache="rules")
    assert answer(got) == want[0] and cached(got) == 100
    assert answer(ask(d, P[90:], resume={"handle": "think", "loops": 6})) == want[1]
    got = ask(d, P, loops=5)
    assert answer(got) == want[2] and reuse(got)["id"] == "opening"
    assert post(d, "/v1/prefix_caches/rules/verify", {}, 200)["equal"] is True
    assert "3 entries of the boot manifest are ready" in d.log
    # they are entries like others
    assert d.request("DELETE", "/v1/prefix_caches/rules")[0] == 204
    assert d.get("/v1/prefix_caches/rules")[0] == 410
    d.stop()


def test_prompts_may_be_text(start, boot):
    d = start("--boot-manifest", boot([{"kind": "prefix_cache", "id": "x", "prompt": "the rain in the south"}]))
    n = len(d.request("POST", "/v1/tokenize", {"prompt": "the rain in the south"})[1]["tokens"])
    assert d.get("/v1/prefix_caches/x")[1]["tokens"] == n
    d.stop()


def test_the_manifest_wins_over_the_state_directory(start, boot, tmp_path):
    state = tmp_path / "state"
    d = start("--state-dir", state)
    put(d, "/v1/prefix_caches/rules", {"prompt": P[:50], "loops": 3})
    put(d, "/v1/prefix_caches/other", {"prompt": P[:40], "loops": 3})
    post(d, "/v1/pool/entries", {"prompt": P[:80], "loops": 5})
    d.stop()
    d = start("--state-dir", state, "--boot-manifest", boot(THREE))
    assert d.get("/v1/prefix_caches/rules")[1]["tokens"] == 100
    assert d.get("/v1/prefix_caches/other")[1]["status"] == "stored"
    assert [e["id"] for e in d.get("/v1/pool/entries")[1]["data"]] == ["opening"]
    d.stop()
    d = start("--state-dir", state) # nothing of the manifest was stored, and what gave way is gone
    assert d.get("/v1/prefix_caches/rules")[0] == 404
    assert d.get("/v1/prefix_caches/other")[1]["status"] == "stored"
    assert d.get("/v1/pool/entries")[1]["data"] == []
    d.stop()


def test_tenants(start, boot, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{t}:{hashlib.sha256(t.encode()).hexdigest()}:{t}:infer,cache:\n" for t in ("a", "b")))
    entries = [{"kind": "prefix_cache", "id": "x", "tenant": t, "prompt": P[:n]} for t, n in (("a", 10), ("b", 20))]
    d = start("--api-keys", keys, "--boot-manifest", boot(entries))
    for t, n in (("a", 10), ("b", 20)):
        assert d.get("/v1/prefix_caches/x", headers={"Authorization": f"Bearer {t}"})[1]["tokens"] == n
    d.stop()


def entry(**more):
    e = {"kind": "prefix_cache", "id": "x", "prompt": [1, 2, 3], **more}
    return {k: v for k, v in e.items() if v is not None}


FORM = [
    ("[{]", "boot.json:1:"),
    ('[\n{"kind": "prefix_cache",\n "id" 3}]', "boot.json:3:"),
    ('[{"kind": "prefix_cache", "id": "a", "id": "b", "prompt": "x"}]', "a duplicate key"),
    ("[], []", "boot.json:1:"),
    ('[], "more": []', "a JSON list"),
    ("{}", "a JSON list"),
    ("", "boot.json"),
    ("[3]", "entry 1: it must be an object"),
    ([entry(id=None)], "entry 1: id must be"),
    ([entry(id="a b")], "entry 1: id must be"),
    ([entry(id=7)], "entry 1: id must be"),
    ([entry(kind=None)], "entry 1 ('x'): kind must be"),
    ([entry(kind="cache")], "entry 1 ('x'): kind must be"),
    ([entry(tenant="t" * 64)], "tenant must be"),
    ([entry(persist="definition")], "persist has no meaning"),
    ([entry(**{"from": {"pool_entry": "e"}})], "from has no meaning"),
    ([entry(), entry()], "entry 2 ('x'): entry 1 has that name already"),
]


@pytest.mark.parametrize("entries, says", FORM)
def test_a_wrong_form_is_told_before_the_model_is_loaded(model, boot, entries, says):
    path = boot(entries)
    for more in ([], ["--check-config"]):
        r = subprocess.run([str(TINYLOOPD), "--port", "0", "--model", str(model), "--boot-manifest", str(path), *more],
                           capture_output=True, text=True, timeout=20 * SLOW, env=clean_env())
        assert r.returncode == 2 and says in r.stderr and "loading" not in r.stdout + r.stderr, (r.stdout, r.stderr)


def test_a_missing_file(model, tmp_path):
    r = subprocess.run([str(TINYLOOPD), "--port", "0", "--model", str(model), "--boot-manifest", str(tmp_path / "no")],
                       capture_output=True, text=True, timeout=20 * SLOW, env=clean_env())
    assert r.returncode == 2 and "No such file" in r.stderr


MODEL = [
    ([entry(prompt=None)], "prompt"),
    ([entry(prompt=[])], "The prompt has no tokens."),
    ([entry(prompt=[5000])], "entry 1 ('x'): prompt"),
    ([entry(loops=99)], "entry 1 ('x'): loops is 99; it must be 1.."),
    ([entry(), entry(id="y", loops_used=2)], "entry 2 ('y'): loops_used"),
    ([entry(kind="resume_handle", loops_used=5, max_loops=4)], "loops_used is 5"),
    ([entry(cache_window=-1)], "cache_window is -1"),
    ([entry(model="other")], "The model 'other' is not served here"),
    ([entry(prompt=[1] * 5000)], "The prompt has 5000 tokens; the limit is"),
    ([entry(ttl_mode="long")], "ttl_mode"),
    ([entry(kind="pool_entry"), entry(kind="pool_entry", id="y")], "entry 2 ('y'): the pool has the same from entry 1"),
    ([entry(kind="pool_entry", id=f"e{i}", prompt=[i + 1, 2, 3]) for i in range(17)], "it gave way to later entries"),
    ([entry(id=f"e{i}", prompt=[i + 1, 2]) for i in range(257)], "entry 257"),
]


def ended(d):
    code = d.process.wait(timeout=60 * SLOW)
    end = time.time() + 5 * SLOW
    while "ended, exit code" not in d.log and time.time() < end: # its last line may still be on the way
        time.sleep(0.01)
    return code


@pytest.mark.parametrize("entries, says", MODEL)
def test_what_the_model_cannot_do_ends_the_start(model, boot, entries, says):
    d = Daemon(model, "--boot-manifest", boot(entries), wait=False)
    assert ended(d) == 2 and says in d.log and "boot.json: entry" in d.log, d.log


def test_no_memory(model, boot):
    entries = [entry(id=f"e{i}", prompt=[i + 1] + P[:100], loops=8) for i in range(200)]
    d = Daemon(model, "--boot-manifest", boot(entries), "--memory-bytes", "20M", wait=False)
    assert ended(d) == 2 and "boot.json: entry" in d.log, d.log
