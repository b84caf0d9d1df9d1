"""Every way in which a checkpoint directory can be wrong gets one clear sentence, from the command line and from the daemon.

A case takes a sound model apart and says what must be said of it. At the end random damage: never more than that sentence, and
never an end by a signal. TINYLOOP_DAMAGE=N makes N such directories (default 150)."""
import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess

import pytest

import tinymodel
from daemon import TINYLOOP, TINYLOOPD, SLOW

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
WIDTH = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
ROUNDS = int(os.environ.get("TINYLOOP_DAMAGE", "150"))


class Checkpoint:
    """The files of a directory, taken apart: tensors as [name, dtype, shape, bytes]."""

    def __init__(self, path):
        self.path = path
        raw = self.weights.read_bytes()
        n = struct.unpack("<Q", raw[:8])[0]
        entries = {k: v for k, v in json.loads(raw[8:8 + n]).items() if k != "__metadata__"}
        self.data = raw[8 + n:]
        self.tensors = [[k, v["dtype"], v["shape"], self.data[slice(*v["data_offsets"])]] for k, v in entries.items()]

    weights = property(lambda self: self.path / "model.safetensors")

    def __getitem__(self, name):
        return next(t for t in self.tensors if t[0] == name)

    def header(self):
        entries, at = {}, 0
        for name, dtype, shape, data in self.tensors:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        return entries

    def write(self, header=None, data=None, file=None, tensors=None):
        """What was not given is as the tensors say."""
        kept, self.tensors = self.tensors, tensors or self.tensors
        text = header if isinstance(header, bytes) else json.dumps(header or self.header()).encode()
        data = b"".join(t[3] for t in self.tensors) if data is None else data
        (file or self.weights).write_bytes(struct.pack("<Q", len(text)) + text + data)
        self.tensors = kept

    def entry(self, name="lm_head.weight", **fields):
        header = self.header()
        header[name].update(fields)
        self.write({k: {f: x for f, x in v.items() if x is not None} for k, v in header.items()})

    def tensor(self, name, dtype=None, shape=None, data=None):
        t = self[name]
        t[1:] = [dtype or t[1], shape or t[2], t[3] if data is None else data]
        self.write()

    def poison(self, name, data, index=None):
        """Put data over one element, by default the middle one."""
        old, width = self[name][3], len(data)
        index = len(old) // width // 2 if index is None else index
        self.tensor(name, data=old[:index * width] + data + old[(index + 1) * width:])

    def rename(self, old, new):
        self[old][0] = new
        self.write()

    def shards(self, edit=lambda index: None, n=2):
        """Split over files, with an index that edit may change."""
        per, index = -(-len(self.tensors) // n), {"metadata": {}, "weight_map": {}}
        for i in range(n):
            part, name = self.tensors[i * per:(i + 1) * per], f"model-{i + 1}.safetensors"
            self.write(file=self.path / name, tensors=part)
            index["weight_map"].update({t[0]: name for t in part})
        self.weights.unlink()
        edit(index)
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))

    def config(self, file="config.json", **keys):
        config = json.loads((self.path / file).read_text()) if (self.path / file).exists() else {}
        (self.path / file).write_text(json.dumps({**config, **keys}))

    def tokenizer(self, ids=97, **model):
        tk = tinymodel.tokenizer_json()
        vocab = {k: v for k, v in tk["model"]["vocab"].items() if v < ids - 1}
        tk["model"].update(vocab=vocab, merges=[])
        tk["model"].update(model)
        tk["added_tokens"][0]["id"] = ids - 1
        (self.path / "tokenizer.json").write_text(json.dumps(tk))


def cast(tensors, to):
    for t in tensors:
        values = struct.unpack(f"<{len(t[3]) // 4}f", t[3])
        t[1] = to
        t[3] = struct.pack(f"<{len(values)}e", *values) if to == "F16" else b"".join(t[3][i + 2:i + 4] for i in range(0, len(t[3]), 4))


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """A sound model of each weight type."""
    root = tmp_path_factory.mktemp("sound")
    for kind in ("f32", "f16", "bf16"):
        c = Checkpoint(shutil.copytree(GOLDEN / "ouro-tiny", root / kind, ignore=shutil.ignore_patterns("golden.json")))
        if kind != "f32":
            cast(c.tensors, kind.upper())
            c.write()
    for kind in ("int8", "int4"):
        subprocess.run([TINYLOOP, "quantize", "--model", root / "f32", "--out", root / kind, "--to", kind, "--quiet"], check=True,
                       stdout=subprocess.DEVNULL)
    return root


