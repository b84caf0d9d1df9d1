"""Depth comes from the model: the default, what it was trained for, and the most that may be asked, for every family."""
import json
import pathlib
import shutil
import subprocess

import pytest

from daemon import TINYLOOP, Daemon

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
P = [1, 2, 3, 4, 5]
BEYOND = "loops {} is beyond the depth that the model was trained for ({})"

# model, keys of config.json, flags; default, trained and most loops
FAMILIES = [
    ("ouro-tiny", {}, [], (4, 4, 8)),
    ("ouro-tiny", {"total_ut_steps": 40}, [], (40, 40, 64)),
    ("ouro-tiny", {}, ["--max-loops", 2], (2, 4, 2)),
    ("huginn-tiny", {}, [], (5, 5, 64)),
    ("huginn-tiny", {"mean_recurrence": 32}, [], (32, 32, 64)),
    ("huginn-tiny", {}, ["--max-loops", 6], (5, 5, 6)),
    ("retrofit-llama-tiny", {}, [], (5, 5, 64)),
    ("retrofit-olmo-tiny", {}, [], (5, 5, 64)),
]


@pytest.fixture(params=FAMILIES, ids=lambda f: "-".join([f[0], *map(str, f[1].values()), *map(str, f[2])]))
def served(request, tmp_path):
    name, keys, flags, depths = request.param
    model = shutil.copytree(GOLDEN / name, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **keys}))
    d = Daemon(model, *flags)
    yield d, model, *depths
    d.stop()


def post(d, path, **body):
    status, reply, _ = d.request("POST", path, body)
    return status, reply


def complete(d, **body):
    return post(d, "/v1/completions", model="m", max_tokens=2, temperature=0, **body)


def warned(loops, trained):
    return [BEYOND.format(loops, trained)] if loops > trained else []


def refused(status, reply, expect, code, *numbers):
    error = reply["error"]
    assert (status, error["code"]) == (expect, code), reply
    for n in numbers:
        assert str(n) in error["message"], error["message"]
    return error


def test_depths_of_a_model(served):
    d, _, default, trained, most = served
    limits = d.get("/v1/models/m")[1]["limits"]
    assert (limits["default_loops"], limits["trained_loops"], limits["max_loops"]) == (default, trained, most)
    status, r = complete(d, prompt=P)
    assert status == 200 and r["tinyloop"]["loops"] == default and r["tinyloop"]["warnings"] == []
    for loops in {1, min(trained, most), min(trained + 1, most), most}:
        status, r = complete(d, prompt=P, loops=loops)
        assert status == 200 and r["tinyloop"]["loops"] == loops and r["tinyloop"]["warnings"] == warned(loops, trained)
    events = [e for e in d.stream(P, model="m", loops=most, max_tokens=2) if isinstance(e, dict)]
    assert [e["tinyloop"]["warnings"] for e in events if e.get("tinyloop")] == [warned(most, trained)]
    error = refused(*complete(d, prompt=P, loops=most + 1), 400, "loops_out_of_range", most + 1, most)
    assert error["param"] == "loops" and error["details"] == {"min": 1, "max": most, "got": most + 1}


