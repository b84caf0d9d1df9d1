"""What large bodies, long texts and departed names may take, and that it comes back."""
import threading
import time

from daemon import SLOW

WORDS = "word and other "


def resident(d):
    return d.metrics()["process_resident_memory_bytes"]


def cancelled(d):
    return sum(v for k, v in d.metrics().items() if k.startswith("tinyloop_requests_cancelled_total"))


def test_the_largest_bodies_leave_nothing_behind(start):
    d = start()
    d.complete("the")
    before = resident(d)
    bodies = [{"model": "tiny", "prompt": WORDS * 260000}, {"model": "tiny", "prompt": [1] * 390000}]
    for body in bodies * 4:
        assert d.request("POST", "/v1/completions", body)[0] == 400  # far too long
    assert d.request("POST", "/v1/tokenize", {"prompt": WORDS * 100000, "with_pieces": True})[0] == 200
    d.wait_idle()
    time.sleep(1.5)  # free memory goes back once a second
    grown = resident(d) - before
    print(f"grown by {grown / 1e6:.1f} MB")
    assert grown < 8e6 or SLOW > 1
    d.control()
    d.stop()


def test_a_text_that_waits_to_be_tokenised_is_given_up_with_its_client(start):
    d = start()
    before, gone = cancelled(d), []
    for _ in range(12):
        r = d.raw()
        gone.append(r.post("/v1/completions", {"model": "tiny", "prompt": WORDS * 100000}))
    for r in gone:
        r.sock.close()
    end = time.time() + 20 * SLOW
    while d.status()["connections"] > 1 and time.time() < end:
        time.sleep(0.02)
    d.wait_idle()
    refused = d.metrics().get('tinyloop_requests_total{route="/v1/completions",status="400",finish_reason="error"}', 0)
    assert cancelled(d) - before + refused == 12
    d.control()
    d.stop()


def test_delete_ends_a_request_that_is_tokenised(start):
    d = start()
    answers = []

    def ask(i):
        answers.append(d.request("POST", "/v1/completions", {"model": "tiny", "prompt": WORDS * 250000},
                                 headers={"X-Request-Id": f"long-{i}"})[1]["error"]["code"])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    deleted = 0
    while any(t.is_alive() for t in threads):
        deleted += any(d.request("DELETE", f"/v1/requests/long-{i}")[0] == 202 for i in range(8))
    print(answers)
    assert deleted and answers.count("request_cancelled") >= 1
    assert set(answers) <= {"request_cancelled", "context_length_exceeded"}
    d.control()
    d.stop()


def test_a_refusal_reaches_a_client_that_sends_first(server):
    body = {"model": "tiny", "prompt": WORDS * 200000}
    for path, want in [("/v1/nothing", 404), ("/v1/models", 405)]:
        status, reply, _ = server.request("POST", path, body)
        assert status == want and reply["error"]["code"]
    assert server.request("POST", "/v1/completions", b"x" * 6_000_000)[0] == 413
    with server.raw() as r:  # who waits for 100 Continue is told at once, and so is who announces what nobody would read
        assert r.send("POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n"
                      "Expect: 100-continue\r\n\r\n").answer()[0] == 404
    with server.raw() as r:
        assert r.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99000000\r\n\r\n").answer()[0] == 413
    server.control()


def test_names_of_gone_entries_are_bounded(start):
    d = start("--gone-entries", 2)
    for name in ("a", "b", "c"):
        assert d.request("PUT", f"/v1/prefix_caches/{name}", {"prompt": "the"})[0] == 201
        assert d.request("DELETE", f"/v1/prefix_caches/{name}")[0] in (202, 204)
    assert [d.get(f"/v1/prefix_caches/{name}")[0] for name in ("a", "b", "c")] == [404, 410, 410]
    d.stop()
