"""Metrics that are finite and add up, logs that are bounded and discreet, probes that tell the truth."""
import ctypes
import json
import math
import os
import pathlib
import subprocess
import time

import pytest

from daemon import SLOW, TINYLOOPD, clean_env

COMPLETIONS = 'route="/v1/completions"'


def finite(m):
    assert m and all(math.isfinite(v) for v in m.values())
    return m


def test_metrics_are_finite_from_the_first_scrape(start, deep_model):
    d = start(model_dir=deep_model)
    finite(d.metrics())
    d.complete("a", n=0, expect=400)
    finite(d.metrics())
    r = d.raw()
    r.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1800, "ignore_eos": True})
    d.wait_running()
    r.sock.close()
    d.wait_idle()
    m = finite(d.metrics())
    assert m["tinyloop_generation_tokens_total"] >= 0
    d.stop()


def test_counters_add_up_and_rest_when_idle(start, deep_model):
    d = start(model_dir=deep_model)
    for i in range(10):
        d.complete([1, 2, 3], max_tokens=5, ignore_eos=True)
    d.complete([1, 2, 3], max_tokens=0)
    d.complete("a", n=0, expect=400)
    r = d.raw()
    r.post("/v1/completions", {"model": "tiny", "prompt": [7, 7], "max_tokens": 1800, "ignore_eos": True, "loops": 16})
    d.wait_running()
    time.sleep(0.05)
    r.sock.close()
    d.wait_idle()
    time.sleep(0.1)
    m = d.metrics()
    assert m[f'tinyloop_requests_total{{{COMPLETIONS},status="200",finish_reason="length"}}'] == 11
    assert m[f'tinyloop_requests_total{{{COMPLETIONS},status="400",finish_reason=""}}'] == 1
    assert m[f'tinyloop_requests_total{{{COMPLETIONS},status="499",finish_reason="client_gone"}}'] == 1
    assert m["tinyloop_prompt_tokens_total"] == 11 * 3 + 2
    assert m["tinyloop_generation_tokens_total"] >= 50
    assert m['tinyloop_time_to_first_token_seconds_count{reuse="none"}'] in (10, 11)
    assert m["tinyloop_queue_time_seconds_count"] == 12
    assert sum(v for k, v in m.items() if "requests_cancelled" in k) == 1
    assert m['tinyloop_device_memory_bytes{state="used"}'] > 0 and m["tinyloop_kv_utilization_ratio"] == 0
    again = d.metrics()
    for k, v in m.items():
        if "/metrics" in k or "/admin" in k or k.startswith("process_") or "worker" in k or "connections" in k:
            assert again[k] >= v or k.startswith("process_") or "connections" in k
        else:
            assert again[k] == v, k
    d.stop()


def test_buckets_are_cumulative(server):
    server.complete("a")
    m = server.metrics()
    for name in ["tinyloop_inter_token_latency_seconds", "tinyloop_queue_time_seconds"]:
        counts = [v for k, v in m.items() if k.startswith(name + "_bucket")]
        assert counts == sorted(counts) and counts[-1] == m[name + "_count"]


