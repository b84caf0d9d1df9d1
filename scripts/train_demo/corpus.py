#!/usr/bin/env python3
"""Corpus builder: permissively licensed English prose out of pinned Debian packages.

    python3 corpus.py --out .data/corpus          # downloads with apt-get, or --debs DIR for packages already there

Writes prose.txt.xz (one document a line, "source<TAB>text", newlines escaped), defs.txt.xz (noun, definition),
NOTICE (attributions) and corpus.json (checksums). Nothing of it is committed; the weights carry the NOTICE.
Packages are checked against their SHA-256 before they are opened, extracted texts against the ones recorded below.
"""
import argparse
import glob
import hashlib
import html.parser
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import zlib

PACKAGES = [
    # name, version, SHA-256 of the .deb, licence, attribution
    ("wordnet-base", "1:3.0-37", "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
     "WordNet 3.0 licence", "WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved. The names of "
     "Princeton University or Princeton may not be used in advertising or publicity pertaining to this software."),
    ("sword-text-web", "426.0-1", "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
     "public domain", "World English Bible text (the name is a trademark of eBible.org; the text is public domain)."),
    ("r-cran-janeaustenr", "1.0.0-1", "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
     "novels: public domain; package: MIT", "Six novels by Jane Austen, as packaged by Julia Silge (MIT, 2016-2017)."),
    ("python3.11-doc", "3.11.2-6+deb12u9", "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
     "PSF License 2", "Python documentation, Copyright 2001-2023 Python Software Foundation; All Rights Reserved."),
    ("sqlite3-doc", "3.40.1-2+deb12u2", "466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
     "public domain", "SQLite documentation, dedicated to the public domain by its authors."),
    ("postgresql-doc-15", "15.20-0+deb12u1", "4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
     "PostgreSQL licence", "PostgreSQL documentation, Portions Copyright 1996-2023 PostgreSQL Global Development "
     "Group; Portions Copyright 1994 The Regents of the University of California."),
]
# SHA-256 of each extracted, cleaned text; a different value means that the extraction code changed.
TEXT_SHA256 = {
    "wordnet": "65fcf72fd85bc3deda4033b6859409c36700e237ddfd6e1d486c4860724ed0ba",
    "bible": "fa4c3a99888320b3542c54e74be3c0183a36868cd89b6191c6df83e0d77a72cc",
    "austen": "6a7f5f80126bae3973ef4f3bbd01bd3d26025b8eab250109d5bad4c0bc9e33a2",
    "python": "25f3fc11141cf4c3642e2f063317d97bdef8fa8582cad462f63516247c18fca8",
    "sqlite": "439d9c0b0b9cf973d78831a2492ddf6110930b8a64dd04ebe24f9e7302da65c0",
    "postgres": "d7d17176287f026f4608bc5afd737553980990ce584ed76e1d3eb3d5693ea0d7",
}
CRUDE = re.compile(r"\b(sex\w*|rape\w*|nigg\w*|fuck\w*|shit\w*|slut\w*|whore\w*|genital\w*|penis|vagina\w*|breasts?|"
                   r"prostitut\w*|slur|derogatory|disparaging|ethnic|offensive|obscene|copulat\w*|coit\w*)\b", re.I)


