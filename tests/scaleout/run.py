"""Three daemons behind nginx with hash routing (config/nginx/scaleout.conf); one is killed under load and comes back, then another is
asked to end.

What must hold: no request fails, no answer differs from that of a lone daemon without reuse, the requests of the two that live stay where
they were, and those of the killed one move. Reported: who served what, and how much of the prompts came from kept state before, after, and
after the return. Needs nginx and a build; about a minute.

    python3 tests/scaleout/run.py [--seconds N]
"""
import argparse
import collections
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINYLOOPD = os.environ.get("TINYLOOPD", ROOT / "build/release/tinyloopd")
MODEL = ROOT / "config/demo-model"
CLIENTS = 4
SETTLE_S = 6 # the gateway asks a replica that failed again after fail_timeout, and trusts it after the first answer
PLACES = ["the harbour", "a mill", "the last house", "an orchard", "the school", "a bridge", "the station", "a lighthouse", "the market",
          "an island", "the bakery", "a garden"]
ENDS = ["One day", "Then", "Suddenly a dog", "At night", "Her friend said", "In the end"]


def free_ports(n):
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in taken]
    for s in taken:
        s.close()
    return ports


def post(port, path, body, headers=None, timeout=60):
    """(status, parsed reply, replica)"""
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        r = c.getresponse()
        return r.status, json.loads(r.read()), r.headers.get("X-Tinyloop-Replica", "")
    finally:
        c.close()


class Daemon:
    def __init__(self, port, log, manifest=None):
        self.port = port
        flags = ["--boot-manifest", str(manifest)] if manifest else []
        env = {k: v for k, v in os.environ.items() if not k.startswith("TINYLOOP_")}
        self.process = subprocess.Popen([str(TINYLOOPD), "--model", str(MODEL), "--port", str(port), "--admin-port", "-1", "--threads", "1",
                                         "--memory-bytes", "1G", *flags], stdout=log, stderr=log, env=env)

    def wait_ready(self):
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(f"a daemon ended with {self.process.returncode}: see its log")
            try:
                c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
                c.request("GET", "/readyz")
                if c.getresponse().status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        raise SystemExit("a daemon was not ready within 30 s")

    def end(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=40)


def story(i):
    place = PLACES[i % len(PLACES)]
    return (f"Story {i}. Once upon a time there was a girl who lived near {place}. Every morning she walked to {place} with her small bag and "
            f"looked at the birds. She liked {place} more than any other place, and she told her mother about it. Her mother smiled and gave her "
            f"bread, an apple and a blue cup for the way. It was a warm day and the wind was soft. ")


def make_requests(lone):
    """(key, headers, body, body of the same from scratch). Half of the keys are prompts, half are entries of the manifest."""
    def ids(text):
        return post(lone, "/v1/tokenize", {"prompt": text})[1]["tokens"]

    manifest, requests = [], []
    common = {"model": "demo-model", "max_tokens": 6, "loops": 4, "ignore_eos": True, "return_tokens": True, "return_logits_hash": True}
    for i in range(len(PLACES)):
        for j, end in enumerate(ENDS):
            how = {"temperature": 0} if j % 2 else {"temperature": 0.8, "seed": 100 * i + j}
            text = story(i) + end
            requests.append((f"prompt {i}", {}, {**common, **how, "prompt": text}, {**common, **how, "prompt": text, "pool": "off"}))
    for i in range(len(PLACES)):
        prefix = ids("Rules. " + story(i + 100))
        manifest.append({"kind": "prefix_cache", "id": f"rules-{i}", "prompt": prefix, "loops": 4})
        for j, end in enumerate(ENDS):
            how = {"temperature": 0} if j % 2 else {"temperature": 0.8, "seed": 100 * i + j}
            suffix = ids(end)[1:] or [7]
            headers = {"X-Tinyloop-Prefix": f"rules-{i}"} if i % 2 else {} # the header and the body's name are one key
            requests.append((f"rules-{i}", headers, {**common, **how, "prompt": suffix, "prefix_cache": f"rules-{i}"},
                             {**common, **how, "prompt": prefix + suffix, "pool": "off"}))
    return manifest, requests