def test_the_text_format_is_sound(server):
    text = server.get("/metrics", admin=True)[1]
    seen, typed = set(), {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in typed
            typed[name] = kind
        elif not line.startswith("#"):
            key = line.rsplit(" ", 1)[0]
            assert key not in seen
            seen.add(key)
            base = key.split("{")[0]
            for tail in ("_bucket", "_sum", "_count"):
                if base not in typed and base.endswith(tail):
                    base = base[:-len(tail)]
            assert base in typed, line
            if typed[base] == "counter":
                assert base.endswith("_total")


def test_probes_while_loading(start, tmp_path):
    """A model on a pipe that nobody fills stays loading for as long as we like? Not with checked files: so look at once."""
    d = start(wait=False)
    d.wait_listening()
    seen = []
    end = time.time() + 10 * SLOW
    while time.time() < end:
        status, r, _ = d.get("/readyz")
        seen.append((status, r["status"]))
        assert set(r["checks"]) == {"model_loaded", "worker_alive", "accepting"}
        assert d.get("/livez")[0] == 200
        if status == 200:
            break
        g, body, h = d.request("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})
        assert g == 200 or (body["error"]["code"] == "model_loading" and "Retry-After" in h)
    assert seen[-1] == (200, "ready") and all(s in ((503, "loading"), (200, "ready")) for s in seen)
    d.control()
    d.stop()


def wait_for(what, seconds):
    end = time.time() + seconds * SLOW
    while time.time() < end:
        if what():
            return True
        time.sleep(0.05)
    return False


class Stopped:
    """One thread of a process, held still as a debugger would."""

    SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17

    def __init__(self, tid):
        self.libc, self.tid = ctypes.CDLL(None, use_errno=True), tid
        if self.libc.ptrace(self.SEIZE, tid, None, None) != 0:
            pytest.skip("tracing other processes is not allowed here")
        self.libc.ptrace(self.INTERRUPT, tid, None, None)
        os.waitpid(tid, 0x40000000)  # __WALL

    def release(self):
        self.libc.ptrace(self.DETACH, self.tid, None, None)


def test_a_worker_that_hangs_or_fails_turns_the_probes_red(start):
    d = start("--worker-stall-seconds", 1)
    # the loop is the process's own thread; the worker is among the others
    held = [Stopped(int(p.name)) for p in pathlib.Path(f"/proc/{d.process.pid}/task").iterdir() if int(p.name) != d.process.pid]
    try:
        assert wait_for(lambda: d.get("/livez")[0] == 503, 5)
        status, r, _ = d.get("/readyz")
        assert status == 503 and r["status"] == "stalled" and r["checks"]["worker_alive"] is False
    finally:
        for h in held:
            h.release()
    assert wait_for(lambda: d.get("/livez")[0] == 200 and d.get("/readyz")[0] == 200, 5)
    d.control()
    d.stop()


def test_a_lost_device_is_an_answer_and_an_exit_code(start):
    d = start(env={"TINYLOOPD_TEST_FAIL_STEP": "5"})
    status, r, headers = d.request("POST", "/v1/completions", {"model": "tiny", "prompt": "the", "max_tokens": 50, "ignore_eos": True})
    if status == 200:
        pytest.skip("this program is built without test hooks")
    assert status == 503 and r["error"]["code"] == "gpu_failed" and "Retry-After" in headers
    assert d.get("/livez")[0] == 503
    status, r, _ = d.get("/readyz")
    assert status == 503 and r["status"] == "gpu_failed"
    assert d.complete("the", expect=503)["error"]["code"] == "gpu_failed"
    assert d.wait(10) == 3


def test_log_lines_are_json_and_discreet(start):
    d = start("--log-format", "json", "--log-level", "debug")
    secret = "verysecretprompt"
    d.complete(secret, headers={"X-Request-Id": "abc", "Authorization": "Bearer sesame",
                                "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"})
    d.request("POST", "/v1/completions", ('{"model":"tiny","prompt":"%s"' % secret).encode())
    time.sleep(0.1)
    lines = [json.loads(x) for x in d.lines]
    mine = [x for x in lines if x.get("id") == "abc"][0]
    assert mine["status"] == 200 and mine["tokens"] >= 0 and mine["prompt_tokens"] > 0 and mine["reused_tokens"] == 0
    assert mine["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736" and mine["ttft_ms"] >= 0
    assert secret not in d.log and "sesame" not in d.log
    d.stop()


def test_hostile_bytes_stay_out_of_the_log(start):
    d = start("--log-level", "debug")
    with d.raw() as r:
        r.get("/\x1b[31m\xff\"x", "X-Request-Id: \x1b[2J").answer()
    with d.raw() as r:
        r.send("G\x07T / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            r.answer()
        except (EOFError, OSError):
            pass
    time.sleep(0.1)
    assert "\x1b" not in d.log and "\x07" not in d.log and "\ufffd" not in d.log.replace("\\ufffd", "")
    d.stop()


def test_log_volume_is_bounded(start):
    d = start()
    with d.raw() as r:
        for _ in range(40):
            r.send("GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
            for _ in range(200):
                r.answer()
    time.sleep(0.1)
    assert len(d.lines) < 6000
    d.stop()


def test_a_log_that_nobody_reads_does_not_stop_serving(model):
    read, write = os.pipe()
    err = os.open("/dev/null", os.O_WRONLY)
    p = subprocess.Popen([str(TINYLOOPD), "--model", str(model), "--port", "0", "--admin-port", "-1", "--log-level", "debug"],
                         stdout=write, stderr=err, env=clean_env())
    try:
        text = b""
        while b"listening on" not in text or b"\n" not in text.split(b"listening on")[1]:
            text += os.read(read, 4096)
        port = int(text.split(b"listening on http://127.0.0.1:")[1].split()[0])
        from daemon import Raw
        with Raw(port) as r:
            for _ in range(3000):  # far more than a pipe holds
                assert r.get("/nowhere").answer()[0] == 404
        p.terminate()
        assert p.wait(10 * SLOW) == 0
    finally:
        p.kill()
        p.wait()
        os.close(read)
        os.close(write)


def test_a_full_disk_does_not_stop_serving(model):
    with open("/dev/full", "w") as full:
        with open(os.devnull) as nul:
            import socket
            s = socket.socket()
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
            s.close()
            p = subprocess.Popen([str(TINYLOOPD), "--model", str(model), "--port", str(port), "--admin-port", "-1"],
                                 stdout=full, stderr=full, stdin=nul, env=clean_env())
            try:
                from daemon import Raw
                end = time.time() + 10 * SLOW
                while time.time() < end:
                    try:
                        with Raw(port) as r:
                            if r.get("/readyz").answer()[0] == 200:
                                break
                    except OSError:
                        pass
                    time.sleep(0.05)
                with Raw(port) as r:
                    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
                    assert r.post("/v1/completions", body).answer()[0] == 200
                p.terminate()
                assert p.wait(10 * SLOW) == 0
            finally:
                p.kill()
                p.wait()
