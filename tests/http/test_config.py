"""Settings from file, environment and flags; keys; sockets. What is wrong is said in one line and ends with 2."""
import hashlib
import os
import pathlib
import socket
import subprocess
import time

import pytest

from daemon import ROOT, SLOW, TINYLOOPD, clean_env


def run(*args, env=None, seconds=10):
    r = subprocess.run([str(TINYLOOPD), *map(str, args)], capture_output=True, text=True, env=clean_env(**(env or {})),
                       timeout=seconds * SLOW)
    return r.returncode, r.stdout, r.stderr


def refused(*args, env=None):
    code, out, err = run(*args, env=env)
    assert code == 2 and err.startswith("tinyloopd: ") and err.count("\n") == 1, (code, out, err)
    return err


def test_help_version_and_unknown_flags():
    assert run("--version")[1].startswith("tinyloopd ")
    code, out, _ = run("--help")
    assert code == 0
    for flag in ["--model", "--host", "--port", "--device", "--threads", "--state-dir", "--api-keys", "--insecure",
                 "--admin-host", "--admin-port", "--shutdown-timeout", "--check-config", "--print-config", "--healthcheck"]:
        assert flag in out
    assert "--nope" in refused("--nope")
    assert "needs a value" in refused("--port")
    assert "stray" in refused("stray")


def test_the_default_file_is_what_is_printed():
    assert run("--print-config")[1] == (ROOT / "config/tinyloopd.conf").read_text()
    code, out, _ = run("--config", ROOT / "config/tinyloopd.conf", "--print-config")
    assert code == 0 and out == (ROOT / "config/tinyloopd.conf").read_text()


def test_later_sources_win(tmp_path):
    f = tmp_path / "c"
    f.write_text("[server]\nport = 1\nhost = 127.0.0.2\n[limits]\nmax_running = 3\n")
    value = lambda out, key: [l for l in out.splitlines() if l.startswith(key + " ")][0].split(" = ")[1]
    env = {"TINYLOOP_PORT": "2", "TINYLOOP_MAX_RUNNING": "4"}
    out = run("--config", f, "--port", 3, "--print-config", env=env)[1]
    assert (value(out, "port"), value(out, "max_running"), value(out, "host")) == ("3", "4", "127.0.0.2")
    out = run("--print-config", env={**env, "TINYLOOP_CONFIG": str(f)})[1]
    assert (value(out, "port"), value(out, "host")) == ("2", "127.0.0.2")


@pytest.mark.parametrize("text,words", [
    ("[server]\nport = 80a0\n", "c:2"), ("[server]\nport = -1\n", "c:2"), ("[server]\nport = 70000\n", "0..65535"),
    ("[limits]\nmax_waiting = 1e3\n", "max_waiting"), ("[server]\nprot = 1\n", "unknown key 'prot'"),
    ("[server]\nport = 1\nport = 2\n", "twice"), ("[limits]\nport = 1\n", "[server]"), ("nonsense\n", "c:1"),
    ("[server]\ninsecure = maybe\n", "true or false"), ("[model]\ndevice = tpu\n", "auto|cpu|cuda"),
    ("[server]\nhost = " + "x" * 5000 + "\n", "too long"), ("[server]\nport = 1\0\n", "NUL"), ("port = 1\n", "[server]"),
    ("[limits]\nheader_seconds = nan\n", "seconds"), ("[limits]\nheader_seconds = 0x10\n", "seconds"),
    ("[server]\nport =\n", "port"),
])
def test_wrong_files_are_refused_with_their_place(tmp_path, text, words):
    (tmp_path / "c").write_text(text)
    assert words in refused("--config", tmp_path / "c", "--check-config")


@pytest.mark.parametrize("text", ["", "\n\n", "; only a comment\n# and another\n", "[server]\r\nport = 8081\r\n", "\ufeff[server]\nport = 1\n"])
def test_harmless_files(tmp_path, text):
    (tmp_path / "c").write_bytes(text.encode())
    code, out, err = run("--config", tmp_path / "c", "--check-config")
    assert code == 0 and "sound" in out, err


def test_environment_variables_are_checked():
    assert "TINYLOOP_PROT" in refused("--check-config", env={"TINYLOOP_PROT": "1"})
    assert "service link" in refused("--check-config", env={"TINYLOOP_PORT": "tcp://10.0.0.1:80"})
    assert "no such" in refused("--config", "/nonexistent/file", "--check-config").lower()


def test_unsafe_exposure_needs_a_word(tmp_path):
    assert "insecure" in refused("--host", "0.0.0.0", "--check-config")
    assert "insecure" in refused("--admin-host", "0.0.0.0", "--check-config")
    assert run("--host", "0.0.0.0", "--insecure", "--check-config")[0] == 0