def ouro(**keys):
    return lambda c: c.config(**keys)


def file(name, content):
    return lambda c: (c.path / name).write_bytes(content)


def cut(n, file="model.safetensors"):
    return lambda c: os.truncate(c.path / file, (c.path / file).stat().st_size + n)


def swap(a, b):
    return lambda index: index["weight_map"].update({a: b})


NAN, INF = struct.pack("<f", float("nan")), struct.pack("<f", float("-inf"))
K, HEAD, SCALE = "model.layers.0.self_attn.k_proj.weight", "lm_head.weight", "model.core.1.mlp.up.weight_scale"
Q4, GROUP = "model.core.1.mlp.up.weight_q4", "model.core.1.mlp.up.weight_gscale"

# weight type, damage, what is said (a regular expression)
CASES = {
    "no config": ("f32", lambda c: (c.path / "config.json").unlink(), "config.json"),
    "no weights": ("f32", lambda c: c.weights.unlink(), "neither model.safetensors nor model.safetensors.index.json$"),
    "pickled weights": ("f32", lambda c: c.weights.rename(c.path / "pytorch_model.bin"), r"only pickled weights \(pytorch_model.bin\)"),
    "a directory for weights": ("f32", lambda c: (c.weights.unlink(), c.weights.mkdir()), "model.safetensors' is not a regular file"),
    "a link to nothing": ("f32", lambda c: (c.weights.unlink(), c.weights.symlink_to("/nowhere")), "links to a file that is not there"),
    "a pointer of Git LFS": ("f32", file("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid 0\n"), "Git LFS pointer of 49"),
    "empty weights": ("f32", file("model.safetensors", b""), "model.safetensors has 0 bytes"),
    "one byte short": ("f32", cut(-1), "ends at byte 118788 of the data, but only 118787 are there"),
    "one byte long": ("f32", cut(1), "the tensors end at byte 1229.., but the file has 1229"),
    "cut in the header": ("f32", lambda c: os.truncate(c.weights, 700), r"its header has \d+ bytes, but only 692 follow"),
    "a header of 2^63": ("f32", file("model.safetensors", struct.pack("<Q", 1 << 63) + b"{}"), "has 9223372036854775808 bytes, but only 2 follow"),
    "no JSON": ("f32", lambda c: c.write(b'{"a": [1,'), "header of .* is not valid JSON: "),
    "a list": ("f32", lambda c: c.write(b"[1]"), "header of .* is not a JSON object"),
    "a key twice": ("f32", lambda c: c.write(b'{"a":1,"a":2}'), "key 'a' is there twice"),
    "no tensors": ("f32", lambda c: c.write(b"{}", b""), "tensor '.*' is missing"),
    "offsets past the end": ("f32", lambda c: c.entry(data_offsets=[0, 10**9]),
        "'lm_head.weight' ends at byte 1000000000 of the data, but only 118788"),
    "offsets in disorder": ("f32", lambda c: c.entry(data_offsets=[100, 50]), r"has data_offsets \[100, 50\]"),
    "offsets of no use": ("f32", lambda c: c.entry(data_offsets=["0", -4]), r'has data_offsets \["0", -4\]'),
    "no offsets": ("f32", lambda c: c.entry(data_offsets=None), "'lm_head.weight' has 0 data_offsets, expected are 2"),
    "offsets that overlap": ("f32", lambda c: c.entry("model.norm.weight", data_offsets=[0, 128]),
        r"begins at byte \d+ of the data, but the one before ends at \d+"),
    "no shape": ("f32", lambda c: c.entry(shape=None), "'lm_head.weight' has no shape"),
    "a negative shape": ("f32", lambda c: c.entry(shape=[-97, 32]), "dimension 0 of tensor 'lm_head.weight' is -97"),
    "a huge shape": ("f32", lambda c: c.entry(shape=[2**40, 2**40]), "more than 2.63 elements"),
    "no dtype": ("f32", lambda c: c.entry(dtype=None), "'lm_head.weight' has no dtype"),
    "an unknown dtype": ("f32", lambda c: c.entry(dtype="FP3"), "'lm_head.weight' has dtype FP3, which is no weight type"),
    "whole numbers": ("f32", lambda c: c.entry(dtype="I32"), "'lm_head.weight' has dtype I32"),
    "twice the width": ("f32", lambda c: c.entry(dtype="F64"), "has 12416 bytes, but its shape has 3104 elements of 8 bytes"),
    "a norm of whole numbers": ("f32", lambda c: c.entry("model.norm.weight", dtype="I32"),
        "'model.norm.weight' has dtype I32, expected is F32, BF16 or F16"),
    "a transposed matrix": ("f32", lambda c: c.entry(shape=[32, 97]), r"'lm_head.weight' has shape \[32, 97\], expected is \[97, 32\]"),
    "a short norm": ("f32", lambda c: c.tensor("model.norm.weight", shape=[31], data=bytes(124)), r"has shape \[31\], expected is \[32\]"),
    "no rows": ("f32", lambda c: c.tensor(K, shape=[0, 32], data=b""), rf"'{K}' has shape \[0, 32\], expected is \[16, 32\]"),
    "mixed types": ("f32", lambda c: c.tensor(K, dtype="BF16", data=bytes(1024)), f"'{K}' belong together, but one is f32 and the other bf16"),
    "a tensor missing": ("f32", lambda c: c.rename(K, K + "s"), f"'{K}' is missing"),
    "a tensor too many": ("f32", lambda c: (c.tensors.append(["model.x", "F32", [1], bytes(4)]), c.write()), "'model.x' has no place"),
    "a shard missing": ("f32", lambda c: (c.shards(), (c.path / "model-2.safetensors").unlink()), "there is no file '.*/model-2.safetensors'"),
    "a shard cut": ("f32", lambda c: (c.shards(), cut(-9, "model-2.safetensors")(c)), r"model-2.safetensors: tensor '.*' ends at byte \d+"),
    "an index of too much": ("f32", lambda c: c.shards(swap("model.x", "model-1.safetensors")), "tensor 'model.x' is not in 'model-1.safetensors'"),
    "an index that is wrong": ("f32", lambda c: c.shards(swap(HEAD, "model-2.safetensors")), f"tensor '{HEAD}' is not in 'model-2.safetensors'"),
    "an index that leads out": ("f32", lambda c: c.shards(swap(HEAD, "../x")), f"the shard of tensor '{HEAD}' is not a plain file name"),
    "an index without a map": ("f32", lambda c: c.shards(lambda index: index.pop("weight_map") and None), "'weight_map' is missing"),
    "a tensor in two shards": ("f32", lambda c: (c.shards(), c.write(file=c.path / "model-2.safetensors")),
        "is in both '.*model-1.*' and '.*model-2"),
    "an unknown architecture": ("f32", ouro(model_type="mamba"), "model_type 'mamba' is not supported, only tinyloop, ouro, .*, qwen3 are"),
    "no architecture": ("f32", ouro(model_type=None), "'model_type' is missing"),
    "another architecture": ("f32", ouro(model_type="qwen3"), "'model.layers.0.self_attn.q_norm.weight' is missing"),
    "a negative width": ("f32", ouro(hidden_size=-1), "'hidden_size' is -1, allowed are 1 to 65536"),
    "a width in words": ("f32", ouro(hidden_size="32"), "'hidden_size' is \"32\", allowed are whole numbers from 1 to 65536"),
    "a huge width": ("f32", ouro(hidden_size=10**18), r"'hidden_size' is 1e\+18, allowed are whole numbers"),
    "half a layer": ("f32", ouro(num_hidden_layers=2.5), "'num_hidden_layers' is 2.5, allowed are whole numbers from 1 to 1024"),
    "a layer too many": ("f32", ouro(num_hidden_layers=4), "'model.layers.3.input_layernorm.weight' is missing"),
    "a layer too few": ("f32", ouro(num_hidden_layers=2), "'model.layers.2..*' has no place"),
    "no depth": ("f32", ouro(total_ut_steps=0), "'total_ut_steps' is 0, allowed are 1 to 64"),
    "heads that do not share": ("f32", ouro(num_key_value_heads=3), "4 attention heads cannot share 3 key/value heads"),
    "a larger vocabulary": ("f32", ouro(vocab_size=98), r"'model.embed_tokens.weight' has shape \[97, 32\], expected is \[98, 32\]"),
    "an end outside of it": ("f32", ouro(eos_token_id=97), "eos_token_id is 97, allowed are -1 to 96"),
    "an end in words": ("f32", ouro(eos_token_id="</s>"), "'eos_token_id' is \"</s>\""),
    "a wrong epsilon": ("f32", ouro(rms_norm_eps="1e-6"), "'rms_norm_eps' is \"1e-6\", allowed are numbers from 0 to 1"),
    "tied, but not equal": ("f32", ouro(tie_word_embeddings=True), "'lm_head.weight' and 'model.embed_tokens.weight' differ"),
    "a config that is none": ("f32", file("config.json", b"\0\1"), "config.json is not valid JSON"),
    "a config of nothing": ("f32", file("config.json", b""), "config.json is not valid JSON: value is missing"),
    "ends that are none": ("f32", lambda c: c.config("generation_config.json", eos_token_id=[2, 97]), "'eos_token_id' is 97, allowed are 0 to 96"),
    "NaN, F32": ("f32", lambda c: c.poison(K, NAN), f"'{K}' has the value -?nan at index 256"),
    "infinity, F32": ("f32", lambda c: c.poison("model.norm.weight", INF), "'model.norm.weight' has the value -inf at index 16"),
    "NaN, F16": ("f16", lambda c: c.poison(K, b"\1\x7C"), f"'{K}' has the value -?nan at index 256"),
    "infinity, F16": ("f16", lambda c: c.poison("model.norm.weight", b"\0\xFC"), "'model.norm.weight' has the value -inf at index 16"),
    "NaN, BF16": ("bf16", lambda c: c.poison(K, b"\xC0\x7F"), f"'{K}' has the value -?nan at index 256"),
    "an INT8 of -128": ("int8", lambda c: c.poison(SCALE[:-6], b"\x80"), "has the value -128 at index 768, allowed are -127 to 127"),
    "an INT8 scale of NaN": ("int8", lambda c: c.poison(SCALE, NAN), f"'{SCALE}' has the scale -?nan at index 24"),
    "an INT8 scale below 0": ("int8", lambda c: c.poison(SCALE, b"\0\0\x80\xBF"), f"'{SCALE}' has the scale -1 at index 24"),
    "no INT8 scale": ("int8", lambda c: (c.tensors.remove(c[SCALE]), c.write()), f"'{SCALE}' is missing"),
    "an INT4 of -8": ("int4", lambda c: c.poison(Q4, b"\x80"), f"'{Q4}' has the value -8 at index 769, allowed are -7 to 7"),
    "an INT4 group of 0": ("int4", lambda c: c.poison(GROUP, b"\0"), f"'{GROUP}' has the group scale 0 in row 24, group 0, allowed are 1 to 15"),
    "an INT4 scale of infinity": ("int4", lambda c: c.poison(SCALE, INF), f"'{SCALE}' has the scale -inf at index 24"),
    "no INT4 groups": ("int4", lambda c: (c.tensors.remove(c[GROUP]), c.write()), f"'{GROUP}' is missing"),
    "INT4 cut": ("int4", cut(-100), r"ends at byte \d+ of the data, but only"),
    "a larger tokenizer": ("f32", lambda c: c.tokenizer(98), "tokenizer.json has ids up to 97, but the model's vocabulary has 97: 0 to 96"),
    "no tokenizer's text": ("f32", file("tokenizer.json", b'{"model":'), "tokenizer.json': not valid JSON: no value at byte 9"),
    "a lost tokenizer": ("f32", lambda c: (c.path / "tokenizer.json").symlink_to("gone"), "tokenizer.json"),
    "another tokenizer": ("f32", lambda c: c.tokenizer(type="Unigram"), "model.type 'Unigram' is not supported, only BPE is"),
    "a merge of nothing": ("f32", lambda c: c.tokenizer(merges=["qq zz"]), r"model.merges\[0\]: 'qq' \+ 'zz' is not in model.vocab"),
    "an id of two tokens": ("f32", lambda c: c.tokenizer(vocab={"a": 1, "b": 1}), "id 1 belongs to two tokens"),
}