def answer(reply):
    c = reply["choices"][0]
    return c["tokens"], c["logits_hash"], c["finish_reason"]


class Load:
    """Clients that ask at random until told to stop; every outcome is kept with its phase."""

    def __init__(self, port, requests, expected):
        self.port, self.requests, self.expected = port, requests, expected
        self.phase, self.stop, self.done = "", False, []
        self.threads = [threading.Thread(target=self.run, args=(s,)) for s in range(CLIENTS)]
        for t in self.threads:
            t.start()

    def run(self, seed):
        rnd = random.Random(seed)
        while not self.stop:
            i = rnd.randrange(len(self.requests))
            key, headers, body, _ = self.requests[i]
            phase, t = self.phase, time.monotonic()
            out = {"key": key, "phase": phase, "at": t, "error": None, "same": None, "replica": "", "cached": 0, "prompt": 0}
            try:
                status, reply, out["replica"] = post(self.port, "/v1/completions", body, headers)
                if status == 200:
                    usage = reply["usage"]
                    out["prompt"], out["cached"] = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
                    out["same"] = answer(reply) == self.expected[i]
                else:
                    out["error"] = f"{status} {reply}"
            except (OSError, http.client.HTTPException, ValueError) as e:
                out["error"] = repr(e)
            out["seconds"] = time.monotonic() - t
            self.done.append(out)

    def end(self):
        self.stop = True
        for t in self.threads:
            t.join()


