"""A grammar_driver process and vocabularies for it."""
import random
import subprocess


def small_vocab():
    """All bytes, and pieces that cross the seams of JSON."""
    pieces = [bytes([b]) for b in range(256)]
    pieces += [b'{"', b'":', b'": ', b'", "', b'"}', b'"}]', b'},', b'}, {', b'[{', b'true', b'false', b'null', b'"name"',
               b' "', b',\n', b'\n  ', b'\n    "', b'00', b'12', b'3.5', b'-1', b'e+', b'\\u00', b'\\n', b'the', b' cat', b'abc',
               b'":"', b'","', b'[]', b'{}', b'[[', b']]', b'a-b', b'2024-', b'-02-', "é".encode(), "日本".encode(), b'\xe6\x97',
               b'a longer piece of text than most of the others are', b'   ' * 10, b'', b'']
    return pieces


def large_vocab(n=50000, seed=1):
    """Byte pieces and made-up words, as many as a real vocabulary has."""
    r = random.Random(seed)
    seen = dict.fromkeys(small_vocab())
    parts = ["a", "e", "i", "o", "u", "an", "er", "st", "ing", "tion", "re", "de", "co", "th", "qu", "br", "pl", "1", "20", "_", "-", "."]
    while len(seen) < n:
        word = "".join(r.choice(parts) for _ in range(r.randint(1, 6)))
        form = r.random()
        if form < 0.5:
            word = " " + word
        elif form < 0.53:
            word = word + r.choice(['"', '",', '":', '"}', ", ", "}", "]"])
        elif form < 0.6:
            word = word.capitalize()
        seen[word.encode()] = None
    return list(seen)


class Driver:
    def __init__(self, program, pieces):
        self.p = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send("vocab %d\n" % len(pieces) + "".join((p.hex() or "-") + "\n" for p in pieces))

    def _send(self, text):
        self.p.stdin.write(text.encode())
        self.p.stdin.flush()
        answer = self.p.stdout.readline().decode("utf-8", "replace")
        if not answer:
            raise RuntimeError("grammar_driver is gone: %d" % self.p.wait())
        return answer.rstrip("\n")

    def compile(self, kind, text):
        return self._send("compile %s %s\n" % (kind, text.encode().hex()))

    def choice(self, texts):
        return self._send("choice %s\n" % " ".join(t.encode().hex() for t in texts))

    def accept(self, text):
        data = text if isinstance(text, bytes) else text.encode()
        return self._send("accept %s\n" % data.hex())

    def walk(self, seed, steps):
        answer = self._send("walk %d %d\n" % (seed, steps))
        if "error" in answer:
            raise AssertionError(answer)
        text, end = answer.split(" ") if " " in answer else ("", answer)
        return bytes.fromhex(text), end == "end"

    def worst_ms(self):
        """What the longest compiling, mask or move took since it was asked last."""
        return float(self._send("worst\n"))

    def close(self):
        self.p.stdin.close()
        return self.p.wait()
