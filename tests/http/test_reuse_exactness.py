"""The same bits whether state was reused or not: every primitive, every weight type, greedy and seeded, over random prompts, cuts
and depths. Compared are token ids and the hash of every row of logits; the work saved is asserted from counters."""
import random

import pytest

import tinymodel
from daemon import SLOW, TINYLOOP, Daemon
from reuse import answer, ask, cached, fresh, post, prompt, put, reuse

ROUNDS = 8 if SLOW == 1 else 2


@pytest.fixture(scope="module", params=["int4", "int8", "bf16", "f32"])
def d(request, tmp_path_factory):
    model = tmp_path_factory.mktemp(request.param) / "tiny"
    tinymodel.make(TINYLOOP, model, to=request.param)
    daemon = Daemon(model, "--pool-auto=false", "--pool-capacity", 64)
    yield daemon
    daemon.stop()


def cases(name):
    r = random.Random(name)
    for i in range(ROUNDS):
        n = r.choice([2, 5, 63, 64, 65, 127, 128, 129, 200, 257, 300])
        cut = r.choice([1, n - 1, n, max(1, n // 2), r.randint(1, n)])
        sampling = {} if i % 2 == 0 else {"temperature": 0.9, "seed": r.randrange(2**50), "top_p": 0.95}
        yield i, prompt(f"{name}{i}", n), cut, r, {"max_tokens": r.randint(1, 12), **sampling}


def rows(d):
    d.wait_idle()
    return d.status()["worker"]["row_loops"]


def test_prefix_cache(d):
    for i, tokens, cut, r, sampling in cases("prefix"):
        loops, window = r.randint(1, 9), r.choice([0, 0, 0, 16, 64, 100])
        put(d, f"/v1/prefix_caches/e{i}", {"prompt": tokens[:cut], "loops": loops, "cache_window": window})
        before = rows(d)
        got = ask(d, tokens[cut:], prefix_cache=f"e{i}", **sampling)
        ran = rows(d) - before
        want = fresh(d, tokens, loops=loops, cache_window=window, **sampling)
        assert answer(got) == answer(want), (i, len(tokens), cut, loops, window, sampling)
        assert cached(got) == cut and reuse(got)["suffix_tokens"] == len(tokens) - cut
        assert ran == (len(tokens) - cut + got["usage"]["completion_tokens"] - 1) * loops
        assert post(d, f"/v1/prefix_caches/e{i}/verify", {"max_tokens": 4}, 200)["equal"] is True


def test_resume_handle(d):
    for i, tokens, cut, r, sampling in cases("resume"):
        used, window = r.randint(1, 6), r.choice([0, 0, 0, 64])
        deep = r.randint(used, 12)
        put(d, f"/v1/resume_handles/e{i}", {"prompt": tokens[:cut], "loops_used": used, "max_loops": 12, "cache_window": window})
        before = rows(d)
        got = ask(d, tokens[cut:], resume={"handle": f"e{i}", "loops": deep}, **sampling)
        ran = rows(d) - before
        want = fresh(d, tokens, loops=deep, cache_window=window, **sampling)
        assert answer(got) == answer(want), (i, len(tokens), cut, used, deep, window, sampling)
        assert reuse(got)["iterations_run"] == deep - used and reuse(got)["iterations_skipped"] == used
        assert ran == cut * (deep - used) + (len(tokens) - cut + got["usage"]["completion_tokens"] - 1) * deep
        post(d, f"/v1/resume_handles/e{i}/promote", {"loops": deep, "id": f"p{i}"})
        assert answer(ask(d, tokens[cut:], prefix_cache=f"p{i}", **sampling)) == answer(want)


def test_pool(d):
    for i, tokens, cut, r, sampling in cases("pool"):
        loops = r.randint(1, 9)
        post(d, "/v1/pool/entries", {"prompt": tokens[:cut], "loops": loops})
        post(d, "/v1/pool/entries", {"prompt": tokens[:max(1, cut - 1)], "loops": loops + 1})
        before = rows(d)
        got = ask(d, tokens, loops=loops, **sampling)
        ran = rows(d) - before
        want = fresh(d, tokens, loops=loops, **sampling)
        assert answer(got) == answer(want), (i, len(tokens), cut, loops, sampling)
        assert cached(got) == cut and reuse(got)["kind"] == "pool"
        assert ran == (len(tokens) - cut + got["usage"]["completion_tokens"] - 1) * loops


def test_cold_and_warm_requests_are_the_same(d):
    tokens = prompt("warm", 140)
    want = answer(fresh(d, tokens))
    for cut in (1, 16, 64, 70, 139, 140):
        post(d, "/v1/pool/entries", {"prompt": tokens[:cut], "loops": 4})
        for _ in range(3):
            got = ask(d, tokens)
            assert cached(got) == cut and answer(got) == want


def test_windows_around_the_length(d):
    """Prompt lengths about the window, decoding twice past it: reuse and no reuse agree everywhere."""
    for window in (1, 8, 64):
        for n in range(max(2, window - 2), window + 3):
            tokens = prompt(f"w{window}", n + 3)
            kw = dict(max_tokens=2 * window + 2, cache_window=window)
            put(d, f"/v1/prefix_caches/w{window}-{n}", {"prompt": tokens[:n], "loops": 3, "cache_window": window})
            put(d, f"/v1/resume_handles/w{window}-{n}", {"prompt": tokens[:n], "loops_used": 2, "max_loops": 3,
                                                         "cache_window": window})
            want = answer(fresh(d, tokens, loops=3, **kw))
            assert answer(ask(d, tokens[n:], prefix_cache=f"w{window}-{n}", **kw)) == want
            assert answer(ask(d, tokens[n:], resume={"handle": f"w{window}-{n}", "loops": 3}, **kw)) == want


def test_an_entry_is_not_written_through(d):
    """Fifty requests of all sorts on one entry: what it gives never changes."""
    tokens = prompt("base", 100)
    put(d, "/v1/prefix_caches/base", {"prompt": tokens, "loops": 4})
    want = answer(ask(d, [1, 2], prefix_cache="base", max_tokens=16))
    for i in range(25):
        ask(d, prompt(i, i + 1), prefix_cache="base", temperature=1, seed=i, max_tokens=8)
        assert answer(ask(d, [1, 2], prefix_cache="base", max_tokens=16)) == want
    assert post(d, "/v1/prefix_caches/base/verify", {}, 200)["equal"] is True


def test_seeded_streams_do_not_shift_by_a_cancelled_request(d):
    tokens, kw = prompt("seed", 90), dict(temperature=0.8, seed=42, max_tokens=16)
    put(d, "/v1/prefix_caches/s", {"prompt": tokens[:80], "loops": 4})
    want = answer(fresh(d, tokens, **kw))
    for _ in range(3):
        c = d.raw()
        c.post("/v1/completions", {"model": "tiny", "prompt": tokens, "max_tokens": 3000, "ignore_eos": True})
        c.sock.close()
        assert answer(ask(d, tokens[80:], prefix_cache="s", **kw)) == want
    d.wait_idle()