def run(*args):
    r = subprocess.run([str(a) for a in args], capture_output=True, text=True, timeout=60 * SLOW, errors="replace")
    assert r.returncode >= 0 and "Sanitizer" not in r.stderr, (r.returncode, r.stderr)
    return r


def said(r, prefix):
    """The one sentence of a command that failed."""
    assert r.returncode == 1 and r.stderr.startswith(prefix) and r.stderr.count("\n") == 1, (r.returncode, r.stderr)
    return r.stderr.removeprefix(prefix).rstrip("\n")


@pytest.mark.parametrize("name", CASES)
def test_every_damage_has_its_sentence(sound, tmp_path, name):
    kind, damage, says = CASES[name]
    model, out = shutil.copytree(sound / kind, tmp_path / "m"), tmp_path / "out"
    damage(Checkpoint(model))
    sentence = said(run(TINYLOOP, "generate", "--model", model, "--tokens", "1", "--threads", "1"), "tinyloop: ")
    assert re.search(says, sentence), sentence
    assert said(run(TINYLOOP, "inspect", "--check", model), "tinyloop inspect: ") == sentence
    assert said(run(TINYLOOP, "quantize", "--model", model, "--out", out, "--to", "int8"), "tinyloop quantize: ") == sentence
    assert [p.name for p in tmp_path.iterdir()] == ["m"] # nothing is left behind
    r = run(TINYLOOPD, "--model", model, "--port", "0", "--admin-port", "0", "--threads", "1")
    assert r.returncode == 2
    if name != "no config": # that is seen earlier, in other words
        assert sentence.replace('"', '\\"') in r.stdout + r.stderr


