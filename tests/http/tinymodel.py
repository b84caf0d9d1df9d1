"""A model small enough for every test: random weights from `tinyloop synth`, and a byte-level tokenizer made here."""
import json
import pathlib
import subprocess

VOCAB = 300
END = 299  # "<|end|>", the only special token


def byte_alphabet():
    """The printable stand-in of each byte, as byte-level tokenizers write them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        if b in plain:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def tokenizer_json():
    table = byte_alphabet()
    vocab = {table[b]: b for b in range(256)}
    merges = []
    for a, b in ["th", "he", "in", "an", "er", "on", "or", "st", "re", "ab", "cd"]:
        merges.append(f"{a} {b}")
        vocab[a + b] = len(vocab)
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": END, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges},
    }


def make(tinyloop, out, tokenizer=True, to=None, **settings):
    out = pathlib.Path(out)
    args = [str(tinyloop), "synth", "--preset", "tiny", "--out", str(out)]
    if to:
        args += ["--to", to]
    for key, value in settings.items():
        args += ["--set", f"{key}={value}"]
    subprocess.run(args, check=True, stdout=subprocess.DEVNULL)
    if tokenizer:
        (out / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return out
