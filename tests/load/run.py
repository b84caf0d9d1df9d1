#!/usr/bin/env python3
"""The daemon under load, with the bounds it must keep. Prints each figure and ends with "N passed, N failed".

    tests/load/run.py            the short form, under a minute
    tests/load/run.py --long     the long one, about fifteen minutes; also checks delivery times, so on an idle machine
    tests/load/run.py --long --minutes 30
    tests/load/run.py --long --realtime   on a machine that is not idle: the event loop and the client run before all others
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/http"))

import tinymodel  # noqa: E402
from daemon import SLOW, TINYLOOP, TINYLOOPD, Daemon  # noqa: E402


def loader():
    """The client, built here if make has not."""
    out = TINYLOOPD.parent / "tests/load"
    if not out.exists():
        out = pathlib.Path(tempfile.gettempdir()) / "tinyloop-load"
        subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-O2", "-o", out, ROOT / "tests/load/load.c"], check=True)
    return out


class Run:
    def __init__(self, model, long, realtime=False):
        self.load, self.model, self.long, self.realtime = loader(), model, long, realtime
        self.passed = self.failed = 0

    def check(self, what, ok):
        self.passed += bool(ok)
        self.failed += not ok
        print(("ok   " if ok else "FAIL ") + what, flush=True)

    def client(self, mode, d, *args):
        first = None
        if self.realtime:
            os.sched_setscheduler(d.process.pid, os.SCHED_FIFO, os.sched_param(50))  # the loop's thread alone
            first = lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(40))
        r = subprocess.run([str(self.load), mode, str(d.port), *map(str, args)], capture_output=True, text=True, preexec_fn=first)
        print(r.stdout.strip() + r.stderr.strip(), flush=True)
        return r.returncode, {k: float(v) for k, v in re.findall(r"(\w+)=([-0-9.]+)", r.stdout)}

    def front_end(self):
        """At least 30,000 health checks per second of one core."""
        d = Daemon(self.model)
        before = d.metrics()["process_cpu_seconds_total"]
        code, f = self.client("livez", d, 50, 10 if self.long else 2)
        cpu = d.metrics()["process_cpu_seconds_total"] - before
        rate = f["requests"] / cpu
        self.check(f"{rate:.0f} requests per second of one core", code == 0 and (rate > 30000 or SLOW > 1))
        d.stop()

    def streams(self):
        """500 streams at once: no token is lost, and each arrives soon after it is made."""
        d = Daemon(self.model, "--max-running", 512, "--step-rows", 512, "--max-waiting", 600, "--stream-timestamps")
        code, f = self.client("sse", d, 500 if SLOW == 1 else 100, 100 if self.long else 20, 16 if self.long else 4)
        self.check(f"{f['tokens']:.0f} tokens over {f['streams']:.0f} streams, {f['lost']:.0f} lost", code == 0 and f["lost"] == 0)
        if self.long:
            self.check(f"99 % of the tokens arrive within {f['late_p99_ms']:.1f} ms", f["late_p99_ms"] < 10)
        d.wait_idle()
        d.stop()

    def leavers(self):
        """Clients that leave at random take nothing with them."""
        d = Daemon(self.model, "--max-waiting", 1000, "--pool-auto=false")
        self.client("leave", d, 200, 32, 7)  # warm: pools, threads, allocator
        d.wait_idle()
        before = d.metrics()
        code, f = self.client("leave", d, 10000 if self.long else 600, 32, 11)
        d.wait_idle(30)
        time.sleep(0.3)
        after = d.metrics()
        self.check(f"{f['left']:.0f} of {f['requests']:.0f} clients left, none was failed by the server", code == 0)
        m = d.memory()
        self.check("device memory is back where it was", m["kv_used"] == 0 and m["kv_reserved"] == 0)
        self.check(f"open descriptors: {before['process_open_fds']:.0f} before, {after['process_open_fds']:.0f} after",
                   after["process_open_fds"] <= before["process_open_fds"])
        grown = after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]
        self.check(f"resident memory grew by {grown / 1e6:.1f} MB", grown < 20e6 * SLOW)
        d.control()
        d.stop()

    def names(self, d, seed):
        """Entries that come, serve and go."""
        for i in range(8):
            text = f"round {seed} entry {i} " * 4
            cache, handle = f"/v1/prefix_caches/c{i}", f"/v1/resume_handles/h{i}"
            assert d.request("PUT", cache, {"prompt": text, "loops": 3, "pool": i % 2 == 0})[0] == 201
            assert d.request("PUT", handle, {"prompt": text, "loops_used": 2, "max_loops": 8})[0] == 201
            d.complete(["a", "b"], prefix_cache=f"c{i}", echo=True)
            d.complete([], resume={"handle": f"h{i}", "loops": 6}, n=2, seed=1)
            kept = d.complete(text, loops=2, store_resume={"ttl_seconds": 60})["tinyloop"]["resume_handle"]["id"]
            for path in (cache, handle, f"/v1/resume_handles/{kept}"):
                assert d.request("DELETE", path)[0] in (202, 204)

    def soak(self, minutes):
        """Mixed traffic: memory is flat."""
        # The pool is full after the first round: from then on nothing may grow.
        d = Daemon(self.model, "--max-waiting", 1000, "--stream-timestamps", "--max-running", 128, "--step-rows", 256,
                   "--pool-bytes", "2M", "--state-dir", tempfile.mkdtemp(dir=self.model.parent))
        marks, seed, end = [], 100, time.time() + minutes * 60
        while time.time() < end or len(marks) < 9:
            self.client("leave", d, 300, 24, seed)
            self.client("sse", d, 40, 50, 2)
            self.client("livez", d, 20, 0.3)
            d.complete("a", n=0, expect=400)
            d.complete(["the", "the", "abc"], n=4, max_tokens=20, temperature=1, logprobs=3, echo=True)
            self.names(d, seed)
            d.wait_idle(30)
            marks.append(d.metrics()["process_resident_memory_bytes"])
            seed += 1
        third = len(marks) // 3
        early, late = max(marks[third:2 * third] or marks), max(marks[2 * third:])
        self.check(f"{len(marks)} rounds; resident memory {early / 1e6:.1f} MB in the middle, {late / 1e6:.1f} MB at the end",
                   late < early * 1.05 + 4e6 * SLOW)
        d.stop()


def run(model, long, minutes, realtime=False):
    r = Run(model, long, realtime)
    r.front_end()
    r.streams()
    r.leavers()
    r.soak(minutes)
    return r


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--long", action="store_true")
    ap.add_argument("--minutes", type=float, default=None, help="of mixed traffic")
    ap.add_argument("--realtime", action="store_true")
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        minutes = args.minutes if args.minutes is not None else 10 if args.long else 0.05
        r = run(tinymodel.make(TINYLOOP, pathlib.Path(tmp) / "tiny"), args.long, minutes, args.realtime)
    print(f"{r.passed} passed, {r.failed} failed")
    return r.failed > 0


if __name__ == "__main__":
    sys.exit(main())