def test_what_is_not_damage(sound, tmp_path):
    def fine(name, change, shown=""):
        model = shutil.copytree(sound / "f32", tmp_path / name)
        change(Checkpoint(model))
        r = run(TINYLOOP, "inspect", "--check", model)
        assert r.returncode == 0 and r.stderr == "" and shown in r.stdout, r
        assert run(TINYLOOP, "generate", "--model", model, "--tokens", "1", "--max-tokens", "20", "--threads", "1").returncode == 0
    fine("shards", lambda c: c.shards(n=5))
    fine("index", lambda c: c.shards(lambda index: index["weight_map"].pop(HEAD) and None)) # that names less than there is
    fine("tokenizer", lambda c: c.tokenizer(50), "50 ids for a vocabulary of 97") # a padded vocabulary
    fine("template", lambda c: (c.tokenizer(), file("chat_template.jinja", b"{% frobnicate %}")(c)), "statement 'frobnicate'")
    fine("none", lambda c: None, "none: token ids only")


def damage_at_random(rng, path):
    """Bytes changed, cut, doubled or moved in one of the files."""
    target = rng.choice([p for p in path.iterdir() if p.is_file()])
    raw = bytearray(target.read_bytes())
    # Half of the damage goes to the beginning: that is where the weights' header is.
    span = min(len(raw), 4200) if rng.random() < 0.5 else len(raw)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(span)
        kind = rng.randrange(5)
        if kind == 0:
            raw[at] = rng.randrange(256)
        elif kind == 1:
            raw[at:at + 1] = rng.choice([b"-", b"9", b"0", b"}", b"[", b'"', b"1e99", b"null", b"\xff"])
        elif kind == 2:
            del raw[at:at + rng.randrange(1, 64)]
        elif kind == 3:
            raw[at:at] = raw[at:at + rng.randrange(1, 64)]
        else:
            raw[at:] = raw[at:][:rng.randrange(len(raw))]
        span = min(span, len(raw)) or 1
        if not raw:
            raw = bytearray(b"x")
    target.write_bytes(raw)


def test_random_damage(sound, tmp_path):
    rng = random.Random(5)
    for i in range(ROUNDS):
        model = shutil.copytree(sound / rng.choice(["f32", "f16", "int8", "int4"]), tmp_path / "m")
        c = Checkpoint(model)
        if rng.random() < 0.5:
            c.shards()
        c.tokenizer()
        damage_at_random(rng, model)
        checked = run(TINYLOOP, "inspect", "--check", model)
        r = run(TINYLOOP, "generate", "--model", model, "--tokens", "1,2", "--max-tokens", "2", "--threads", "1", "--memory-mib", "64")
        if checked.returncode: # what is found wrong is found by both
            assert said(r, "tinyloop: ") == said(checked, "tinyloop inspect: "), i
        elif r.returncode: # sound files of a model that overflows, or that has no room
            assert re.search("non-finite|finite|memory|budget|limit|vocabulary", said(r, "tinyloop: ")), r.stderr
        shutil.rmtree(model)
