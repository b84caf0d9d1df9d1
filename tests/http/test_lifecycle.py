"""Clients that leave, stall or cancel, at every stage; nothing of theirs stays."""
import json
import random
import socket
import threading
import time

import pytest

from daemon import SLOW, Raw

LONG = {"model": "tiny", "prompt": "the", "max_tokens": 1800, "ignore_eos": True, "loops": 16, "temperature": 0}


def reset(r):
    r.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    r.sock.close()


def cancelled(d):
    return sum(v for k, v in d.metrics().items() if k.startswith("tinyloop_requests_cancelled_total"))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [lambda r: r.sock.close(), reset, lambda r: r.sock.shutdown(socket.SHUT_WR)],
                         ids=["close", "reset", "half-close"])
def test_work_stops_when_the_client_is_gone(slow_server, stream, leave):
    d = slow_server
    d.wait_idle()
    before = cancelled(d)
    r = d.raw()
    r.post("/v1/completions", {**LONG, "stream": stream})
    if stream:
        r.head()
        for _ in range(3):
            r.chunk()
    else:
        d.wait_running()
        time.sleep(0.1)
    t = time.monotonic()
    leave(r)
    d.wait_idle(5)
    assert time.monotonic() - t < 1 * SLOW
    assert cancelled(d) == before + 1
    r.sock.close()
    d.control()


def test_a_leaving_client_is_noticed_at_once(slow_server):
    d, times = slow_server, []
    for stream in [True, False] * 3:
        d.wait_idle()
        before = cancelled(d)
        r = d.raw()
        r.post("/v1/completions", {**LONG, "prompt": [1] * 200, "stream": stream})
        d.wait_running()
        t = time.monotonic()
        r.sock.close()
        while cancelled(d) == before and time.monotonic() - t < 5:
            pass
        times.append(time.monotonic() - t)
    print(f"noticed within {min(times) * 1e3:.1f} to {max(times) * 1e3:.1f} ms")
    assert sorted(times)[2] < 0.05 * SLOW
    d.wait_idle()


def test_half_close_can_be_allowed(start, deep_model):
    d = start("--half-close-cancels=false", model_dir=deep_model)
    with d.raw() as r:
        r.post("/v1/completions", {**LONG, "max_tokens": 30})
        r.sock.shutdown(socket.SHUT_WR)
        assert r.answer()[0] == 200
    d.stop()


def test_cancel_during_prefill(slow_server):
    d = slow_server
    d.wait_idle()
    steps = d.status()["worker"]["rows"]
    r = d.raw()
    r.post("/v1/completions", {**LONG, "prompt": [1 + i % 200 for i in range(2000)], "max_tokens": 1, "pool": "off"})
    d.wait_running()
    r.sock.close()
    t = time.monotonic()
    d.wait_idle()
    assert time.monotonic() - t < 1 * SLOW
    assert d.status()["worker"]["rows"] - steps < 2000
    d.control()


def test_requests_of_departed_clients_are_never_run(start, deep_model):
    d = start("--max-running", 1, model_dir=deep_model)
    busy = d.raw()
    busy.post("/v1/completions", {**LONG, "stream": True}).head()
    waiting = [d.raw() for _ in range(20)]
    for r in waiting:
        r.post("/v1/completions", {**LONG, "prompt": [1] * 500, "max_tokens": 1000})
    end = time.monotonic() + 5 * SLOW
    while d.status()["requests_waiting"] < 20 and time.monotonic() < end:
        time.sleep(0.01)
    assert d.status()["requests_waiting"] == 20
    for r in waiting:
        r.sock.close()
    end = time.monotonic() + 5 * SLOW
    while d.status()["requests_waiting"] and time.monotonic() < end:
        time.sleep(0.01)
    rows = d.status()["worker"]["rows"]
    busy.sock.close()
    d.wait_idle()
    assert d.metrics()['tinyloop_requests_cancelled_total{stage="queued"}'] == 20
    assert d.metrics()["tinyloop_prompt_tokens_total"] < 100
    assert d.status()["worker"]["rows"] - rows < 400
    d.stop()


def test_hundreds_of_streams_closed_at_random(start):
    d = start()
    d.control()
    d.wait_idle()
    before, rng = d.metrics(), random.Random(1)

    def one(seed):
        rng = random.Random(seed)
        for i in range(12):
            r = d.raw()
            r.post("/v1/completions", {**LONG, "stream": True, "loops": 1})
            try:
                r.head()
                for _ in range(rng.randint(0, 6)):
                    r.chunk()
            finally:
                (reset if rng.random() < 0.5 else lambda r: r.sock.close())(r)
            if i % 6 == 5:
                d.control()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    d.wait_idle()
    time.sleep(0.2)
    after = d.metrics()
    assert after["process_open_fds"] <= before["process_open_fds"] + 2
    assert after["tinyloop_connections"] <= 2
    assert after["tinyloop_requests_running"] == 0
    d.control()
    d.stop()


