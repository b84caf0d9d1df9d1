"""Rounds of mixed traffic for the soak: everything that a server is asked in ordinary life, and what it must refuse."""
import json
import shutil

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def model_that_chats(model, out):
    """A copy of the tiny model with a chat template."""
    shutil.copytree(model, out)
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return out


def fill(d):
    """Touches all of the cache's memory, so that resident memory does not grow by what is touched for the first time later."""
    names = []
    for n in (1000, 60):
        while True:
            name = f"/v1/prefix_caches/fill{len(names)}"
            code, reply, _ = d.request("PUT", name, {"prompt": [(len(names) + i) % 250 for i in range(n)]})
            if code != 201:
                assert code == 507, reply
                break
            names.append(name)
    d.complete([i % 250 for i in range(1000)], max_tokens=8)  # what is kept free for one sequence
    m = d.memory()
    assert m["kv_used_peak"] > 0.95 * m["kv_total"], m
    for name in names:
        assert d.request("DELETE", name)[0] in (202, 204)
    d.wait_idle()


def text_of(d, seed):
    """Plain, sampled, batched, and from token ids."""
    d.complete(["the", "the", "abc"], n=4, max_tokens=20, temperature=1, logprobs=3, echo=True)
    d.complete([1, 2, 3, seed % 250], max_tokens=0, headers={"X-Request-Id": f"soak-{seed}"})
    d.complete("to be registered " * 8 + str(seed), pool={"register_tokens": 64}, cache_salt=f"s{seed % 5}")
    assert d.stream("a stream", stop=["zq"], seed=seed)[-1] == "[DONE]"


def chat(d, seed):
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": f"hello {seed}"}]}
    for turn in range(3):
        code, reply, _ = d.request("POST", "/v1/chat/completions", body)
        assert code == 200, reply
        body["messages"] += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"and {turn}?"}]


def forms(d, seed):
    """Grammars that come again, and new ones, more than are kept."""
    fields = {f"f{seed}": {"type": "integer"}, "name": {"type": "string", "maxLength": 4}}
    new = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    d.complete("x", json_schema=new, max_tokens=30, temperature=1)
    d.complete("x", regex=f"[a-c]{{2}}-{seed}", max_tokens=30, temperature=1)
    d.complete("x", choice=["yes", "no"], max_tokens=4)
    d.complete("x", json_schema={"type": "nothing"}, expect=400)


def tokens(d, seed):
    code, reply, _ = d.request("POST", "/v1/tokenize", {"prompt": f"some words {seed} " * 10, "with_pieces": True})
    assert code == 200, reply
    assert d.request("POST", "/v1/tokenize", {"prompt": f"a long text {seed} " * 8000})[0] == 200
    assert d.request("POST", "/v1/detokenize", {"tokens": [1, 2, seed % 250]})[0] == 200


def refused(d, seed):
    d.complete("a", n=0, expect=400)
    d.complete("word " * 30000, expect=400)  # tokenised beside the loop, and too long
    assert d.request("POST", "/v1/completions", b'{"model":')[0] == 400
    assert d.get(f"/v1/prefix_caches/none{seed}")[0] == 404
    assert d.get(f"/nowhere/{seed}")[0] == 404
    assert d.request("POST", "/v1/completions", b"x" * 5_000_000)[0] == 413
    with d.raw() as r:  # gone while its text is tokenised
        r.post("/v1/completions", {"model": "tiny", "prompt": "word " * 60000, "max_tokens": 1})
    with d.raw() as r:
        r.send("GET /livez HTTP/1.1\r\n\r\n")  # no Host
        assert r.answer()[0] == 400


def names(d, seed):
    """Entries that come, serve and go."""
    for i in range(8):
        text = f"round {seed} entry {i} " * 4
        cache, handle = f"/v1/prefix_caches/c{i}", f"/v1/resume_handles/h{i}"
        key = {"Idempotency-Key": f"key {seed} {i}"}
        assert d.request("PUT", cache, {"prompt": text, "loops": 3, "pool": i % 2 == 0})[0] == 201
        assert d.request("PUT", handle, {"prompt": text, "loops_used": 2, "max_loops": 8})[0] == 201
        code, made, _ = d.request("POST", "/v1/prefix_caches", {"prompt": text + "!", "metadata": {"n": str(i)}}, headers=key)
        assert code == 201
        d.complete(["a", "b"], prefix_cache=f"c{i}", echo=True)
        d.complete([], resume={"handle": f"h{i}", "loops": 6}, n=2, seed=1)
        kept = d.complete(text, loops=2, store_resume={"ttl_seconds": 60})["tinyloop"]["resume_handle"]["id"]
        for path in (cache, handle, f"/v1/prefix_caches/{made['id']}", f"/v1/resume_handles/{kept}"):
            assert d.request("DELETE", path)[0] in (202, 204)
        assert d.get(cache)[0] == 410
    d.request("PUT", f"/v1/prefix_caches/short{seed}", {"prompt": "soon over", "ttl_seconds": 1})


def operator(d, seed):
    """Probes and looks from outside."""
    for path in ("/readyz", "/version", "/v1/models", "/v1/requests", "/v1/pool", "/v1/prefix_caches", "/openapi.json"):
        assert d.get(path)[0] == 200
    d.status()
    assert d.request("PUT", f"/admin/quotas/t{seed % 50}", {"entries": 5}, admin=True)[0] in (200, 201)
    assert d.request("DELETE", f"/admin/quotas/t{seed % 50}", admin=True)[0] in (200, 204)
    assert d.request("POST", "/admin/reload", admin=True)[0] == 200


KINDS = [text_of, chat, forms, names, operator, refused, tokens]