def last(replica):
    return replica.split(", ")[-1]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seconds", type=float, default=12, help="length of each phase")
    seconds = p.parse_args().seconds
    if not shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin"):
        raise SystemExit("nginx is missing: scripts/setup.sh --dev")
    work = pathlib.Path(tempfile.mkdtemp(prefix="tinyloop-scaleout-"))
    os.chmod(work, 0o755)
    log = open(work / "daemons.log", "wb")
    running, gateway, load, checks = [], None, None, []
    try:
        ports = free_ports(5)
        lone = Daemon(ports[4], log)
        running.append(lone)
        lone.wait_ready()
        manifest, requests = make_requests(lone.port)
        expected = []
        for _, _, _, fresh in requests:
            status, reply, _ = post(lone.port, "/v1/completions", fresh)
            assert status == 200 and reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, reply
            expected.append(answer(reply))
        lone.end()
        boot = work / "boot.json"
        boot.write_text(json.dumps(manifest))
        replicas = {}
        for port in ports[:3]:
            replicas[f"127.0.0.1:{port}"] = Daemon(port, log, boot)
            running.append(replicas[f"127.0.0.1:{port}"])
        for d in replicas.values():
            d.wait_ready()
        conf = (ROOT / "config/nginx/scaleout.conf").read_text()
        for shipped, port in zip((8101, 8111, 8121, 8100), ports):
            conf = conf.replace(f"127.0.0.1:{shipped}", f"127.0.0.1:{port}")
        (work / "nginx.conf").write_text(conf)
        gateway = subprocess.Popen(["nginx", "-p", str(work), "-c", str(work / "nginx.conf")], stderr=open(work / "nginx.log", "wb"),
                                   env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin"})
        time.sleep(0.5)
        assert gateway.poll() is None, (work / "nginx.log").read_text()

        load = Load(ports[3], requests, expected)
        load.phase = "warm"
        time.sleep(seconds / 2)
        load.phase = "before"
        time.sleep(seconds)
        served = collections.Counter(last(r["replica"]) for r in load.done)
        victim = served.most_common(1)[0][0]
        load.phase = "after"
        kill_at = time.monotonic()
        replicas[victim].end(signal.SIGKILL)
        time.sleep(seconds)
        load.phase = "return"
        replicas[victim] = Daemon(int(victim.split(":")[1]), log, boot)
        running.append(replicas[victim])
        replicas[victim].wait_ready()
        settled_at = time.monotonic() + SETTLE_S
        time.sleep(SETTLE_S + seconds)
        load.phase = "drain"
        leaving = next(r for r in replicas if r != victim)
        drained = replicas.pop(leaving).end()
        time.sleep(seconds / 2)
        load.end()

        done = load.done
        print(f"{len(requests)} different requests of {len({r[0] for r in requests})} prefixes, {CLIENTS} clients; {victim} was killed")
        print(f"{'phase':8} {'requests':>8} {'hit ratio':>10} {'tokens':>8}  by replica")
        ratio = {}
        for phase in ("warm", "before", "after", "return", "drain"):
            part = [r for r in done if r["phase"] == phase and not r["error"]]
            ratio[phase] = sum(r["cached"] for r in part) / max(1, sum(r["prompt"] for r in part))
            hits = sum(r["cached"] > 0 for r in part) / max(1, len(part))
            by = collections.Counter(last(r["replica"]) for r in part)
            print(f"{phase:8} {len(part):8} {hits:10.1%} {ratio[phase]:8.1%}  " + ", ".join(f"{k}: {by[k]}" for k in sorted(by)))
        lost = [r for r in done if r["phase"] == "after" and not r["error"] and r["at"] < kill_at + 2]
        print(f"first 2 s after the kill: {len(lost)} requests, {sum(r['cached'] for r in lost) / max(1, sum(r['prompt'] for r in lost)):.1%} of "
              f"the prompt tokens from kept state")
        moved = [r for r in done if "," in r["replica"]]
        print(f"asked a second replica within the request: {len(moved)}; slowest request: before "
              f"{max(r['seconds'] for r in done if r['phase'] == 'before'):.2f} s, after {max(r['seconds'] for r in done if r['phase'] == 'after'):.2f} s")

        def homes(phase, since=0.0):
            out = collections.defaultdict(set)
            for r in done:
                if r["phase"] == phase and r["at"] >= since and not r["error"] and "," not in r["replica"]: # else caught by the kill
                    out[r["key"]].add(last(r["replica"]))
            return out

        before, after = homes("before"), homes("after", kill_at + 0.5)
        orphans = {k for k, v in before.items() if victim in v}
        stayed = {k for k in after if k not in orphans and after[k] == before[k]}
        back = homes("return", settled_at)
        print(f"prefixes: {len(before)}, of which {len(orphans)} belonged to the killed replica and moved; {len(stayed)} stayed; "
              f"{sum(back[k] == before[k] for k in back)} of {len(back)} were where they had been after its return")

        checks = [
            ("no request failed", not [r for r in done if r["error"]], next((r["error"] for r in done if r["error"]), "")),
            ("no answer changed", all(r["same"] for r in done if not r["error"]), ""),
            ("each prefix has one replica", all(len(v) == 1 for v in before.values()), str(dict(before))),
            ("all three serve", len({r for v in before.values() for r in v}) == 3, ""),
            ("nothing comes from the killed one", all(victim not in v for v in after.values()), ""),
            ("the others' prefixes stayed", len(stayed) == len([k for k in after if k not in orphans]), ""),
            ("the hit ratio is there again after the kill", ratio["after"] > 0.9 * ratio["before"], str(ratio)),
            ("the prefixes came back", bool(back) and all(back[k] == before[k] for k in back), str({k: (before[k], v) for k, v in back.items() if before[k] != v})),
        ]
        checks.append(("one that is asked to end under load ends with 0", drained == 0, str(drained)))
        for d in replicas.values():
            checks.append(("a replica drains and ends with 0", d.end() == 0, ""))
    finally:
        if load:
            load.end()
        if gateway and gateway.poll() is None:
            gateway.terminate()
            gateway.wait(timeout=10)
        for d in running:
            d.end(signal.SIGKILL)
        log.close()
    for name, ok, more in checks:
        print(("ok    " if ok else "FAIL  ") + name + ("" if ok else f": {more[:500]}"))
    failed = sum(not ok for _, ok, _ in checks) or int(not checks)
    if not failed:
        shutil.rmtree(work)
    else:
        print(f"logs: {work}")
    print(f"{len(checks) - failed} passed, {failed} failed")
    raise SystemExit(1 if failed else 0)


main()
