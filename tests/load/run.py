#!/usr/bin/env python3
"""The daemon under load, with the bounds it must keep. Prints each figure and ends with "N passed, N failed".

    tests/load/run.py            the short form, under a minute
    tests/load/run.py --long     the long one, about fifteen minutes; also checks delivery times, so on an idle machine
    tests/load/run.py --long --only soak --requests 200000
    tests/load/run.py --long --realtime   on a machine that is not idle: the event loop and the client run before all others
"""
import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/http"), str(ROOT / "tests/load")]

import tinymodel  # noqa: E402
import traffic  # noqa: E402
from daemon import SLOW, TINYLOOP, TINYLOOPD, Daemon  # noqa: E402

# Two hours' worth: what a server with an ordinary load of 5 requests a second is asked in 7,200 s, sent as fast as it answers.
ORDINARY_RATE = 5
TWO_HOURS = ORDINARY_RATE * 7200
SLOPE_MAX = 64_000  # bytes per 1,000 requests; a leak of 1 KiB a request shows as 1,024,000
GROWTH_MAX = 1_000_000  # bytes over four rounds of the short form: 350,000 while tables still fill; a leak of 1 KiB an exchange: 36,000,000


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

    def client(self, mode, d, *args, quiet=False):
        first = None
        if self.realtime:
            os.sched_setscheduler(d.process.pid, os.SCHED_FIFO, os.sched_param(50))  # the loop's thread alone
            first = lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(40))
        r = subprocess.run([str(self.load), mode, str(d.port), *map(str, args)], capture_output=True, text=True,
                           preexec_fn=first)
        if r.returncode or not quiet:
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

    def soak(self, requests):
        """Mixed traffic: memory is flat, and all comes back."""
        tmp = pathlib.Path(tempfile.mkdtemp(dir=self.model.parent))
        # Small bounds, so that what is allowed to fill is full soon: device memory, pool, names of gone entries.
        d = Daemon(traffic.model_that_chats(self.model, tmp / "tiny"), "--max-waiting", 1000, "--stream-timestamps",
                   "--max-running", 128, "--step-rows", 256, "--memory-bytes", "12M", "--max-seq-len", 1024,
                   "--pool-bytes", "1M", "--state-dir", tmp / "state", "--gone-entries", 256)
        traffic.fill(d)
        marks, seed, fds = [], 100, 0
        while len(marks) < 9 or marks[-1][0] < requests:
            for load in (("leave", d, 300 if self.long else 60, 24, seed), ("sse", d, 40 if self.long else 10, 50, 2),
                         ("livez", d, 20, 0.1)):
                assert self.client(*load, quiet=True)[0] == 0
            for kind in traffic.KINDS:
                kind(d, seed)
            d.wait_idle(30)
            time.sleep(1.2)  # the round ended with large bodies: what the heaps kept of them goes back within a second
            m = d.metrics()
            fds = fds or m["process_open_fds"]
            marks.append((served(m), m["process_resident_memory_bytes"]))
            if self.long and len(marks) % 10 == 0:
                print(f"     {marks[-1][0]:.0f} requests, resident {marks[-1][1] / 1e6:.2f} MB", flush=True)
            seed += 1
        half = marks[len(marks) // 2:]
        print(f"soak rounds={len(marks)} requests={marks[-1][0]:.0f} hours_worth={marks[-1][0] / ORDINARY_RATE / 3600:.2f} "
              f"resident_first={marks[0][1]:.0f} resident_middle={half[0][1]:.0f} resident_last={half[-1][1]:.0f}")
        if self.long:
            grown = slope(half)
            self.check(f"resident memory moves by {grown:.0f} bytes per 1,000 requests over the second half",
                       grown < SLOPE_MAX or SLOW > 1)
        else:
            grown = half[-1][1] - half[0][1]
            self.check(f"resident memory grew by {grown / 1e6:.2f} MB over the second half", grown < GROWTH_MAX or SLOW > 1)
        assert d.request("POST", "/admin/purge", {"force": True}, admin=True)[0] == 200
        d.wait_idle(30)
        end = time.time() + 5 * SLOW  # files go and connections close a moment later
        while (files := sorted(p.name for p in (tmp / "state").iterdir())) != ["lock"] and time.time() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        m, fds_now = d.memory(), d.metrics()["process_open_fds"]
        left = m["kv_used"] + m["kv_held"] + m["kv_reserved"] + sum(
            v["ready"] + v.get("building", 0) + v.get("stored", 0) for v in m["entries"].values() if isinstance(v, dict))
        self.check("no entry, no device memory and no reference is left", left == 0)
        self.check("the state directory is empty", files == ["lock"])
        self.check(f"open descriptors: {fds:.0f} after the first round, {fds_now:.0f} at the end", fds_now <= fds)
        d.control()
        d.stop()


def served(m):
    """Requests that the daemon has answered or lost, without probes and looks."""
    mine = ("/livez", "/readyz", "/metrics", "/admin/")
    return sum(v for k, v in m.items()
               if k.startswith("tinyloop_requests_total") and not any(f'route="{p}' in k for p in mine))


def slope(marks):
    """Bytes per 1,000 requests: the median over all pairs, which a round with an unusual moment does not bend."""
    return 1000 * statistics.median((y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(marks) for x2, y2 in marks[i + 1:])


def run(model, long, requests=0, realtime=False, only=None):
    r = Run(model, long, realtime)
    for part in [only] if only else ["front_end", "streams", "leavers", "soak"]:
        getattr(r, part)(*([requests] if part == "soak" else []))
    return r


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--long", action="store_true")
    ap.add_argument("--requests", type=int, default=None, help="of mixed traffic")
    ap.add_argument("--only", choices=["front_end", "streams", "leavers", "soak"], help="one part")
    ap.add_argument("--realtime", action="store_true")
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        requests = args.requests if args.requests is not None else TWO_HOURS if args.long else 0
        model = tinymodel.make(TINYLOOP, pathlib.Path(tmp) / "tiny")
        r = run(model, args.long, requests, args.realtime, args.only)
    print(f"{r.passed} passed, {r.failed} failed")
    return r.failed > 0


if __name__ == "__main__":
    sys.exit(main())
