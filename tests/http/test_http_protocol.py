"""HTTP as it should and should not be spoken."""
import json
import socket
import time

import pytest

from daemon import SLOW, Raw

GEN = {"model": "tiny", "prompt": "the", "max_tokens": 3, "temperature": 0}


def code(answer):
    return json.loads(answer[1])["error"]["code"]


@pytest.mark.parametrize("size", [1, 1000, 1000000])
def test_chunked_bodies_read_like_others(server, size):
    want = server.complete("the" * 100, max_tokens=3)["choices"]
    body = json.dumps({**GEN, "prompt": "the" * 100}).encode()
    with server.raw() as r:
        r.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
               "Transfer-Encoding: chunked\r\n\r\n")
        for i in range(0, len(body), size):
            piece = body[i:i + size]
            r.send(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece))
        r.send("0\r\nX-Trailer: 1\r\n\r\n")
        status, reply, _ = r.answer()
        assert status == 200 and json.loads(reply)["choices"] == want
        assert r.get("/livez").answer()[0] == 200


def test_a_chunked_body_over_the_limit(start):
    d = start("--max-body-bytes", 10000)
    with d.raw() as r:
        r.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            r.send(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        r.send("0\r\n\r\n")
        answer = r.answer()
        assert answer[0] == 413 and code(answer) == "request_too_large" and r.closed()
    with d.raw() as r:  # far over it: cut
        r.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(2000):
                r.send(b"3e8\r\n" + b" " * 1000 + b"\r\n")
            assert r.closed()
            raise ConnectionError
    d.control()
    d.stop()


def test_body_limits_to_the_byte(start):
    d = start("--max-body-bytes", 10000)
    for n, want in [(9999, 200), (10000, 200), (10001, 413)]:
        body = json.dumps({**GEN, "max_tokens": 0}).encode()
        body = body[:-1] + b" " * (n - len(body)) + b"}"
        with d.raw() as r:
            assert r.post("/v1/completions", body).answer()[0] == want
    with d.raw() as r:  # refused before it is sent
        r.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
        answer = r.answer()
        assert answer[0] == 413 and r.closed()
        assert json.loads(answer[1])["error"]["details"]["limit"] == 10000
    d.control()
    d.stop()


def test_many_bodies_at_the_limit_stay_bounded(server):
    body = b'{"model":"other","prompt":"' + b"a" * 4000000 + b'"}'
    before = server.metrics()["process_resident_memory_bytes"]
    socks = [server.raw().post("/v1/completions", body) for _ in range(20)]
    assert all(s.answer()[0] == 404 for s in socks)
    for s in socks:
        s.sock.close()
    assert server.metrics()["process_resident_memory_bytes"] - before < 400e6 * SLOW


@pytest.mark.parametrize("value", ["-1", "abc", "1e3", "18446744073709551616", "3, 3", "+3", "0x3", ""])
def test_malformed_lengths_never_pass(server, value):
    with server.raw() as r:
        r.send(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {value}\r\n\r\n{{}}")
        try:
            assert r.head()[0] in (400, 413)
        except EOFError:
            pass
        assert r.closed()
    server.control()


@pytest.mark.parametrize("headers,status", [
    ("Content-Length: 2\r\nContent-Length: 3\r\n", 400),
    ("Content-Length: 2\r\nContent-Length: 2\r\n", 400),
    ("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", 400),
    ("Transfer-Encoding: gzip\r\n", 501),
    ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
    ("Transfer-Encoding: gzip, chunked\r\n", 501),
    ("Content-Length : 2\r\n", 400),
    ("Expect: foo\r\nContent-Length: 2\r\n", 417),
    ("Host: two\r\nContent-Length: 2\r\n", 400),
    ("Bad(Name): x\r\nContent-Length: 2\r\n", 400),
])
def test_framing_that_two_parsers_could_read_in_two_ways(server, headers, status):
    with server.raw() as r:
        r.send(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n{{}}GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = r.answer()
        assert answer[0] == status and json.loads(answer[1])["error"]["request_id"]
        assert r.closed(), "what follows on such a connection cannot be trusted"
    server.control()


@pytest.mark.parametrize("host,status", [
    ("localhost", 200), ("localhost:1234", 200), ("127.0.0.1:80", 200), ("[::1]:8", 200), ("LOCALHOST", 200),
    ("evil.example", 400), ("localhost.evil.example", 400), ("a b", 400), ("a/b", 400), ('"x"', 400), (None, 400),
])
def test_host_headers(server, host, status):
    with server.raw() as r:
        r.send("GET /livez HTTP/1.1\r\n" + (f"Host: {host}\r\n" if host else "") + "\r\n")
        answer = r.answer()
        assert answer[0] == status
        if status == 400:
            assert code(answer) == "invalid_host"


def test_allowed_hosts(start):
    d = start("--allowed-hosts", "api.example, localhost,127.0.0.1")
    for host, status in [("api.example", 200), ("API.example:443", 200), ("other", 400), ("localhost", 200)]:
        with d.raw() as r:
            assert r.send(f"GET /livez HTTP/1.1\r\nHost: {host}\r\n\r\n").answer()[0] == status
    d.stop()


def test_slow_headers_and_bodies_are_cut(start):
    d = start("--header-seconds", 0.5, "--body-seconds", 0.5, "--idle-seconds", 0.7)
    with d.raw() as r:  # drip: bytes keep coming, and that must not help
        t = time.monotonic()
        r.sock.settimeout(0.1)
        sent = b"GET /livez HTTP/1.1\r\nX: " + b"a" * 100
        try:
            for byte in sent:
                r.send(bytes([byte]))
                time.sleep(0.02)
            cut = False
        except OSError:
            cut = True
        assert cut or r.closed(1)
        assert 0.3 < time.monotonic() - t < 3 * SLOW
    with d.raw() as r:
        r.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{\"mod")
        answer = r.answer()
        assert answer[0] == 408 and code(answer) == "request_timeout" and r.closed(1)
    with d.raw() as r:  # idle between two requests
        assert r.get("/livez").answer()[0] == 200
        assert r.closed(3)
    d.control()
    d.stop()


@pytest.mark.parametrize("end", ["fin", "rst"])
def test_a_body_that_breaks_off(server, end):
    connections = server.metrics()["tinyloop_connections"]
    for _ in range(10):
        r = server.raw()
        r.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{\"model\"")
        if end == "rst":
            r.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        r.sock.close()
    time.sleep(0.2 * SLOW)
    assert server.metrics()["tinyloop_connections"] <= connections + 1
    server.control()


def test_pipelined_requests_are_answered_in_order(server):
    body = json.dumps(GEN)
    with server.raw() as r:
        r.send("GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
               f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
               "GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\nGET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert json.loads(r.answer()[1])["name"] == "tinyloopd"
        assert json.loads(r.answer()[1])["object"] == "text_completion"
        assert r.answer()[0] == 404
        assert json.loads(r.answer()[1])["status"] == "alive"
    with server.raw() as r:
        r.send("GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        assert all(r.answer()[0] == 200 for _ in range(100))
    with server.raw() as r:
        r.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n":
            r.send(bytes([byte]))
        assert r.answer()[0] == 200


def test_a_request_pipelined_behind_a_stream(server):
    with server.raw() as r:
        r.post("/v1/completions", {**GEN, "stream": True, "max_tokens": 20, "ignore_eos": True})
        r.get("/version")
        status, body, _ = r.answer()
        assert status == 200 and body.endswith(b"data: [DONE]\n\n")
        assert json.loads(r.answer()[1])["name"] == "tinyloopd"


def test_an_error_before_the_body_was_read(server):
    for path, status in [("/nowhere", 404), ("/livez", 405)]:
        with server.raw() as r:
            try:
                r.post(path, b" " * 1000000)
            except OSError:
                pass
            assert r.head()[0] == status
            assert r.closed()
    with server.raw() as r:  # a bad body that was read leaves the connection usable
        assert r.post("/v1/completions", b"x" * 100000).answer()[0] == 400
        assert r.get("/livez").answer()[0] == 200


def test_expect_100_continue(server):
    body = json.dumps({**GEN, "unused": "x" * 5000}).encode()
    with server.raw() as r:
        t = time.monotonic()
        r.send(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
               f"Content-Length: {len(body)}\r\n\r\n")
        assert r._until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        assert time.monotonic() - t < 0.5 * SLOW
        assert r.send(body).answer()[0] == 200
    with server.raw() as r:  # refused without asking for the body
        r.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
        assert r._until(b"\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_streams_on_one_connection_end_at_once(server):
    with server.raw() as r:
        for i in range(150):
            r.post("/v1/completions", {**GEN, "stream": True, "max_tokens": 1, "loops": 1})
            status, body, _ = r.answer()
            assert status == 200 and body.endswith(b"data: [DONE]\n\n"), i


METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "FOO", "get"]


def test_methods_on_every_path(server):
    routes = {}
    for e in server.get("/")[1]["endpoints"]:
        routes.setdefault(e["path"].replace("{id}", "x"), set()).add(e["method"])
    for path, have in routes.items():
        allowed = have | ({"HEAD"} if "GET" in have else set())
        for method in METHODS:
            with server.raw() as r:
                r.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
                status, body, headers = r.answer(head_only=method == "HEAD")
                if method in allowed:
                    assert status != 405, (method, path)
                else:
                    assert status == 405, (method, path)
                    assert set(headers["allow"].split(", ")) == allowed
                if method == "HEAD":
                    assert int(headers["content-length"]) > 0


def test_head_is_get_without_the_body(server):
    for path in ["/livez", "/v1/models", "/"]:
        with server.raw() as r:
            _, body, full = r.get(path).answer()
            _, _, head = r.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").answer(head_only=True)
            assert head["content-length"] == full["content-length"] == str(len(body))
            assert r.get("/livez").answer()[0] == 200


@pytest.mark.parametrize("path", ["/nowhere", "//v1//models", "/v1/models/", "/v1/%2e%2e/livez", "/livez/", "/v1/../livez",
                                  "/v1/completions/x", "/metrics", "/admin/status", "/V1/models", "/livez%20"])
def test_unknown_paths_are_404_in_json(server, path):
    with server.raw() as r:
        answer = r.get(path).answer()
        assert answer[0] == 404 and code(answer) in ("route_not_found", "model_not_found")


def refused(r, status, code):
    """One refusal in our own form, then the end of the connection."""
    got, body, headers = r.answer()
    assert got == status and headers["content-type"] == "application/json" and headers["connection"] == "close", body
    e = json.loads(body)["error"]
    assert e["code"] == code and e["type"] == "invalid_request_error" and e["request_id"] == headers["x-request-id"]
    assert r.closed() and r.rest == b""
    return e


def test_long_lines(server):
    count = lambda: server.metrics().get('tinyloop_requests_rejected_total{reason="headers_too_large"}', 0)
    before = count()
    with server.raw() as r:
        assert refused(r.get("/" + "a" * 100000), 414, "uri_too_long")["details"]["limit"] == 32768
    with server.raw() as r:
        assert refused(r.get("/livez", "X: " + "a" * 100000), 431, "headers_too_large")["details"]["limit"] == 32768
    with server.raw() as r:
        refused(r.get("/livez", *[f"X-{i}: {'a' * 100}" for i in range(1000)]), 431, "headers_too_large")
    with server.raw() as r: # a good request before it on the same connection
        r.get("/livez")
        assert r.answer()[0] == 200
        refused(r.get("/livez", "X: " + "a" * 100000), 431, "headers_too_large")
    assert count() == before + 3
    server.control()


def test_what_cannot_be_parsed_is_refused_in_json(server):
    post = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    for text in (post + "Content-Length: -1\r\n\r\n", post + "Content-Length: 99999999999999999999999\r\n\r\n{}",
                 post + "Content-Length: abc\r\n\r\n", "GET /livez HTTP/9.9\r\nHost: localhost\r\n\r\n",
                 post + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n"):
        with server.raw() as r:
            got, body, headers = r.send(text).answer()
            assert got in (400, 413), text
            assert json.loads(body)["error"]["code"] in ("invalid_request", "request_too_large"), body
            assert headers["connection"].lower() == "close" and r.closed() and r.rest == b""
    with server.raw() as r: # pipelined: the answer before it is whole
        r.get("/livez").send(post + "Content-Length: abc\r\n\r\n")
        assert r.answer()[0] == 200
        refused(r, 400, "invalid_request")
    server.control()


@pytest.mark.parametrize("accept", ["*/*", "image/png", "text/event-stream", "gzip;q=0", ""])
def test_accept_headers_never_change_the_coding(server, accept):
    with server.raw() as r:
        status, body, headers = r.get("/", f"Accept: {accept}", "Accept-Encoding: gzip, br").answer()
        assert status == 200 and "content-encoding" not in headers and json.loads(body)["name"] == "tinyloopd"


def test_media_types(server):
    body = json.dumps(GEN).encode()
    for value, status in [("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("text/plain", 415),
                          ("application/x-www-form-urlencoded", 415), ("application/jsonx", 415), ("multipart/form-data", 415)]:
        assert server.request("POST", "/v1/completions", body, headers={"Content-Type": value})[0] == status, value
    assert server.request("POST", "/v1/completions", body, headers={"Content-Encoding": "gzip"})[0] == 415


def test_http_1_0_and_absolute_form(server):
    with server.raw() as r:
        r.send("GET /livez HTTP/1.0\r\n\r\n")
        assert r.answer()[0] == 200 and r.closed()
    with server.raw() as r:
        body = json.dumps({**GEN, "stream": True})
        r.send(f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}")
        status, headers = r.head()
        assert status == 200 and "transfer-encoding" not in headers
        with pytest.raises(EOFError):
            while True:
                r._more()
        assert r.rest.endswith(b"data: [DONE]\n\n")
    with server.raw() as r:
        assert r.send("GET http://localhost/version HTTP/1.1\r\nHost: localhost\r\n\r\n").answer()[0] == 200


def test_web_pages_cannot_forge_requests(server):
    for admin, path in [(False, "/v1/completions"), (True, "/admin/drain")]:
        status, r, _ = server.request("POST", path, json.dumps(GEN).encode(), headers={"Origin": "https://evil.example"}, admin=admin)
        assert status == 403 and r["error"]["code"] == "insufficient_role"
    with Raw(server.admin_port) as r:
        assert r.send("POST /admin/drain HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n").answer()[0] == 400
    assert server.get("/readyz")[0] == 200


def test_at_the_limit_of_connections_others_wait_and_are_served(start):
    d = start("--max-connections", 4, "--idle-seconds", 30)
    held = [d.raw() for _ in range(4)]
    assert all(r.get("/livez").answer()[0] == 200 for r in held)
    late = d.raw().get("/livez")
    late.sock.settimeout(0.3)
    with pytest.raises(socket.timeout):
        late.sock.recv(1)
    late.sock.settimeout(10)
    t = time.monotonic()
    held.pop().sock.close()
    assert late.answer()[0] == 200 and time.monotonic() - t < 1 * SLOW
    for r in [late, *held]:
        r.sock.close()
    d.control()
    d.stop()


def test_bodies_at_once_are_bounded(start):
    d = start("--max-body-bytes", 4096, "--max-bodies-bytes", 64 * 4096)
    half = []
    for _ in range(90):  # each sends most of a body and stops
        r = d.raw()
        r.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4096\r\n\r\n" + b" " * 4000)
        half.append(r)
    time.sleep(0.3 * SLOW)
    with d.raw() as r:
        answer = r.post("/v1/completions", b" " * 4000).answer()
        assert answer[0] == 503 and code(answer) == "server_overloaded"
    for r in half:
        r.sock.close()
    time.sleep(0.3 * SLOW)
    d.control()
    d.stop()


def test_cors_is_off_unless_allowed(start, server):
    assert "Access-Control-Allow-Origin" not in server.get("/livez", headers={"Origin": "https://a.example"})[2]
    d = start("--cors-origins", "https://a.example")
    _, _, h = d.get("/livez", headers={"Origin": "https://a.example"})
    assert h["Access-Control-Allow-Origin"] == "https://a.example" and "X-Request-Id" in h["Access-Control-Expose-Headers"]
    assert "Access-Control-Allow-Credentials" not in h
    assert "Access-Control-Allow-Origin" not in d.get("/livez", headers={"Origin": "https://b.example"})[2]
    status, _, h = d.request("OPTIONS", "/v1/completions", headers={"Origin": "https://a.example",
                                                                    "Access-Control-Request-Method": "POST"})
    assert status == 204 and "POST" in h["Access-Control-Allow-Methods"]
    d.stop()
