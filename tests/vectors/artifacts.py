"""tests/vectors/artifacts.py - small random models in our own layout, for any value of every knob and any weight type."""

import json
import os

import numpy as np

BASE = {
    "model_type": "tinyloop",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "prelude_layers": 1,
    "core_layers": 2,
    "coda_layers": 1,
    "loops_default": 2,
    "loops_trained": 2,
    "loops_max": 8,
    "max_position_embeddings": 512,
    "norm_eps": 1e-6,
    "embed_scale": 1.0,
    "inject": "none",
    "inject_norm": False,
    "state_init": "prelude",
    "state_std": 0.0,
    "skip_first_inject": False,
    "norms": ["n1", "n4"],
    "loop_end_norm": False,
    "core_to_coda": "none",
    "final_norm": True,
    "rope": "half",
    "rope_base": 10000.0,
    "rope_scaling": None,
    "qk_norm": "none",
    "qk_bias": False,
    "qkv_bias": False,
    "value_embeds": False,
    "mlp": "silu_gated",
    "tie_word_embeddings": False,
    "exit": "none",
    "bos_token_id": -1,
    "eos_token_id": -1,
    "stop_token_ids": [],
    "quantization": "none",
}

DTYPE = {"<f4": "F32", "<u2": "BF16", "|i1": "I8", "|u1": "U8"}


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, a in tensors.items():
        header[name] = {"dtype": DTYPE[a.dtype.str], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for a in tensors.values():
            f.write(np.ascontiguousarray(a).tobytes())


class Writer:
    def __init__(self, kind, rng):
        self.kind, self.rng, self.tensors = kind, rng, {}

    def vector(self, name, n, mean=0.0, spread=0.2):
        self.tensors[name] = (mean + spread * self.rng.standard_normal(n)).astype(np.float32)

    def matrix(self, name, rows, n_in, kind=None, std=None):
        kind, std, rng = kind or self.kind, std or 1 / np.sqrt(n_in), self.rng
        if kind == "int4" and n_in % 32:
            kind = "int8"
        if kind in ("f32", "bf16"):
            w = (std * rng.standard_normal((rows, n_in))).astype(np.float32)
            self.tensors[name] = w if kind == "f32" else (w.view(np.uint32) >> 16).astype(np.uint16)
            return
        spread = rng.uniform(0.5, 1.5, rows)  # a different scale for each output
        if kind == "int8":
            self.tensors[name] = rng.integers(-127, 128, (rows, n_in)).astype(np.int8)
            self.tensors[name + "_scale"] = (spread * std / 73).astype(np.float32)
            return
        q = rng.integers(-7, 8, (rows, n_in)).astype(np.uint8) & 15
        groups = rng.integers(1, 16, (rows, n_in // 32)).astype(np.uint8)
        if groups.shape[1] % 2:
            groups = np.concatenate([groups, np.zeros((rows, 1), np.uint8)], axis=1)
        self.tensors[name + "_q4"] = q[:, 0::2] | q[:, 1::2] << 4
        self.tensors[name + "_gscale"] = groups[:, 0::2] | groups[:, 1::2] << 4
        self.tensors[name + "_scale"] = (spread * std / 37).astype(np.float32)


def make(directory, kind, seed, **knobs):
    """Write config.json and model.safetensors; kind is the weight type of the matrices. Embedding and head of an INT4 model
    are INT8, as the quantiser has them."""
    unknown = set(knobs) - set(BASE)
    assert not unknown, unknown
    c = {**BASE, **knobs, "quantization": kind if kind.startswith("int") else "none"}
    w = Writer(kind, np.random.default_rng(seed))
    d, ff, dh = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    n_q, n_kv = c["num_attention_heads"] * dh, c["num_key_value_heads"] * dh
    vocab_kind = "int8" if kind == "int4" else kind
    w.matrix("model.embed_tokens.weight", c["vocab_size"], d, vocab_kind, std=1.0)
    if not c["tie_word_embeddings"]:
        w.matrix("lm_head.weight", c["vocab_size"], d, vocab_kind)
    layer = 0
    for group in ("prelude", "core", "coda"):
        for i in range(c[group + "_layers"]):
            b = f"model.{group}.{i}."
            for n in c["norms"]:
                w.vector(f"{b}{n}.weight", d, mean=1)
            for n, rows in (("q", n_q), ("k", n_kv), ("v", n_kv)):
                w.matrix(f"{b}attn.{n}.weight", rows, d)
                if c["qkv_bias"]:
                    w.vector(f"{b}attn.{n}.bias", rows)
            if c["qk_bias"]:
                w.vector(b + "attn.q_bias", n_q)
                w.vector(b + "attn.k_bias", n_kv)
            if c["qk_norm"] in ("full", "head"):
                full = c["qk_norm"] == "full"
                w.vector(b + "attn.q_norm.weight", n_q if full else dh, mean=1)
                w.vector(b + "attn.k_norm.weight", n_kv if full else dh, mean=1)
            if c["value_embeds"] and layer % 2:
                w.matrix(b + "attn.value_embed.weight", c["vocab_size"], n_kv, vocab_kind, std=0.7)
                w.vector(b + "attn.value_gate.weight", n_kv // dh * 32)
            layer += 1
            w.matrix(b + "attn.o.weight", d, n_q)
            if c["mlp"] == "silu_gated":
                w.matrix(b + "mlp.gate.weight", ff, d)
            w.matrix(b + "mlp.up.weight", ff, d)
            w.matrix(b + "mlp.down.weight", d, ff)
    if c["inject"] == "concat_linear":
        w.matrix("model.adapter.weight", d, 2 * d)
    elif c["inject"] == "diag":
        w.matrix("model.inject.b.weight", d, d)
        w.vector("model.inject.decay", d, mean=0.6)
        w.vector("model.inject.gain", d, mean=0.5)
    if c["inject_norm"]:
        w.vector("model.inject_norm.weight", d, mean=1)
    if c["loop_end_norm"]:
        w.vector("model.loop_norm.weight", d, mean=1)
    if c["core_to_coda"] == "norm":
        w.vector("model.coda_norm.weight", d, mean=1)
    elif c["core_to_coda"] == "linear":
        w.matrix("model.coda_in.weight", d, d)
    if c["final_norm"]:
        w.vector("model.final_norm.weight", d, mean=1)
    if c["exit"] == "gate_cdf":
        w.vector("model.gate.weight", d)
        w.vector("model.gate.bias", 1)
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump(c, f)
    write_safetensors(os.path.join(directory, "model.safetensors"), w.tensors)


INJECT = {"inject": "concat_linear", "state_init": "zero"}
FEW_LAYERS = {"prelude_layers": 0, "core_layers": 1, "coda_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Each knob's every value at least once, one at a time on top of BASE.
SINGLE = [
    ("base", {}),
    ("layers 0/1/0", {"prelude_layers": 0, "core_layers": 1, "coda_layers": 0}),
    ("layers 3/1/0", {"prelude_layers": 3, "core_layers": 1, "coda_layers": 0}),
    ("layers 0/2/3", {"prelude_layers": 0, "coda_layers": 3}),
    ("inject concat_linear, zero", INJECT),
    ("inject concat_linear, start prelude", {"inject": "concat_linear"}),
    ("inject concat_linear, truncnorm as zero", {**INJECT, "state_init": "truncnorm", "state_std": 0.5}),
    ("inject diag, zero", {"inject": "diag", "state_init": "zero"}),
    ("inject diag, start prelude", {"inject": "diag"}),
    ("inject_norm, concat_linear", {**INJECT, "inject_norm": True}),
    ("inject_norm, diag", {"inject": "diag", "state_init": "zero", "inject_norm": True}),
    ("inject_norm, start prelude", {"inject": "concat_linear", "inject_norm": True}),
    ("skip_first_inject", {"inject": "concat_linear", "skip_first_inject": True}),
    ("skip_first_inject, zero", {**INJECT, "skip_first_inject": True}),
    ("skip_first_inject, diag", {"inject": "diag", "skip_first_inject": True}),
    ("inject without prelude", {**INJECT, "prelude_layers": 0}),
    ("embed_scale", {"embed_scale": 8.0}),
    ("norm_eps", {"norm_eps": 1e-2}),
    # Few layers: without a norm before or behind it, an MLP squares the size of its input each time.
    ("norms none", {**FEW_LAYERS, "norms": []}),
    *[(f"norms {n}", {**FEW_LAYERS, "norms": [n]}) for n in ("n1", "n2", "n3", "n4", "n5", "n6")],
    ("norms n1 n2 n4 n5", {"norms": ["n1", "n2", "n4", "n5"]}),
    ("norms n1 n3 n4 n6", {"norms": ["n1", "n3", "n4", "n6"]}),
    ("norms n2 n5", {"norms": ["n2", "n5"]}),
    ("norms all", {"norms": ["n1", "n2", "n3", "n4", "n5", "n6"]}),
    ("loop_end_norm", {"loop_end_norm": True}),
    ("loop_end_norm, no final_norm", {"loop_end_norm": True, "final_norm": False, "coda_layers": 0}),
    ("final_norm off", {"final_norm": False}),
    ("core_to_coda norm", {"core_to_coda": "norm"}),
    ("core_to_coda linear", {"core_to_coda": "linear"}),
    ("core_to_coda norm, no coda layers", {"core_to_coda": "norm", "coda_layers": 0}),
    ("rope pair", {"rope": "pair"}),
    ("rope none", {"rope": "none"}),
    ("rope_base", {"rope_base": 500000.0}),
    ("rope_scaling, half", {"rope_scaling": LLAMA3}),
    ("rope_scaling, pair", {"rope_scaling": LLAMA3, "rope": "pair"}),
    ("qk_norm full", {"qk_norm": "full"}),
    ("qk_norm head", {"qk_norm": "head"}),
    ("qk_norm head_after_rope", {"qk_norm": "head_after_rope"}),
    ("qk_norm head_after_rope has its own epsilon", {"qk_norm": "head_after_rope", "norm_eps": 0.1}),
    ("qk_bias", {"qk_bias": True}),
    ("qkv_bias", {"qkv_bias": True}),
    ("qk_bias, qkv_bias, qk_norm full", {"qk_bias": True, "qkv_bias": True, "qk_norm": "full"}),
    ("qk_bias, qk_norm head, pair", {"qk_bias": True, "qk_norm": "head", "rope": "pair"}),
    ("value_embeds", {"value_embeds": True}),
    ("value_embeds, qkv_bias, no n1", {**FEW_LAYERS, "core_layers": 2, "value_embeds": True, "qkv_bias": True, "norms": ["n2", "n5"]}),
    (
        "value_embeds and the other knobs of Parcae",
        {
            **{"value_embeds": True, "mlp": "relu2", "qk_norm": "head_after_rope", "rope": "pair", "num_key_value_heads": 4},
            **{"inject": "diag", "state_init": "zero", "inject_norm": True, "core_to_coda": "linear"},
        },
    ),
    ("mlp relu2", {"mlp": "relu2"}),
    ("tied head", {"tie_word_embeddings": True}),
    ("exit gate_cdf", {"exit": "gate_cdf", "loop_end_norm": True}),
    ("exit latent_diff", {"exit": "latent_diff"}),
    ("heads 4 on 4", {"num_key_value_heads": 4}),
    ("heads 4 on 1", {"num_key_value_heads": 1}),
    ("heads wider than the model", {"head_dim": 32}),
    (
        "odd widths",
        {
            "hidden_size": 46,
            "intermediate_size": 71,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "vocab_size": 37,
        },
    ),
    (
        "widths over one slice of sums",
        {
            "hidden_size": 288,
            "intermediate_size": 608,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 96,
            "core_layers": 1,
        },
    ),
    ("one head of two", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}),
    ("head of 256", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}),
]


def random_knobs(rng):
    """Any combination that makes sense."""

    def pick(*values):
        return values[rng.integers(len(values))]

    heads = pick(1, 2, 3, 4, 8)
    kv = pick(*[k for k in range(1, heads + 1) if heads % k == 0])
    inject = pick("none", "concat_linear", "diag")
    state_init = "prelude" if inject == "none" else pick("prelude", "zero")
    # Without injection a zero state makes all rows equal at loop 0. Averages of equal F16 values then lie exactly between two
    # BF16 ones (or beside it, by the last bit of F32), which no two ways of computing round alike.
    skip_first_inject = bool(inject != "none" and state_init != "zero" and pick(True, False))
    return {
        "vocab_size": int(rng.integers(5, 130)),
        "hidden_size": int(pick(32, 64, 96, 128, int(rng.integers(3, 90)))),
        "intermediate_size": int(pick(64, 96, 160, int(rng.integers(3, 150)))),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": int(2 * rng.integers(1, 25)),
        "prelude_layers": int(rng.integers(0, 3)),
        "core_layers": int(rng.integers(1, 4)),
        "coda_layers": int(rng.integers(0, 3)),
        "embed_scale": float(pick(1.0, 1.0, 2.5)),
        "norm_eps": float(pick(1e-6, 1e-5)),
        "inject": inject,
        "inject_norm": bool(inject != "none" and pick(True, False)),
        "state_init": state_init,
        "skip_first_inject": skip_first_inject,
        "norms": pick(["n1", "n4"], ["n2", "n5"], ["n1", "n2", "n4", "n5"], ["n1", "n3", "n4", "n6"]),
        "loop_end_norm": pick(True, False),
        "core_to_coda": pick("none", "norm", "linear"),
        "final_norm": pick(True, True, False),
        "rope": pick("half", "pair", "none"),
        "rope_base": float(pick(100.0, 10000.0, 1e6)),
        "rope_scaling": pick(None, LLAMA3),
        "qk_norm": pick("none", "full", "head", "head_after_rope"),
        "qk_bias": pick(True, False),
        "qkv_bias": pick(True, False),
        "mlp": pick("silu_gated", "relu2"),
        "tie_word_embeddings": pick(True, False),
    }