class Paragraphs(html.parser.HTMLParser):
    """Collects the text of paragraph elements; code blocks, tables, headers and navigation are skipped."""
    SKIP = {"script", "style", "pre", "table", "nav", "h1", "h2", "h3", "h4", "h5", "head", "form", "svg", "math"}
    BREAK = {"p", "div", "li", "dd", "dt", "br", "blockquote", "ul", "ol", "section"}
    VOID = {"br", "img", "hr", "meta", "link", "input"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.skipping, self.paragraphs, self.buffer = 0, [], []

    def flush(self):
        text = " ".join("".join(self.buffer).split())
        self.buffer = []
        if text:
            self.paragraphs.append(text)

    def handle_starttag(self, tag, attrs):
        if tag in self.SKIP:
            self.skipping += 1
        if tag in self.BREAK:
            self.flush()

    def handle_endtag(self, tag):
        if tag in self.SKIP and self.skipping:
            self.skipping -= 1
        if tag in self.BREAK:
            self.flush()

    def handle_data(self, data):
        if not self.skipping:
            self.buffer.append(data)


def is_prose(text):
    """A sentence or more of ordinary words: long enough, ends like a sentence, few symbols."""
    if len(text) < 60 or text[-1] not in ".!?:\"" or not text[0].isupper():
        return False
    letters = sum(c.isalpha() or c == " " for c in text)
    return letters / len(text) > 0.9 and not CRUDE.search(text)


def plain(text):
    """Typographic characters to ASCII; anything else outside ASCII is dropped."""
    for a, b in (("\u2018", "'"), ("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u2013", "-"), ("\u2014", " - "),
                 ("\u2026", "..."), ("\u00a0", " "), ("\u00b6", "")):
        text = text.replace(a, b)
    return text.encode("ascii", "ignore").decode()


def html_documents(root, pattern):
    seen = set()
    for path in sorted(glob.glob(os.path.join(root, pattern), recursive=True)):
        parser = Paragraphs()
        with open(path, encoding="utf-8", errors="replace") as f:
            parser.feed(f.read())
        parser.flush()
        keep = []
        for text in map(plain, parser.paragraphs):
            if is_prose(text) and text not in seen:
                seen.add(text)
                keep.append(text)
        # A document is a handful of neighbouring paragraphs: short enough to fit a training window.
        for i in range(0, len(keep), 6):
            yield "\n".join(keep[i:i + 6])


def bible_documents(root):
    """SWORD zText: .bzs holds (offset, packed size, size) per book, .bzz zlib streams, .bzv verses in a book."""
    base = os.path.join(root, "usr/share/sword/modules/texts/ztext/engWEB2015eb")
    for part in ("ot", "nt"):
        index, packed, verses = (open(f"{base}/{part}.{x}", "rb").read() for x in ("bzs", "bzz", "bzv"))
        books = []
        for i in range(0, len(index), 12):
            offset, size, _ = struct.unpack("<III", index[i:i + 12])
            books.append(zlib.decompress(packed[offset:offset + size]) if size else b"")
        lines = []
        for i in range(0, len(verses), 10):
            book, offset, size = struct.unpack("<IIH", verses[i:i + 10])
            if not size or book >= len(books):
                continue
            raw = books[book][offset:offset + size].decode("utf-8", "ignore")
            raw = re.sub(r"<note.*?</note>|<title.*?</title>", " ", raw, flags=re.S)
            text = plain(" ".join(re.sub(r"<[^>]*>", "", raw).split()))
            if len(text) > 15 and not CRUDE.search(text):
                lines.append(text)
        for i in range(0, len(lines), 10):
            yield " ".join(lines[i:i + 10])


def austen_documents(root):
    """R lazy-load database: records of [big-endian size][zlib stream], each an XDR-serialised character vector."""
    blob = open(os.path.join(root, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"), "rb").read()
    at, novels = 0, []
    while at + 4 < len(blob):
        engine = zlib.decompressobj()
        data = engine.decompress(blob[at + 4:])
        at = len(blob) - len(engine.unused_data)
        # "X\n", three version words, the length of the encoding's name and the name; then the vector itself.
        start = 18 + struct.unpack(">i", data[14:18])[0]
        kind, count = struct.unpack(">ii", data[start:start + 8])
        if kind & 255 != 16:
            continue
        pos, lines = start + 8, []
        for _ in range(count):
            size = struct.unpack(">i", data[pos + 4:pos + 8])[0]
            lines.append(data[pos + 8:pos + 8 + max(0, size)].decode("utf-8", "replace"))
            pos += 8 + max(0, size)
        novels.append(lines)
    for lines in novels:
        paragraphs = [" ".join(p.split()) for p in "\n".join(lines).split("\n\n")]
        paragraphs = [plain(p).replace("_", "") for p in paragraphs if len(p) > 40 and p[-1] in ".!?\""]
        for i in range(0, len(paragraphs), 4):
            yield "\n".join(paragraphs[i:i + 4])


def wordnet_entries(root):
    """(word, part of speech, gloss, examples, times counted) per sense, most counted first."""
    base = os.path.join(root, "usr/share/wordnet")
    counts = {}
    for line in open(f"{base}/cntlist.rev"):
        key, _, times = line.split()
        word, rest = key.split("%")
        kind, lexfile, lexid = rest.split(":")[:3]
        counts[(word, "nvars"[int(kind) - 1].replace("s", "a"), lexfile, lexid)] = int(times)
    entries = []
    for name, kind in (("noun", "n"), ("verb", "v"), ("adj", "a"), ("adv", "r")):
        for line in open(f"{base}/data.{name}"):
            if line.startswith("  "):
                continue
            head, gloss = line.split(" | ", 1)
            fields = head.split()
            words = [(fields[4 + 2 * i], fields[5 + 2 * i]) for i in range(int(fields[3], 16))]
            times = max(counts.get((w.lower(), kind, fields[1], f"{int(lexid, 16):02d}"), 0) for w, lexid in words)
            gloss = plain(gloss.strip())
            examples = re.findall(r'"([^"]*)"', gloss)
            meaning = re.sub(r'[;:]?\s*"[^"]*".*', "", gloss).split("; ")[0].strip(" ;")
            meaning = re.sub(r"^\([^)]*\)\s*", "", meaning)
            word = re.sub(r"\(.*?\)", "", words[0][0]).replace("_", " ")
            if meaning and word.isascii() and not CRUDE.search(gloss) and not CRUDE.search(word):
                entries.append((times, word, name, meaning, examples))
    return sorted(entries, key=lambda e: (-e[0], e[1], e[3]))


def wordnet_documents(entries):
    chunk = []
    for times, word, name, meaning, examples in entries:
        if times == 0 and len(meaning) > 90:
            continue
        text = f"{word} ({name}): {meaning}."
        if examples:
            text += f" Example: {examples[0]}."
        chunk.append(text)
        if len(chunk) == 8:
            yield "\n".join(chunk)
            chunk = []


def definitions(entries, limit=2500):
    """Common nouns with a short definition that reads as a sentence after "A dog is"."""
    seen = {}
    for times, word, name, meaning, _ in entries:
        if (name == "noun" and times >= 3 and word.islower() and word.isalpha() and word not in seen
                and re.match(r"(a|an|the|any|someone|something) ", meaning) and 20 < len(meaning) < 90):
            seen[word] = meaning
        if len(seen) >= limit:
            break
    return seen


def unpack(debs, out):
    for name, version, digest, _, _ in PACKAGES:
        found = [p for p in glob.glob(f"{debs}/{name}_*.deb")
                 if hashlib.sha256(open(p, "rb").read()).hexdigest() == digest]
        if not found:
            sys.exit(f"{name} {version}: no package file with SHA-256 {digest} in {debs}")
        subprocess.run(["dpkg-deb", "-x", found[0], out], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".data/corpus")
    parser.add_argument("--debs", help="folder with the package files; default: download them")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    debs = args.debs
    if not debs:
        debs = os.path.join(args.out, "debs")
        os.makedirs(debs, exist_ok=True)
        subprocess.run(["apt-get", "download"] + [f"{n}={v}" for n, v, *_ in PACKAGES], cwd=debs, check=True)
    root = os.path.join(args.out, "unpacked")
    unpack(debs, root)
    entries = wordnet_entries(root)
    sources = {
        "wordnet": wordnet_documents(entries),
        "bible": bible_documents(root),
        "austen": austen_documents(root),
        "python": html_documents(root, "usr/share/doc/python3.11/html/**/*.html"),
        "sqlite": html_documents(root, "usr/share/doc/sqlite3/**/*.html"),
        "postgres": html_documents(root, "usr/share/doc/postgresql-doc-15/html/**/*.html"),
    }
    report = {}
    with lzma.open(f"{args.out}/prose.txt.xz", "wt", preset=6) as f:
        for source, documents in sources.items():
            texts = list(documents)
            blob = "\n\n".join(texts).encode()
            digest = hashlib.sha256(blob).hexdigest()
            report[source] = {"documents": len(texts), "bytes": len(blob), "sha256": digest}
            print(f"{source:10s} {len(texts):6d} documents {len(blob) / 1e6:6.2f} MB  {digest[:16]}", flush=True)
            if source in TEXT_SHA256 and TEXT_SHA256[source] != digest:
                sys.exit(f"{source}: extracted text has SHA-256 {digest}, expected {TEXT_SHA256[source]}")
            for text in texts:
                f.write(source + "\t" + text.replace("\\", "\\\\").replace("\n", "\\n") + "\n")
    with lzma.open(f"{args.out}/defs.txt.xz", "wt", preset=6) as f:
        for word, meaning in definitions(entries).items():
            f.write(f"{word}\t{meaning}\n")
    with open(f"{args.out}/NOTICE", "w") as f:
        f.write("The demo model was trained on the project's own generated text and on text from these packages.\n\n")
        for name, version, digest, licence, attribution in PACKAGES:
            f.write(f"{name} {version} (sha256 {digest})\n  Licence: {licence}\n  {attribution}\n\n")
    with open(f"{args.out}/corpus.json", "w") as f:
        json.dump(report, f, indent=1)


if __name__ == "__main__":
    main()
