#!/usr/bin/env python3
"""tests/cuda/first_step.py - is the first step of a model right? What making a model ready leaves under way on the device (clearing,
packing, copies) must have ended before its first step; on a busy card it takes longer than the way to that step.

    first_step.py DRIVER MODEL_DIR [DEVICE [TIMES [PROCESSES]]]

DRIVER is vectors_driver. Each process opens the model TIMES times and asks for the logits of a prompt; all answers must be equal."""

import collections
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor


def answers(driver, model, device, times):
    line = f"2 0 5,9,2,7,11,3,8,1,4 {model}\n"
    done = subprocess.run([driver, "--serve", device, "1024"], input=line * times, capture_output=True, text=True, timeout=100)
    return done.stdout.splitlines()


def main():
    driver, model = sys.argv[1:3]
    device = sys.argv[3] if len(sys.argv) > 3 else "cuda"
    times, processes = (int(sys.argv[4]) if len(sys.argv) > 4 else 60), (int(sys.argv[5]) if len(sys.argv) > 5 else 2)
    with ThreadPoolExecutor(processes) as pool:
        runs = [pool.submit(answers, driver, model, device, times) for _ in range(processes)]
        lines = [line for run in runs for line in run.result()]
    usual, most = collections.Counter(lines).most_common(1)[0] if lines else ("", 0)
    failed = processes * times - (most if usual.startswith('{"logits"') else 0)
    print(f"first step of {model}, {device}: {processes * times} checks, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
