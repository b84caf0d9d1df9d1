"""Start and talk to a real tinyloopd."""
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINYLOOPD = pathlib.Path(os.environ.get("TINYLOOPD", ROOT / "build/release/tinyloopd")).resolve()
TINYLOOP = pathlib.Path(os.environ.get("TINYLOOP", ROOT / "build/release/tinyloop")).resolve()
# Sanitized programs are several times slower: waits grow, bounds that measure speed are skipped.
SLOW = float(os.environ.get("TINYLOOP_TEST_SLOW", "1"))


def clean_env(**more):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TINYLOOP_")}
    env.update(more)
    return env


class Daemon:
    """One process. The log is collected; ports are chosen by the system."""

    def __init__(self, model, *flags, env=None, wait=True, port=0, admin_port=0):
        args = [str(TINYLOOPD), "--port", str(port), "--admin-port", str(admin_port), "--threads", "1"]
        if model:
            args += ["--model", str(model)]
        self.lines = []
        self.process = subprocess.Popen([*args, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        env=clean_env(**(env or {})))
        threading.Thread(target=self._read, daemon=True).start()
        self.port = self.admin_port = None
        if wait:
            self.wait_ready()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    @property
    def log(self):
        return "\n".join(self.lines)

    def wait_listening(self, seconds=20):
        end = time.time() + seconds * SLOW
        while time.time() < end:
            found = re.search(r"listening on http://[^ :\"]+:(\d+)", self.log)
            admin = re.search(r"metrics and admin on http://[^ :\"]+:(\d+)", self.log)
            if found and not admin: # its line comes right after
                time.sleep(0.05)
                admin = re.search(r"metrics and admin on http://[^ :\"]+:(\d+)", self.log)
            if found:
                self.port = int(found[1])
                self.admin_port = int(admin[1]) if admin else None
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"tinyloopd did not listen:\n{self.log}")

    def wait_ready(self, seconds=30):
        self.wait_listening()
        end = time.time() + seconds * SLOW
        while time.time() < end:
            if self.get("/readyz")[0] == 200:
                return self
            time.sleep(0.02)
        raise AssertionError(f"tinyloopd was not ready:\n{self.log}")

    # -- requests

    def request(self, method, path, body=None, headers=None, admin=False, timeout=60):
        """(status, parsed JSON or text, headers)"""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        port = self.admin_port if admin else self.port
        req = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, method=method)
        if data is not None:
            req.add_header("Content-Type", "application/json")
        for k, v in (headers or {}).items():
            req.add_header(k, v)
        try:
            with urllib.request.urlopen(req, timeout=timeout * SLOW) as r:
                return r.status, parse(r.read()), dict(r.headers)
        except urllib.error.HTTPError as e:
            return e.code, parse(e.read()), dict(e.headers)

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def complete(self, prompt="the", expect=200, headers=None, timeout=60, **fields):
        body = {"model": fields.pop("model", "tiny"), "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        status, reply, _ = self.request("POST", "/v1/completions", body, headers=headers, timeout=timeout)
        assert status == expect, reply
        return reply

    def stream(self, prompt="the", headers=None, **fields):
        """All events of a stream, parsed; "[DONE]" and comments as text."""
        return list(self.stream_events(prompt, headers=headers, **fields))

    def stream_events(self, prompt="the", headers=None, **fields):
        body = {"model": fields.pop("model", "tiny"), "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True,
                **fields}
        req = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", data=json.dumps(body).encode())
        req.add_header("Content-Type", "application/json")
        for k, v in (headers or {}).items():
            req.add_header(k, v)
        with urllib.request.urlopen(req, timeout=60 * SLOW) as r:
            assert r.headers["Content-Type"].startswith("text/event-stream")
            for line in r:
                line = line.decode("utf-8").rstrip("\n")
                if line.startswith("data: "):
                    yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])
                elif line:
                    assert line.startswith(": "), line
                    yield line

    def metrics(self):
        text = self.get("/metrics", admin=True)[1]
        out = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                out[re.sub(r'model="[^"]*",?', "", name).replace("{}", "")] = float(value)
        return out

    def memory(self):
        return self.get("/admin/memory", admin=True)[1]

    def status(self):
        return self.get("/admin/status", admin=True)[1]

    def wait_idle(self, seconds=10):
        """Until nothing runs, and what ran has given its memory back."""
        end = time.time() + seconds * SLOW
        while time.time() < end:
            s = self.status()
            if s["requests_running"] + s["requests_waiting"] + s["worker"]["sequences_running"] == 0:
                m = self.memory()
                if m["kv_used"] + m["kv_reserved"] == m["kv_held"]:
                    return
            time.sleep(0.02)
        raise AssertionError(f"not idle: {self.status()} {self.memory()}")

    def wait_running(self, n=1, seconds=10):
        end = time.time() + seconds * SLOW
        while time.time() < end:
            if self.status()["requests_running"] >= n:
                return
            time.sleep(0.01)
        raise AssertionError(f"not running: {self.status()}")

    def control(self):
        """A known-good request: the process is the same and answers right."""
        assert self.process.poll() is None, self.log
        reply = self.complete("the", max_tokens=4, ignore_eos=True, return_tokens=True)
        assert len(reply["choices"][0]["tokens"]) == 4
        assert self.get("/livez")[0] == 200

    def raw(self):
        return Raw(self.port)

    # -- the end

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, seconds=20):
        code = self.process.wait(seconds * SLOW)
        time.sleep(0.05)
        return code

    def stop(self):
        if self.process.poll() is None:
            self.signal()
            try:
                code = self.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise AssertionError(f"tinyloopd did not end:\n{self.log[-3000:]}")
            assert code == 0, f"exit code {code}\n{self.log[-6000:]}"