def test_a_model_that_is_not_there(tmp_path):
    assert "--model" in refused()
    assert str(tmp_path) in refused("--model", tmp_path)


def test_a_damaged_model_ends_with_2(tmp_path, model):
    import shutil
    bad = tmp_path / "bad"
    shutil.copytree(model, bad)
    (bad / "model.safetensors").write_bytes((bad / "model.safetensors").read_bytes()[:5000])
    code, out, err = run("--model", bad, "--port", 0)
    assert code == 2 and "cannot load" in out and "model.safetensors" in out


def test_a_taken_port_is_known_before_the_model_is_loaded(server, model):
    t = time.monotonic()
    err = refused("--model", model, "--port", server.port)
    assert time.monotonic() - t < 1 * SLOW and str(server.port) in err and "in use" in err
    assert "admin" not in err
    assert "cannot listen" in refused("--model", model, "--port", 0, "--admin-port", server.port)
    assert "not-a-host" in refused("--model", model, "--host", "not-a-host.invalid", "--insecure")
    server.control()


def test_ipv6_and_no_admin(start):
    d = start("--host", "::1", "--admin-port", -1, wait=False)
    end = time.time() + 10 * SLOW
    while "ready " not in d.log and time.time() < end:
        time.sleep(0.02)
    import re
    port = int(re.search(r"http://\[::1\]:(\d+)", d.log)[1])
    s = socket.create_connection(("::1", port))
    s.sendall(b"GET /livez HTTP/1.1\r\nHost: [::1]\r\n\r\n")
    assert s.recv(100).startswith(b"HTTP/1.1 200")
    assert "admin" not in d.log
    assert run("--host", "::1", "--port", port, "--healthcheck")[0] == 0


def test_cuda_is_not_silently_replaced(model):
    import ctypes
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is a GPU driver here")
    except OSError:
        pass
    code, out, err = run("--model", model, "--port", 0, "--device", "cuda")
    assert code == 2 and "cuda" in (out + err).lower()


def test_healthcheck(start):
    d = start()
    code, out, _ = run("--port", d.port, "--healthcheck")
    assert code == 0 and "ready" in out
    d.request("POST", "/admin/drain", b"{}", admin=True)
    assert run("--port", d.port, "--healthcheck")[0] == 1
    d.stop()
    assert run("--port", d.port, "--healthcheck")[0] == 1


def test_settings_that_need_more_files_than_there_are(model):
    import resource
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard > 200000 or hard == resource.RLIM_INFINITY:
        pytest.skip("no limit to run into")
    assert "open files" in refused("--model", model, "--max-connections", 100000)


# ---- keys


