"""What the tests of named reuse share: prompts, whole requests, and what is compared."""
import random

VOCAB = 290


def prompt(seed, n):
    r = random.Random(seed)
    return [r.randrange(VOCAB) for _ in range(n)]


def ask(d, tokens=None, expect=200, headers=None, timeout=60, **fields):
    """One completion with everything that proves equality."""
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_tokens": True,
            "return_logits_hash": True, **fields}
    if tokens is not None:
        body["prompt"] = tokens
    status, reply, _ = d.request("POST", "/v1/completions", body, headers=headers, timeout=timeout)
    assert status == expect, reply
    return reply


def fresh(d, tokens, **fields):
    """The same from scratch: nothing reused, nothing left behind."""
    r = ask(d, tokens, pool="off", **fields)
    assert r["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and r["tinyloop"]["reuse"]["kind"] == "none"
    return r


def answer(r):
    """Token ids and the hash of every row of logits behind them."""
    return [(c["tokens"], c["logits_hash"]) for c in r["choices"]]


def cached(r):
    return r["usage"]["prompt_tokens_details"]["cached_tokens"]


def reuse(r):
    return r["tinyloop"]["reuse"]


def put(d, path, body, expect=201, **kw):
    status, reply, headers = d.request("PUT", path, body, **kw)
    assert status == expect, reply
    return reply, headers


def post(d, path, body, expect=201, **kw):
    status, reply, _ = d.request("POST", path, body, **kw)
    assert status == expect, reply
    return reply


def error(reply):
    return reply["error"]["code"]