def test_a_reader_that_stalls_pauses_alone_and_is_cut(start):
    d = start("--outbox-bytes", 4096, "--slow-reader-seconds", 1.5)
    stalled = [Raw(d.port, rcvbuf=2048) for _ in range(6)]
    rss = d.metrics()["process_resident_memory_bytes"]
    for r in stalled:
        r.post("/v1/completions", {**LONG, "loops": 1, "stream": True, "logprobs": 5, "return_tokens": True, "n": 4})
    d.wait_running(6)
    t = time.monotonic()
    assert len(d.stream("abc", max_tokens=30, ignore_eos=True, return_tokens=True)) > 30  # others are served meanwhile
    assert time.monotonic() - t < 5 * SLOW
    end = time.monotonic() + 20 * SLOW
    while d.status()["requests_running"] and time.monotonic() < end:
        time.sleep(0.05)
    d.wait_idle()
    m = d.metrics()
    assert m['tinyloop_requests_total{route="/v1/completions",status="200",finish_reason="slow_reader"}'] == 6
    assert m["tinyloop_generation_tokens_total"] < 6 * 4 * 1800
    assert m["process_resident_memory_bytes"] - rss < 50e6 * SLOW
    d.control()
    d.stop()


def test_a_paused_stream_goes_on_without_loss(start):
    d = start("--outbox-bytes", 2048)
    kw = {**LONG, "loops": 1, "max_tokens": 1500, "return_tokens": True, "temperature": 1, "seed": 9}
    want = d.request("POST", "/v1/completions", kw)[1]["choices"][0]["tokens"]
    with Raw(d.port, rcvbuf=2048) as r:
        r.post("/v1/completions", {**kw, "stream": True})
        r.head()
        time.sleep(1.0)
        got, text = [], b""
        while piece := r.chunk():
            text += piece
        for line in text.split(b"\n\n"):
            if line.startswith(b"data: {"):
                for c in json.loads(line[6:])["choices"]:
                    got += c.get("tokens", [])
        assert text.endswith(b"data: [DONE]\n\n") and got == want
    d.wait_idle()
    d.stop()


@pytest.mark.parametrize("stream", [True, False])
def test_delete_cancels(slow_server, stream):
    d, result = slow_server, {}
    d.wait_idle()

    def run():
        if stream:
            result["events"] = d.stream(headers={"X-Request-Id": "mine"}, **{k: v for k, v in LONG.items() if k != "model"})
        else:
            result["reply"] = d.request("POST", "/v1/completions", LONG, headers={"X-Request-Id": "mine"})

    t = threading.Thread(target=run)
    t.start()
    d.wait_running()
    listed = d.get("/v1/requests")[1]["data"]
    assert len(listed) == 1 and listed[0]["request_id"] == "mine" and listed[0]["id"].startswith("req_")
    assert d.get("/v1/requests/" + listed[0]["id"])[1]["stream"] is stream
    time.sleep(0.1)
    assert d.request("DELETE", "/v1/requests/mine")[0] == 202
    t.join(5 * SLOW)
    assert not t.is_alive()
    if stream:
        last = result["events"][-1]
        assert last["error"]["code"] == "request_cancelled" and "[DONE]" not in result["events"]
    else:
        status, r, headers = result["reply"]
        assert status == 409 and r["error"]["code"] == "request_cancelled" and headers["x-should-retry"] == "false"
    assert d.request("DELETE", "/v1/requests/mine")[0] == 404
    d.wait_idle()


def test_bytes_and_closes_while_suspended(slow_server):
    d = slow_server
    for extra in [b"", b"GARBAGE", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"]:
        r = d.raw()
        r.post("/v1/completions", {**LONG, "max_tokens": 300})
        r.send(extra)
        d.wait_running()
        r.sock.close()
        d.wait_idle()
    d.control()


def test_an_answer_to_nobody_is_logged(slow_server):
    r = slow_server.raw()
    r.post("/v1/completions", LONG, "X-Request-Id: left-early")
    slow_server.wait_running()
    r.sock.close()
    slow_server.wait_idle()
    time.sleep(0.1)
    line = [x for x in slow_server.lines if "id=left-early" in x][0]
    assert "status=499" in line and "finish=client_gone" in line
