"""The daemon on a device, over HTTP: does it say what `tinyloop generate` says there, and does it let go of the device?

    DEVICE=cuda TINYLOOP=... TINYLOOPD=... pytest tests/cuda/test_daemon.py

DEVICE is what both programs compute on, "cuda" unless it is set. Needs pytest and nothing else."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "http"))

import tinymodel  # noqa: E402
from daemon import TINYLOOP, Daemon, clean_env, text_of  # noqa: E402
from reuse import answer, ask, fresh, post, prompt, put, reuse  # noqa: E402

DEVICE = os.environ.get("DEVICE", "cuda")
MEMORY_MIB = 2048  # several daemons share a card
FLAGS = ["--device", DEVICE, "--memory-bytes", MEMORY_MIB << 20]
LONG = {"model": "tiny", "prompt": "the", "ignore_eos": True, "temperature": 0, "stream": True, "return_tokens": True}


@pytest.fixture(scope="module", params=["int4", "int8", "bf16", "f32"])
def model(request, tmp_path_factory):
    out = tinymodel.make(TINYLOOP, tmp_path_factory.mktemp(request.param) / "tiny", to=request.param)
    tokenizer = tinymodel.tokenizer_json()
    names = tokenizer["model"]["vocab"]
    names.update({f"<{i}>": i for i in range(len(names), tinymodel.END)})  # random weights choose any id
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    return out


@pytest.fixture(scope="module")
def d(model):
    daemon = Daemon(model, *FLAGS, "--pool-auto=false")
    yield daemon
    daemon.stop()


def generate(model, tokens, n, **options):
    """What the command line makes of the same request."""
    command = [TINYLOOP, "generate", "--model", model, "--device", DEVICE, "--memory-mib", MEMORY_MIB, "--json", "--ignore-eos",
               "--tokens", ",".join(map(str, tokens)), "--max-tokens", n]
    for name, value in options.items():
        command += ["--" + name.replace("_", "-"), value]
    out = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, env=clean_env())
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)["tokens"]


REQUESTS = [
    (3, 40, {}),
    (70, 60, {"loops": 8}),
    (300, 30, {"loops": 3}),
    (20, 40, {"temperature": 0.8, "seed": 5}),
    (130, 40, {"temperature": 1.1, "seed": 2**40, "top_p": 0.9, "top_k": 40}),
]


def test_it_says_where_it_computes(d):
    info = d.get("/v1/models")[1]["data"][0]
    assert DEVICE in json.dumps(info), info
    m = d.metrics()
    budget, used = (m[f'tinyloop_device_memory_bytes{{state="{s}"}}'] for s in ("budget", "used"))
    assert 0 < used < budget <= MEMORY_MIB << 20


def test_answers_are_those_of_the_command_line(d, model):
    for n, made, options in REQUESTS:
        tokens = prompt(n, n)
        want = generate(model, tokens, made, **options)
        got = fresh(d, tokens, max_tokens=made, **options)["choices"][0]
        assert got["tokens"] == want, (n, options)
        events = d.stream(tokens, max_tokens=made, ignore_eos=True, pool="off", **{"temperature": 0, **options})
        assert events[-1] == "[DONE]" and text_of(events) == got["text"], (n, options)


DRAWN = [{"temperature": 1}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.5, "top_k": 20, "min_p": 0.02}, {"temperature": 0}]


def test_a_device_chooses_the_tokens_that_the_host_would(d):
    """The hash of the logits keeps the choice on the host; so does a ban of ids that end the output."""
    together = [None] * 8

    def one(i, **fields):
        return ask(d, prompt(i, 9 + 31 * i), max_tokens=100, ignore_eos=False, pool="off", seed=i, **DRAWN[i % 4], **fields)

    def device(i):
        together[i] = one(i, return_logits_hash=False)["choices"][0]["tokens"]

    threads = [threading.Thread(target=device, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == [one(i)["choices"][0]["tokens"] for i in range(8)]
    assert together[:4] == [one(i, return_logits_hash=False)["choices"][0]["tokens"] for i in range(4)]


def test_many_at_once_are_each_as_alone(d):
    alone = [answer(fresh(d, prompt(i, 5 + 23 * i), max_tokens=20, loops=1 + i % 6)) for i in range(16)]
    together = [None] * 16

    def one(i):
        together[i] = answer(fresh(d, prompt(i, 5 + 23 * i), max_tokens=20, loops=1 + i % 6))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == alone


def test_reused_state_has_the_same_bits(d):
    tokens = prompt("reuse", 150)
    put(d, "/v1/prefix_caches/p", {"prompt": tokens[:129], "loops": 4})
    put(d, "/v1/resume_handles/r", {"prompt": tokens[:129], "loops_used": 2, "max_loops": 8})
    for sampling in ({}, {"temperature": 0.9, "seed": 3}):
        want = answer(fresh(d, tokens, loops=4, max_tokens=30, **sampling))
        assert answer(ask(d, tokens[129:], prefix_cache="p", max_tokens=30, **sampling)) == want
        want = answer(fresh(d, tokens, loops=7, max_tokens=30, **sampling))
        assert answer(ask(d, tokens[129:], resume={"handle": "r", "loops": 7}, max_tokens=30, **sampling)) == want
    post(d, "/v1/pool/entries", {"prompt": tokens[:100], "loops": 5})
    got = ask(d, tokens, loops=5, max_tokens=30)
    assert reuse(got)["kind"] == "pool" and answer(got) == answer(fresh(d, tokens, loops=5, max_tokens=30))


def test_who_leaves_gives_the_memory_back(d):
    d.wait_idle()
    before = d.memory()["kv_used"]
    for _ in range(8):
        c = d.raw().post("/v1/completions", {**LONG, "max_tokens": 1900, "pool": "off"})
        assert c.head()[0] == 200
        c.chunk()
        c.sock.close()
    d.wait_idle()
    assert d.memory()["kv_used"] == before
    d.control()


def test_running_answers_are_finished_at_the_end(model):
    d = Daemon(model, *FLAGS)
    streams = [d.raw().post("/v1/completions", {**LONG, "max_tokens": 400}) for _ in range(4)]
    for s in streams:
        assert s.head()[0] == 200
    d.signal(signal.SIGTERM)
    for s in streams:
        text = b""
        while piece := s.chunk():
            text += piece
        assert text.endswith(b"data: [DONE]\n\n")
    assert d.wait() == 0
