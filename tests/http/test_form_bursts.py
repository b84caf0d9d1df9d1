"""Many dear grammars at once: each costs others a step at most, and whoever waits for its turn can leave."""
import signal
import threading
import time

N = 16


def dear(i):
    """Compiles in some milliseconds, and into another grammar for each i."""
    return {"regex": "([a]{0,1%03d}[b]?){50}c" % i}


def refused(i):
    return {"regex": "(a?){6%04d}" % i}


class Posted(threading.Thread):
    """A request of its own thread. at: how far `clock` was when the answer came."""

    def __init__(self, d, body, clock=lambda: 0, **headers):
        super().__init__()
        self.d, self.headers, self.clock = d, headers, clock
        self.body = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "temperature": 0, "pool": "off", **body}
        self.start()

    def run(self):
        self.status, self.reply, _ = self.d.request("POST", "/v1/completions", self.body, headers=self.headers)
        self.at = self.clock()

    def answer(self):
        self.join(60)
        assert not self.is_alive()
        return self.status


class Stream(threading.Thread):
    """A stream that runs beside others; n: events so far; tokens: what its usage says at the end."""

    def __init__(self, d):
        super().__init__()
        self.d, self.n, self.tokens = d, 0, 0
        self.start()
        while self.n < 3 and self.is_alive():
            time.sleep(0.002)

    def run(self):
        for event in self.d.stream_events("the", max_tokens=420, ignore_eos=True, pool="off",
                                          stream_options={"include_usage": True}):
            self.n += 1
            if isinstance(event, dict) and event.get("usage"):
                self.tokens = event["usage"]["completion_tokens"]


def test_a_stream_goes_on_between_two_of_a_burst(slow_server):
    """Counted in tokens of the stream, not in time. Compiled as they come, nearly all would be answered between two tokens."""
    d = slow_server
    stream = Stream(d)
    posted = [Posted(d, refused(i), lambda: stream.n) for i in range(N)]
    assert [p.answer() for p in posted] == [400] * N
    still_running = stream.is_alive()
    stream.join()
    assert stream.tokens == 420  # whatever came beside it; an event has one token or, if the loop was busy, several
    if still_running:
        assert len({p.at for p in posted}) >= N // 3, sorted(p.at for p in posted)
    d.control()
    d.wait_idle()


def test_a_burst_changes_no_answer(slow_server):
    d = slow_server
    form = {"regex": "[a-z]{1,30}[.]", "seed": 5, "max_tokens": 40, "temperature": 1}
    alone = Posted(d, form)
    assert alone.answer() == 200
    posted = [Posted(d, dear(100 + i)) for i in range(N)]
    same = [Posted(d, form) for _ in range(4)]
    many = Posted(d, {"choice": ["yes", "no"], "prompt": ["ab", "cd"], "n": 3})
    chat = [Posted(d, {"regex": "[x-z]{2}[0-9]{%d}" % (i % 3), "max_tokens": 9}) for i in range(6)]
    for p in [*posted, *same, many, *chat]:
        assert p.answer() == 200, p.reply
    text = alone.reply["choices"][0]["text"]
    assert [p.reply["choices"][0]["text"] for p in same] == [text] * 4
    assert all(c["text"] in ("yes", "no") for c in many.reply["choices"]) and len(many.reply["choices"]) == 6
    d.wait_idle()


def test_who_waits_for_its_grammar_can_leave(slow_server):
    d = slow_server
    stream = Stream(d)
    posted = [Posted(d, dear(200 + i)) for i in range(N)]
    late = [Posted(d, {**dear(300), "timeout_ms": 1}), Posted(d, {**dear(303), "max_queue_ms": 1})]
    with d.raw() as gone:
        gone.post("/v1/completions", {"model": "tiny", "prompt": "ab", **dear(301)})
        time.sleep(0.02)
    named = Posted(d, {**dear(302), "max_tokens": 400}, **{"X-Request-Id": "waits-for-form"})
    end = time.time() + 20
    while d.request("DELETE", "/v1/requests/waits-for-form")[0] != 202 and named.is_alive() and time.time() < end:
        time.sleep(0.002)
    assert named.answer() in (200, 409)
    assert [(p.answer(), p.reply["error"]["code"]) for p in late] == [(503, "queue_timeout")] * 2
    assert [p.answer() for p in posted] == [200] * N
    stream.join()
    d.control()
    d.wait_idle()


def test_shutting_down_does_not_wait_for_grammars(start):
    d = start("--shutdown-timeout", 0.2)
    posted = [Posted(d, {**dear(i), "max_tokens": 300}) for i in range(N)]
    d.wait_running()
    d.signal(signal.SIGTERM)
    assert d.wait(20) == 0, d.log
    for p in posted:
        p.join(20)
        assert not p.is_alive()


# Each token of the prompt is read in many ways at once.
FULL = {"regex": "(([ab]{0,300}c?){10})[ab]*", "grammar_scope": "full"}


def test_reading_the_prompt_keeps_nobody_waiting(slow_server):
    d = slow_server
    prompt = "abbaab" * 40
    alone = Posted(d, {**FULL, "prompt": prompt})
    assert alone.answer() == 200
    stream = Stream(d)
    posted = [Posted(d, {**FULL, "prompt": prompt}, lambda: stream.n) for _ in range(4)]
    named = Posted(d, {**FULL, "prompt": prompt, "max_tokens": 200}, **{"X-Request-Id": "reads"})
    plain = Posted(d, {"max_tokens": 2}, lambda: stream.n)
    assert plain.answer() == 200
    while d.request("DELETE", "/v1/requests/reads")[0] != 202 and named.is_alive():
        time.sleep(0.002)
    assert named.answer() in (200, 409)
    for p in posted:
        assert p.answer() == 200
        assert p.reply["choices"][0]["text"] == alone.reply["choices"][0]["text"]
    assert plain.at <= min(p.at for p in posted)
    stream.join()
    d.wait_idle()


def test_a_conflict_deep_in_the_prompt_is_named(slow_server):
    for stream in (False, True):
        p = Posted(slow_server, {**FULL, "prompt": "abb" * 60 + "!a", "stream": stream, "n": 2})
        assert p.answer() == 422 and p.reply["error"]["code"] == "grammar_prefix_conflict"
        assert "'!'" in p.reply["error"]["message"]
        at = p.reply["error"]["details"]["token_index"]
    ids = slow_server.request("POST", "/v1/tokenize", {"prompt": "abb" * 60})[1]
    assert at == len(ids["tokens"])
