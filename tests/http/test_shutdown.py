"""How it ends: drained, forced, and never hung."""
import json
import random
import signal
import socket
import threading
import time

import pytest

from daemon import SLOW

LONG = {"model": "tiny", "prompt": "the", "max_tokens": 1800, "ignore_eos": True, "loops": 16, "temperature": 0}


def test_running_requests_finish_and_waiting_ones_are_refused(start, deep_model):
    d = start("--max-running", 2, model_dir=deep_model)
    running = [d.raw() for _ in range(2)]
    for r in running:
        r.post("/v1/completions", {**LONG, "stream": True, "max_tokens": 60}).head()
    waiting = [d.raw() for _ in range(10)]
    for r in waiting:
        r.post("/v1/completions", LONG)
    end = time.monotonic() + 5 * SLOW
    while d.status()["requests_waiting"] < 10 and time.monotonic() < end:
        time.sleep(0.01)
    idle = d.raw()
    idle.get("/livez").answer()
    d.signal()
    for r in waiting:
        status, body, headers = r.answer()
        assert status == 503 and json.loads(body)["error"]["code"] == "server_draining"
        assert headers["connection"].lower() == "close" and "retry-after" in headers and r.closed()
    assert idle.closed()
    for r in running:
        text = b""
        while piece := r.chunk():
            text += piece
        assert text.endswith(b"data: [DONE]\n\n")
    assert d.wait() == 0


def test_the_timeout_cuts_what_still_runs(start, deep_model):
    d = start("--shutdown-timeout", 0.5, model_dir=deep_model)
    streams = [d.raw() for _ in range(5)]
    for r in streams:
        r.post("/v1/completions", {**LONG, "stream": True}).head()
    plain = d.raw()
    plain.post("/v1/completions", LONG)
    d.wait_running(6)
    t = time.monotonic()
    d.signal()
    for r in streams:
        text = b""
        while piece := r.chunk():
            text += piece
        last = text.strip().split(b"\n\n")[-1]
        assert json.loads(last[6:])["error"]["code"] == "server_draining" and b"[DONE]" not in text
        assert r.closed()
    status, body, _ = plain.answer()
    assert status == 503 and json.loads(body)["error"]["code"] == "server_draining"
    assert d.wait() == 0
    assert time.monotonic() - t < 4 * SLOW


def test_a_second_signal_ends_at_once(start, deep_model):
    d = start(model_dir=deep_model)
    r = d.raw()
    r.post("/v1/completions", {**LONG, "stream": True}).head()
    d.signal()
    time.sleep(0.2)
    assert d.process.poll() is None
    t = time.monotonic()
    d.signal(signal.SIGINT)
    assert d.wait() == 128 + signal.SIGINT and time.monotonic() - t < 1 * SLOW


def free_port():
    """One that the system will not hand to somebody else meanwhile."""
    while True:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", random.randint(20000, 30000)))
                return s.getsockname()[1]
            except OSError:
                pass


def test_idle_and_half_sent_connections_do_not_hold_it_up(start, model):
    d = start(port=free_port())
    idle = [d.raw() for _ in range(50)]
    for r in idle[:25]:
        r.get("/livez").answer()
    half = [d.raw() for _ in range(5)]
    for i, r in enumerate(half):
        r.send("GET /livez HT" if i % 2 else "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
    time.sleep(0.1)
    t = time.monotonic()
    d.signal()
    assert d.wait() == 0 and time.monotonic() - t < 3 * SLOW
    again = start("--host", "127.0.0.1", port=d.port)  # the port is free again
    again.stop()


def test_a_reader_that_stalls_does_not_hold_it_up(start):
    from daemon import Raw
    d = start("--shutdown-timeout", 1)
    r = Raw(d.port, rcvbuf=2048)
    r.post("/v1/completions", {**LONG, "loops": 1, "stream": True, "logprobs": 5, "n": 8})
    d.wait_running()
    time.sleep(0.5)
    t = time.monotonic()
    d.signal()
    assert d.wait() == 0 and time.monotonic() - t < 9 * SLOW


def test_no_new_connections_while_draining(start, deep_model):
    d = start(model_dir=deep_model)
    r = d.raw()
    r.post("/v1/completions", {**LONG, "stream": True}).head()
    d.signal()
    time.sleep(0.3)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", d.port), 1)
    status, body, _ = d.get("/readyz", admin=True)
    assert status == 503 and body["status"] == "draining"
    r.sock.close()
    assert d.wait() == 0


def test_signal_while_loading(start):
    d = start(wait=False)
    d.wait_listening()
    d.signal()
    assert d.wait() == 0


def test_admin_drain_holds_without_ending(start):
    d = start()
    assert d.request("POST", "/admin/drain", b"{}", admin=True)[1]["accepting"] is False
    status, r, h = d.get("/readyz")
    assert status == 503 and r["status"] == "draining"
    r = d.complete("a", expect=503)
    assert r["error"]["code"] == "server_draining"
    assert d.get("/livez")[0] == 200 and d.get("/v1/models")[0] == 200
    d.request("POST", "/admin/undrain", b"{}", admin=True)
    d.control()
    d.stop()


def test_ends_are_the_same_many_times(start):
    for i in range(5):
        d = start()
        t = threading.Thread(target=lambda: d.complete("the", max_tokens=100))
        if i % 2:
            t.start()
            time.sleep(0.02 * i)
        d.signal()
        assert d.wait() == 0
        if i % 2:
            t.join()