def parse(raw):
    text = raw.decode("utf-8")
    try:
        return json.loads(text)
    except ValueError:
        return text


class Raw:
    """A socket for what no HTTP client would send."""

    def __init__(self, port, rcvbuf=None, timeout=10):
        self.sock = socket.socket()
        if rcvbuf:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.sock.settimeout(timeout * SLOW)
        self.sock.connect(("127.0.0.1", port))
        self.rest = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def send(self, data):
        self.sock.sendall(data if isinstance(data, bytes) else data.encode("latin-1"))
        return self

    def get(self, path, *headers):
        return self.send("".join([f"GET {path} HTTP/1.1\r\nHost: localhost\r\n", *(h + "\r\n" for h in headers), "\r\n"]))

    def post(self, path, body, *headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n",
                *(h + "\r\n" for h in headers), "\r\n"]
        return self.send("".join(head).encode() + body)

    def _more(self):
        got = self.sock.recv(65536)
        if not got:
            raise EOFError(self.rest)
        self.rest += got

    def _until(self, mark):
        while mark not in self.rest:
            self._more()
        out, self.rest = self.rest.split(mark, 1)
        return out

    def head(self):
        """(status, headers) of the next answer, interim ones skipped."""
        while True:
            lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
            status = int(lines[0].split()[1])
            headers = {}
            for line in lines[1:]:
                k, v = line.split(": ", 1)
                headers[k.lower()] = v
            if status != 100:
                return status, headers

    def chunk(self):
        size = int(self._until(b"\r\n"), 16)
        while len(self.rest) < size + 2:
            self._more()
        out, end, self.rest = self.rest[:size], self.rest[size:size + 2], self.rest[size + 2:]
        assert end == b"\r\n"
        return out

    def answer(self, head_only=False):
        """(status, body, headers): one whole answer, framing checked."""
        status, headers = self.head()
        body = b""
        if head_only or status in (204, 304):
            return status, body, headers
        if headers.get("transfer-encoding") == "chunked":
            while piece := self.chunk():
                body += piece
        else:
            n = int(headers["content-length"])
            while len(self.rest) < n:
                self._more()
            body, self.rest = self.rest[:n], self.rest[n:]
        return status, body, headers

    def closed(self, seconds=5):
        """Does the other side close within this time? What still comes is thrown away."""
        self.sock.settimeout(seconds * SLOW)
        try:
            while self.sock.recv(65536):
                pass
            return True
        except ConnectionResetError:
            return True
        except socket.timeout:
            return False


def text_of(events, index=0):
    return "".join(e["choices"][0]["text"] for e in events
                   if isinstance(e, dict) and e.get("choices") and e["choices"][0]["index"] == index)