def test_entries_have_the_depths_of_the_model(served):
    d, _, default, trained, most = served
    for path, fields, depth, code in (
            ("/v1/prefix_caches", {}, "loops", "loops_out_of_range"),
            ("/v1/pool/entries", {}, "loops", "loops_out_of_range"),
            ("/v1/resume_handles", {"max_loops": most}, "loops_used", "loops_used_out_of_range")):
        for loops in {1, default, most}:
            status, r = post(d, path, prompt=[*P, loops], **{depth: loops}, **fields)
            assert status == 201 and r[depth] == loops and r["warnings"] == warned(loops, trained)
            assert d.get(f"{path}/{r['id']}")[1]["warnings"] == warned(loops, trained)
        refused(*post(d, path, prompt=P, **{depth: most + 1}, **fields), 400, code, most + 1, most)
    for beyond in (most + 1, 65):
        refused(*post(d, "/v1/resume_handles", prompt=P, max_loops=beyond), 400, "max_loops_exceeded", beyond, most)
        refused(*complete(d, prompt=P, store_resume={"max_loops": beyond}), 400, "max_loops_exceeded", beyond, most)
    for loops in {1, default, most}:                # memory is promised for max_loops: not more than usual unless asked for
        usual = max(min(most, 32), loops)
        assert post(d, "/v1/resume_handles", prompt=[*P, 9, loops], loops_used=loops)[1]["max_loops"] == usual
        kept = complete(d, prompt=[*P, 8, loops], loops=loops, store_resume={})[1]["tinyloop"]["resume_handle"]
        assert (kept["loops_used"], kept["max_loops"]) == (loops, usual)
    handle = post(d, "/v1/resume_handles", prompt=P, loops_used=1, max_loops=most)[1]
    assert handle["max_loops"] == most and handle["warnings"] == []
    for loops in {1, most}:
        status, r = complete(d, resume={"handle": handle["id"], "loops": loops})
        assert status == 200 and r["tinyloop"]["warnings"] == warned(loops, trained)
        status, r = post(d, f"/v1/resume_handles/{handle['id']}/promote", loops=loops)
        assert status == 201 and r["warnings"] == warned(loops, trained)
    for loops in (0, -3, most + 1, 99, 10**12):
        error = refused(*complete(d, resume={"handle": handle["id"], "loops": loops}), 422, "resume_depth_out_of_range",
                        min(loops, 2**31 - 1), 1, most)
        assert error["param"] == "resume.loops" and error["details"]["got"] == min(loops, 2**31 - 1)


def test_the_command_line_has_the_same_depths(served):
    d, model, _, trained, most = served
    if "--max-loops" in d.process.args: # a setting of the daemon
        return
    def generate(loops):
        return subprocess.run([TINYLOOP, "generate", "--model", model, "--tokens", "1,2,3", "--max-tokens", "2", "--json",
                               "--loops", str(loops)], capture_output=True, text=True, timeout=60)
    within, beyond = generate(trained), generate(trained + 1)
    assert within.returncode == 0 and within.stderr == "" and json.loads(within.stdout)["loops"] == trained
    assert beyond.returncode == 0 and BEYOND.format(trained + 1, trained) in beyond.stderr
    wrong = generate(most + 1)
    assert wrong.returncode in (1, 2) and f"loops is {most + 1}, " in wrong.stderr and str(most) in wrong.stderr


def test_chat_warns_as_well(start):
    d = start(model_dir=GOLDEN.parents[1] / "config/demo-model/int4")
    name = d.get("/v1/models")[1]["data"][0]["id"]
    limits = d.get(f"/v1/models/{name}")[1]["limits"]
    trained, most = limits["trained_loops"], limits["max_loops"]
    messages = [{"role": "user", "content": "Hello."}]
    status, r = post(d, "/v1/chat/completions", model=name, messages=messages, max_tokens=1, loops=most)
    assert status == 200 and r["tinyloop"]["warnings"] == warned(most, trained)
    refused(*post(d, "/v1/chat/completions", model=name, messages=messages, loops=most + 1), 400, "loops_out_of_range",
            most + 1, most)


def test_the_field_of_an_entry_that_is_not_there(server):
    def param(**start):
        return refused(*post(server, "/v1/completions", model="tiny", prompt=[1], **start), 404,
                       "resume_handle_not_found" if "resume" in start else "prefix_cache_not_found")["param"]
    assert param(prefix_cache="gone") == "prefix_cache"
    assert param(prefix_cache={"id": "gone"}) == "prefix_cache.id"
    assert param(resume={"handle": "gone", "loops": 4}) == "resume.handle"
    status, r = post(server, "/v1/prefix_caches", **{"from": {"pool_entry": "gone"}})
    assert refused(status, r, 404, "pool_entry_not_found")["param"] == "from.pool_entry"
    status, r, _ = server.request("GET", "/v1/prefix_caches/gone")
    assert status == 404 and r["error"]["param"] == "id"