def key_file(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def line(name, secret, tenant="t", roles="infer", limits=""):
    return f"{name}:{hashlib.sha256(secret.encode()).hexdigest()}:{tenant}:{roles}:{limits}"


@pytest.mark.parametrize("bad", ["x", "a:b:c:d", "a:00:t:infer:", line("", "s"), line("a b", "s"), line("a", "s", tenant=""),
                                 line("a", "s", roles=""), line("a", "s", roles="root"), line("a", "s", limits="rpm"),
                                 line("a", "s", limits="rpm=0"), line("a", "s", limits="x=1"), line("a", "s") + "\n" + line("a", "t"),
                                 "", "# nothing"])
def test_wrong_key_files(tmp_path, bad):
    f = tmp_path / "keys"
    f.write_text(bad + "\n")
    err = refused("--api-keys", f, "--check-config")
    assert "keys" in err and "9f86d0" not in err


def test_keys_roles_and_tenants(start, tmp_path, deep_model):
    f = key_file(tmp_path / "keys", "# comment", line("a", "ka", "red"), line("b", "kb", "blue"), line("adm", "kx", "ops", "infer,admin"),
                 line("c", "kc", "red", "cache"), line("r", "kr", "slow", limits="rpm=2"))
    d = start("--api-keys", f, "--host", "0.0.0.0", model_dir=deep_model, wait=False).wait_listening()
    bearer = lambda k: {"Authorization": f"Bearer {k}"}
    end = time.time() + 20 * SLOW
    while d.get("/readyz")[0] != 200 and time.time() < end:
        time.sleep(0.02)
    for path in ["/livez", "/readyz", "/health", "/version"]:
        assert d.get(path)[0] == 200
    for path in ["/v1/models", "/v1/requests", "/nowhere"]:
        status, r, h = d.get(path)
        assert status == 401 and r["error"]["code"] == "invalid_api_key" and h["WWW-Authenticate"] == "Bearer"
    for auth in ["Bearer wrong", "Bearer ", "Basic a2E6", "ka", "Bearer ka "]:
        assert d.get("/v1/models", headers={"Authorization": auth})[0] in (401, 200 if auth == "Bearer ka " else 401)
    for path in ["/tokenize", "/v1/tokenize", "/v1/completions"]:
        assert d.request("POST", path, {"prompt": "a"})[0] == 401
    assert d.get("/v1/models", headers=bearer("ka"))[0] == 200
    assert d.get("/nowhere", headers=bearer("ka"))[0] == 404
    status, r, _ = d.get("/v1/models", headers=bearer("kc"))
    assert status == 403 and r["error"]["code"] == "insufficient_role"
    assert d.get("/metrics", admin=True)[0] == 401
    assert d.get("/metrics", admin=True, headers=bearer("ka"))[0] == 403
    assert d.get("/metrics", admin=True, headers=bearer("kx"))[0] == 200
    # what one tenant runs, another neither sees nor cancels
    r = d.raw()
    r.post("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 1800, "ignore_eos": True, "loops": 16},
           "Authorization: Bearer ka", "X-Request-Id: mine").head()
    assert len(d.get("/v1/requests", headers=bearer("ka"))[1]["data"]) == 1
    assert d.get("/v1/requests", headers=bearer("kb"))[1]["data"] == []
    assert d.get("/v1/requests/mine", headers=bearer("kb"))[0] == 404
    assert d.request("DELETE", "/v1/requests/mine", headers=bearer("kb"))[0] == 404
    assert len(d.get("/admin/requests", admin=True, headers=bearer("kx"))[1]["data"]) == 1
    assert d.request("DELETE", "/v1/requests/mine", headers=bearer("ka"))[0] == 202
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    seen = [d.request("POST", "/v1/completions", body, headers=bearer("kr")) for _ in range(4)]
    assert [s for s, _, _ in seen] == [200, 200, 429, 429]
    assert seen[3][1]["error"]["code"] == "rate_limit_exceeded" and 1 <= int(seen[3][2]["Retry-After"]) <= 60
    log = d.log
    assert "key=a" in log and "ka" not in [w for l in d.lines for w in l.split()] and hashlib.sha256(b"ka").hexdigest() not in log
    d.stop()


def test_keys_are_read_anew(start, tmp_path):
    import signal
    f = key_file(tmp_path / "keys", line("a", "ka"), line("x", "kx", roles="admin,infer"))
    d = start("--api-keys", f, wait=False).wait_listening()
    bearer = lambda k: {"Authorization": f"Bearer {k}"}
    models = lambda k: d.get("/v1/models", headers=bearer(k))[0]
    end = time.time() + 20 * SLOW
    while d.get("/readyz")[0] != 200 and time.time() < end:
        time.sleep(0.02)
    assert (models("ka"), models("kb")) == (200, 401)
    key_file(f, line("b", "kb"), line("x", "kx", roles="admin"))
    d.signal(signal.SIGHUP)
    end = time.time() + 5 * SLOW
    while models("kb") != 200 and time.time() < end:
        time.sleep(0.02)
    assert (models("ka"), models("kb"), models("kx")) == (401, 200, 403)
    f.write_text("nonsense\n")
    status, r, _ = d.request("POST", "/admin/reload", b"{}", admin=True, headers=bearer("kx"))
    assert status == 400 and models("kb") == 200
    key_file(f, line("a", "ka"), line("x", "kx", roles="admin"))
    assert d.request("POST", "/admin/reload", b"{}", admin=True, headers=bearer("kx"))[1] == {"api_keys": 2}
    assert (models("ka"), models("kb")) == (200, 401)
    d.stop()


# ---- sockets and the service manager


def test_socket_activation_and_notification(model, tmp_path):
    ls = socket.socket()
    ls.bind(("127.0.0.1", 0))
    ls.listen()
    note = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    note.bind(str(tmp_path / "notify"))
    note.settimeout(15 * SLOW)
    env = clean_env(NOTIFY_SOCKET=str(tmp_path / "notify"), LISTEN_FDS="1", WATCHDOG_USEC="600000")

    def child():
        os.dup2(ls.fileno(), 3)
        os.set_inheritable(3, True)
        os.environ["LISTEN_PID"] = str(os.getpid())

    shell = f'export LISTEN_PID=$$; exec "{TINYLOOPD}" --model "{model}" --admin-port -1'
    p = subprocess.Popen(["/bin/sh", "-c", shell], env=env, preexec_fn=child, close_fds=False, stdout=subprocess.DEVNULL)
    try:
        seen = []
        while not any("READY=1" in s for s in seen) or not any("WATCHDOG=1" in s for s in seen):
            seen.append(note.recv(1000).decode())
        c = socket.create_connection(ls.getsockname())
        c.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert c.recv(100).startswith(b"HTTP/1.1 200")
        p.terminate()
        while "STOPPING=1" not in seen[-1]:
            seen.append(note.recv(1000).decode())
        assert p.wait(10 * SLOW) == 0
    finally:
        p.kill()
        p.wait()
