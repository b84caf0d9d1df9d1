#!/usr/bin/env python3
"""Compare the engine's tokenizer with the `tokenizers` library, string by string and id by id.

  build/venv/bin/python tests/tokenizer/test_tokenizer_equal.py --bin build/.../tokenizer_driver [--seed N] [--strings N]

Trains small tokenizers of different kinds (make_tokenizers.py), draws random and nasty strings (make_strings.py) and checks
ids with and without special tokens, decoded text and refused input. Prints `N passed, N failed` and exits 1 on a failure.
"""
import argparse
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

from tokenizers import Tokenizer

import make_strings
import make_tokenizers


class Driver:
    """Queues requests for one tokenizer file and runs them in one process."""

    def __init__(self, binary, path):
        self.binary, self.path, self.requests = binary, path, []

    def encode(self, text, add_special, parse_special):
        data = text if isinstance(text, bytes) else text.encode()
        self.requests.append(struct.pack("=cBI", b"e", add_special | parse_special << 1, len(data)) + data)

    def decode(self, ids, keep_special):
        self.requests.append(struct.pack(f"=cBI{len(ids)}i", b"d", keep_special, len(ids), *ids))

    def run(self):
        """One reply per request: a list of ids, bytes, or the error message as str."""
        done = subprocess.run([self.binary, self.path], input=b"".join(self.requests), stdout=subprocess.PIPE)
        if done.returncode != 0:
            sys.exit(f"the driver ended with {done.returncode} on {self.path}")
        out, at, replies = done.stdout, 0, []
        for request in self.requests:
            (n,) = struct.unpack_from("=i", out, at)
            at += 4
            if n < 0:
                (n,) = struct.unpack_from("=i", out, at)
                replies.append(out[at + 4:at + 4 + n].decode())
                at += 4 + n
            elif request[:1] == b"e":
                replies.append(list(struct.unpack_from(f"={n}i", out, at)))
                at += 4 * n
            else:
                replies.append(out[at:at + n])
                at += n
        self.requests = []
        return replies


class Score:
    def __init__(self):
        self.passed, self.failed = 0, 0

    def check(self, what, want, got, context):
        if want == got:
            self.passed += 1
            return
        self.failed += 1
        if self.failed <= 20:
            print(f"FAILED {what}\n  of   {context!r:.300}\n  want {want!r:.300}\n  got  {got!r:.300}")


def compare(score, binary, name, path, strings, rng):
    reference = Tokenizer.from_file(str(path))
    driver = Driver(binary, path)
    wants = []
    for text in strings:
        add, parse = rng.random() < 0.5, rng.random() < 0.7
        reference.encode_special_tokens = not parse
        wants.append((f"{name}: ids, add_special={add} parse_special={parse}", text,
                      reference.encode(text, add_special_tokens=add).ids))
        driver.encode(text, add, parse)
    replies = driver.run()
    for (what, text, want), got in zip(wants, replies):
        score.check(what, want, got, text)

    # Decoding: what was encoded, and random ids (invalid UTF-8 among them) where the library replaces bytes as we do.
    lists = [want for _, _, want in wants[::4]]
    if "Fuse" not in path.read_text():
        ids = sorted(reference.get_vocab(with_added_tokens=True).values())
        lists += [[rng.choice(ids) for _ in range(rng.randrange(1, 20))] for _ in range(len(lists))]
    wants = []
    for ids in lists:
        keep = rng.random() < 0.5
        wants.append((f"{name}: text, keep_special={keep}", ids, reference.decode(ids, skip_special_tokens=not keep)))
        driver.decode(ids, keep)
    for (what, ids, want), got in zip(wants, driver.run()):
        score.check(what, want, got.decode() if isinstance(got, bytes) else got, ids)


def check_bad_utf8(score, binary, path):
    driver = Driver(binary, path)
    cases = [(b"abc\xff", 3), (b"\x80", 0), (b"ok \xe2\x82", 3), (b"\xc0\xaf", 0), (b"a\xed\xa0\x80", 1),
             (b"\xf4\x90\x80\x80", 0), (b"\xf0\x80\x80\x80", 0), ("é".encode() + b"\xe2\x28\xa1", 2)]
    for data, _ in cases:
        driver.encode(data, False, False)
    for (data, offset), got in zip(cases, driver.run()):
        score.check("invalid UTF-8", True, isinstance(got, str) and f"at byte {offset} " in got, (data, got))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True, help="the tokenizer_driver")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strings", type=int, default=2500, help="strings for each large tokenizer file")
    args = parser.parse_args()
    score = Score()
    with tempfile.TemporaryDirectory() as folder:
        files = make_tokenizers.make_all(pathlib.Path(folder))
        n_strings = 0
        for name, (path, share) in files.items():
            rng = random.Random(f"{args.seed} {name}")
            strings = make_strings.make(rng, max(50, int(args.strings * share)))
            if name in ("gpt2", "o200k", "words", "digit runs"):
                strings += make_strings.every_character()
            n_strings += len(strings)
            failed = score.failed
            compare(score, args.bin, name, path, strings, rng)
            print(f"{name}: {len(strings)} strings, {score.failed - failed} failed", flush=True)
        check_bad_utf8(score, args.bin, next(iter(files.values()))[0])
        print(f"{n_strings} strings, {len(files)} tokenizer files")
    print(f"{score.passed} passed, {score.failed} failed")
    return 1 if score.failed else 0


if __name__ == "__main__":
    sys.exit(main())
