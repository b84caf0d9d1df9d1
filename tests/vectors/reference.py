"""tests/vectors/reference.py - the forward pass of every looped architecture we know, in numpy and double precision.

Written from the formulas alone and sharing nothing with the engine, so that an error has to be made twice to stay hidden.
It is slow and plain on purpose: whole sequences, dense T x T attention, no cache.

What the engine rounds on purpose is rounded here too, at the same places:
  * INT8 / INT4 matrices: a row of activations becomes int8 (scale absmax / 127, float division, ties to even); integer sums
    are exact; the result is float(sum) * (row's scale * weight's scale), two float multiplications.
  * BF16 matrices: their input is rounded to BF16.
  * Stored keys and values: rounded to F16 unless the matrices are F32.
  * half_products: a device that attends with matrix units of F16 (CUDA) also rounds queries and the weights of keys to F16,
    wherever keys are stored so. See attend_by_pages().
Everything else is double precision, where the engine computes in F32.

    model = open_model("some/artifact")
    out = model.forward([1, 2, 3], n_loops=4)      # out.logits [T, V], out.hidden [T, D], out.states, out.gates
"""

import copy
import json
import os
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

# ---- rounding ----------------------------------------------------------------------------------------------------------


def f32(x):
    return np.asarray(x, dtype=np.float64).astype(np.float32)


def round_bf16(x):
    """Double to BF16 by way of F32 (as the engine has it), nearest, ties to even; returned as double."""
    bits = f32(x).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def round_f16(x):
    return f32(x).astype(np.float16).astype(np.float64)


# ---- tensors -----------------------------------------------------------------------------------------------------------

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1", "U8": "u1"}


def read_safetensors(path):
    with open(path, "rb") as f:
        data = f.read()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    tensors = {}
    for name, t in header.items():
        if name == "__metadata__":
            continue
        begin, end = t["data_offsets"]
        raw = np.frombuffer(data[8 + n + begin : 8 + n + end], dtype=DTYPES[t["dtype"]])
        tensors[name] = (t["dtype"], raw.reshape(t["shape"]))
    return tensors


def read_tensors(directory):
    index = os.path.join(directory, "model.safetensors.index.json")
    if not os.path.exists(index):
        return read_safetensors(os.path.join(directory, "model.safetensors"))
    with open(index) as f:
        files = sorted(set(json.load(f)["weight_map"].values()))
    tensors = {}
    for name in files:
        tensors.update(read_safetensors(os.path.join(directory, name)))
    return tensors


def as_float(tensor):
    dtype, raw = tensor
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.astype(np.float64)


class Matrix:
    """[out, in] of any weight type: rows for the embedding, apply() for a linear layer."""

    def __init__(self, kind, values, scale=None):
        self.kind, self.values, self.scale = kind, values, scale
        self.jitter = None  # what apply() does to its result: swayed()

    def rows(self, ids):
        w = self.values[ids].astype(np.float64)
        return w if self.scale is None else w * self.scale[ids].astype(np.float64)[:, None]

    def apply(self, x):
        return self.product(x) if self.jitter is None else self.jitter(self.product(x))

    def product(self, x):
        if self.kind in ("int8", "int4"):
            x = f32(x)
            s = np.maximum(np.abs(x).max(axis=1), np.float32(1e-8)) / np.float32(127)
            q = np.clip(np.rint(x / s[:, None]), -127, 127).astype(np.int64)
            acc = q @ self.values.T
            return (acc.astype(np.float32) * (s[:, None] * self.scale[None, :])).astype(np.float64)
        if self.kind == "bf16":
            x = round_bf16(x)
        return x @ self.values.T


def stacked(parts):
    scale = None if parts[0].scale is None else np.concatenate([p.scale for p in parts])
    assert len({p.kind for p in parts}) == 1
    return Matrix(parts[0].kind, np.concatenate([p.values for p in parts]), scale)


def unpack_nibbles(packed):
    """[out, n] bytes to [out, 2 n] values 0..15, the even one in the low nibble."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1).astype(np.int64)


class Source:
    """Tensors by name, with a check at the end that none was forgotten."""

    def __init__(self, tensors):
        self.tensors, self.used = tensors, set()

    def has(self, name):
        return name in self.tensors

    def take(self, name):
        self.used.add(name)
        return self.tensors[name]

    def vector(self, name):
        return as_float(self.take(name)).reshape(-1)

    def vectors(self, names):
        return np.concatenate([self.vector(n) for n in names])

    def matrix(self, name):
        if self.has(name + "_q4"):
            q = unpack_nibbles(self.take(name + "_q4")[1])
            q = np.where(q > 7, q - 16, q)
            groups = unpack_nibbles(self.take(name + "_gscale")[1])
            groups = np.repeat(groups, 32, axis=1)[:, : q.shape[1]]
            return Matrix("int4", q * groups, self.take(name + "_scale")[1].astype(np.float32))
        dtype, raw = self.take(name)
        if dtype == "I8":
            return Matrix("int8", raw.astype(np.int64), self.take(name + "_scale")[1].astype(np.float32))
        return Matrix("bf16" if dtype == "BF16" else "f32", as_float((dtype, raw)))

    def check_all_used(self, ignored=()):
        left = [n for n in self.tensors if n not in self.used and not any(re.fullmatch(p, n) for p in ignored)]
        if left:
            raise ValueError(f"tensors without a place: {left[:5]}")


# ---- the model as data -------------------------------------------------------------------------------------------------


@dataclass
class Spec:
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    n_prelude: int
    n_core: int
    n_coda: int
    loops_default: int
    norm_eps: float
    embed_scale: float = 1.0
    inject: str = "none"  # none | concat_linear | diag
    state_init: str = "prelude"  # prelude | zero | truncnorm (zero here unless states are given)
    skip_first_inject: bool = False
    rope: str = "half"  # half | pair | none
    rope_base: float = 10000.0
    rope_scaling: dict = None
    qk_norm: str = "none"  # none | full | head | head_after_rope
    mlp: str = "silu_gated"  # silu_gated | relu2


@dataclass
class Layer:
    qkv: Matrix
    o: Matrix
    up: Matrix
    down: Matrix
    norm: dict = field(default_factory=dict)  # n1..n6
    q_norm: np.ndarray = None
    k_norm: np.ndarray = None
    qk_bias: np.ndarray = None
    qkv_bias: np.ndarray = None
    value_embed: Matrix = None
    value_gate: np.ndarray = None  # [kv heads, 32]


EPS_AFTER_ROPE = 1.1920928955078125e-07  # F32's machine epsilon, for the q/k norm without weights


def rms(x, weight, eps):
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def rope_frequencies(spec):
    d = spec.d_head
    freq = float(spec.rope_base) ** (-2.0 * np.arange(d // 2) / d)
    scaling = spec.rope_scaling
    if not scaling:
        return f32(freq)
    # Low frequencies are divided by the factor, high ones stay, in between it is blended.
    low, high, old = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
    turns = old * freq / (2 * np.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return f32(freq * (blend + (1 - blend) / scaling["factor"]))


def rotate(x, spec):
    """x [T, heads, d_head] at positions 0..T-1."""
    if spec.rope == "none":
        return x
    angle = np.arange(x.shape[0], dtype=np.float32)[:, None] * rope_frequencies(spec)[None, :]
    angle = angle.astype(np.float64)  # the models' own code makes frequencies and angles in F32
    c, s = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    y = np.empty_like(x)
    half = spec.d_head // 2
    a = (slice(0, half), slice(half, None)) if spec.rope == "half" else (slice(0, None, 2), slice(1, None, 2))
    u, v = x[..., a[0]], x[..., a[1]]
    y[..., a[0]], y[..., a[1]] = u * c - v * s, u * s + v * c
    return y


def attend(q, k, v, seen):
    """One head: q [T, d], k and v [T, d], seen [T, T]."""
    score = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    p = np.exp(score - score.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True)) @ v


PAGE = 64  # keys


def attend_by_pages(q, k, v, seen):
    """The same of queries in F16, with the weights of keys rounded to F16. What rounding does to a weight depends on the
    largest score it is relative to: that of its page. Sums are of the rounded weights, so that they add up to one."""
    top, total, out = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros_like(q)
    for at in range(0, len(k), PAGE):
        page = slice(at, at + PAGE)
        score = np.where(seen[:, page], q @ k[page].T / np.sqrt(q.shape[1]), -np.inf)
        largest = score.max(axis=1)
        p = round_f16(np.exp(score - np.where(np.isinf(largest), 0, largest)[:, None]))
        top, before = np.maximum(top, largest), top
        zero = np.where(np.isinf(top), 0, top)
        keep, add = np.exp(before - zero), np.exp(largest - zero)
        total = total * keep + p.sum(axis=1) * add
        out = out * keep[:, None] + p @ v[page] * add[:, None]
    return out / total[:, None]


class Model:
    half_products = False

    def __init__(self, spec, layers, embed, head, **parts):
        self.spec, self.layers, self.embed, self.head = spec, layers, embed, head
        kinds = [m.kind for layer in layers for m in (layer.qkv, layer.o, layer.up, layer.down)]
        self.kv_f16 = max(set(kinds), key=kinds.count) != "f32"
        self.parts = SimpleNamespace(
            **{
                name: parts.get(name)
                for name in (
                    "inject_norm adapter inject_b inject_decay inject_gain loop_norm "
                    "coda_norm coda_in final_norm gate_w gate_b"
                ).split()
            }
        )

    # -- one layer --

    def attention(self, layer, x, window):
        s = self.spec
        n_tok, n_q, n_kv, d = x.shape[0], s.n_heads * s.d_head, s.n_kv_heads * s.d_head, s.d_head
        qkv = layer.qkv.apply(x)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        q, k, v = qkv[:, :n_q], qkv[:, n_q : n_q + n_kv], qkv[:, n_q + n_kv :]
        if layer.value_embed is not None:
            gate = 2 / (1 + np.exp(-(x[:, : layer.value_gate.shape[1]] @ layer.value_gate.T)))
            v = v + np.repeat(gate, d, axis=1) * layer.value_embed.rows(self.tokens)
        if layer.qk_bias is not None:
            q, k = q + layer.qk_bias[:n_q], k + layer.qk_bias[n_q:]
        if s.qk_norm == "full":
            q, k = rms(q, layer.q_norm, s.norm_eps), rms(k, layer.k_norm, s.norm_eps)
        q, k, v = q.reshape(n_tok, -1, d), k.reshape(n_tok, -1, d), v.reshape(n_tok, -1, d)
        if s.qk_norm == "head":
            q, k = rms(q, layer.q_norm, s.norm_eps), rms(k, layer.k_norm, s.norm_eps)
        q, k = rotate(q, s), rotate(k, s)
        if s.qk_norm == "head_after_rope":
            q, k = rms(q, None, EPS_AFTER_ROPE), rms(k, None, EPS_AFTER_ROPE)
        if self.kv_f16:
            k, v = round_f16(k), round_f16(v)
        attend_head = attend
        if self.kv_f16 and self.half_products:
            q, attend_head = round_f16(q), attend_by_pages
        row, col = np.arange(n_tok)[:, None], np.arange(n_tok)[None, :]
        seen = (col <= row) & ((col > row - window) if window else True)
        out = np.empty_like(q)
        for h in range(s.n_heads):
            g = h // (s.n_heads // s.n_kv_heads)
            out[:, h] = attend_head(q[:, h], k[:, g], v[:, g], seen)
        return layer.o.apply(out.reshape(n_tok, n_q))

    def mlp(self, layer, x):
        up = layer.up.apply(x)
        if self.spec.mlp == "relu2":
            return layer.down.apply(0.5 * np.maximum(up, 0) ** 2)
        g, u = np.split(up, 2, axis=1)
        return layer.down.apply(g / (1 + np.exp(-g)) * u)

    def block(self, layer, x, window):
        def n(name, y):
            return rms(y, layer.norm[name], self.spec.norm_eps) if name in layer.norm else y

        y = n("n3", x + n("n2", self.attention(layer, n("n1", x), window)))
        return n("n6", y + n("n5", self.mlp(layer, n("n4", y))))

    # -- the whole --

    def inject(self, x, e):
        p = self.parts
        if self.spec.inject == "concat_linear":
            return p.adapter.apply(np.concatenate([x, e], axis=1))
        return p.inject_decay * x + p.inject_gain * p.inject_b.apply(e)

    def forward(self, tokens, n_loops=0, window=0, start_states=None):
        """All positions at once. states[t] is the stream after loop t (after the loop-end norm), gates [loops, T]."""
        s, p = self.spec, self.parts
        self.tokens = np.asarray(tokens)
        n_loops = n_loops or s.loops_default
        prelude, core = self.layers[: s.n_prelude], self.layers[s.n_prelude : s.n_prelude + s.n_core]
        coda = self.layers[s.n_prelude + s.n_core :]
        x = self.embed.rows(self.tokens) * s.embed_scale
        for layer in prelude:
            x = self.block(layer, x, window)
        e = None
        if s.inject != "none":
            e = x if p.inject_norm is None else rms(x, p.inject_norm, s.norm_eps)
            if start_states is not None:
                x = np.asarray(start_states, dtype=np.float64)
            elif s.state_init != "prelude":
                x = np.zeros_like(x)
        states, gates = [], []
        for t in range(n_loops):
            if e is not None and not (t == 0 and s.skip_first_inject):
                x = self.inject(x, e)
            for layer in core:
                x = self.block(layer, x, window)
            if p.loop_norm is not None:
                x = rms(x, p.loop_norm, s.norm_eps)
            states.append(x)
            if p.gate_w is not None:
                gates.append(x @ p.gate_w + p.gate_b)
        if p.coda_norm is not None:
            x = rms(x, p.coda_norm, s.norm_eps)
        if p.coda_in is not None:
            x = p.coda_in.apply(x)
        for layer in coda:
            x = self.block(layer, x, window)
        y = x if p.final_norm is None else rms(x, p.final_norm, s.norm_eps)
        return SimpleNamespace(logits=self.head.apply(y), hidden=x, states=states, gates=np.array(gates))


def matrices(model):
    """By name."""
    named = {"embed": model.embed, "head": model.head}
    for name in ("adapter", "inject_b", "coda_in"):
        named[name] = getattr(model.parts, name)
    for i, layer in enumerate(model.layers):
        for name in ("qkv", "o", "up", "down"):
            named[f"layer {i} {name}"] = getattr(layer, name)
    return {name: m for name, m in named.items() if m is not None}


def swayed(model, size, seed):
    """The same model with every result of a matrix off by chance, by `size` of the row's standard deviation: as right as
    another order of F32 sums."""
    rng, other = np.random.default_rng(seed), copy.deepcopy(model)
    for m in matrices(other).values():
        m.jitter = lambda y: y + size * y.std(axis=1, keepdims=True) * rng.standard_normal(y.shape)
    return other


def exit_steps(gates, q):
    """First 0-based loop at which the sum of exit probabilities reaches q, per token; the last loop takes all that is left."""
    n_loops, n_tok = gates.shape
    steps = np.full(n_tok, n_loops - 1)
    for i in range(n_tok):
        alive, done = 1.0, 0.0
        for t in range(n_loops - 1):
            p = alive / (1 + np.exp(-gates[t, i]))
            done, alive = done + p, alive - p
            if done >= q:
                steps[i] = t
                break
    return steps


# ---- files -------------------------------------------------------------------------------------------------------------


def open_ouro(c, src):
    spec = Spec(
        d_model=c["hidden_size"],
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"],
        d_head=c["head_dim"],
        n_prelude=0,
        n_core=c["num_hidden_layers"],
        n_coda=0,
        loops_default=c["total_ut_steps"],
        norm_eps=c["rms_norm_eps"],
        rope_base=c["rope_theta"],
    )
    layers = []
    for i in range(spec.n_core):
        b = f"model.layers.{i}."
        norms = ["input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"]
        layers.append(
            Layer(
                qkv=stacked([src.matrix(f"{b}self_attn.{n}_proj.weight") for n in "qkv"]),
                o=src.matrix(b + "self_attn.o_proj.weight"),
                up=stacked([src.matrix(f"{b}mlp.{n}_proj.weight") for n in ("gate", "up")]),
                down=src.matrix(b + "mlp.down_proj.weight"),
                norm={n: src.vector(f"{b}{name}.weight") for n, name in zip(("n1", "n2", "n4", "n5"), norms)},
            )
        )
    return Model(
        spec,
        layers,
        src.matrix("model.embed_tokens.weight"),
        src.matrix("lm_head.weight"),
        loop_norm=src.vector("model.norm.weight"),
        gate_w=src.vector("model.early_exit_gate.weight"),
        gate_b=src.vector("model.early_exit_gate.bias")[0],
    )


def open_huginn(c, src):
    """Huginn itself and the retrofits: one model_type, told apart by their tensors."""
    first = "transformer.core_block.0."
    huginn, olmo = src.has(first + "norm_3.weight"), src.has(first + "attn.q_norm.weight")
    d, heads = c["n_embd"], c["n_heads"]
    spec = Spec(
        d_model=d,
        n_heads=heads,
        n_kv_heads=c.get("num_key_value_heads", heads),
        d_head=d // heads,
        n_prelude=c["n_layers_in_prelude"],
        n_core=c["n_layers_in_recurrent_block"],
        n_coda=c["n_layers_in_coda"],
        loops_default=c["mean_recurrence"],
        norm_eps=c["norm_eps"],
        embed_scale=np.sqrt(d) if huginn else 1.0,
        inject="concat_linear",
        state_init="zero",
        rope="pair" if huginn else "half",
        rope_base=c["rope_base"] if huginn else c["rope_theta"],
        rope_scaling=None if huginn else c.get("rope_scaling"),
        qk_norm="full" if olmo else "none",
    )
    names = ("n1", "n3", "n4", "n6") if huginn else ("n2", "n5") if olmo else ("n1", "n4")
    layers = []
    for group, count in (("prelude", spec.n_prelude), ("core_block", spec.n_core), ("coda", spec.n_coda)):
        for i in range(count):
            b = f"transformer.{group}.{i}."
            layers.append(
                Layer(
                    qkv=src.matrix(b + "attn.Wqkv.weight"),
                    o=src.matrix(b + "attn.proj.weight"),
                    up=src.matrix(b + "mlp.fc.weight"),
                    down=src.matrix(b + "mlp.proj.weight"),
                    norm={n: src.vector(f"{b}norm_{j + 1}.weight") for j, n in enumerate(names)},
                    q_norm=src.vector(b + "attn.q_norm.weight") if olmo else None,
                    k_norm=src.vector(b + "attn.k_norm.weight") if olmo else None,
                    qk_bias=src.vector(b + "attn.qk_bias") if huginn else None,
                )
            )
    embed = src.matrix("transformer.wte.weight")
    ln_f = src.vector("transformer.ln_f.weight")
    src.used |= {"lm_head.weight"} if c["tie_embeddings"] else set()
    return Model(
        spec,
        layers,
        embed,
        embed if c["tie_embeddings"] else src.matrix("lm_head.weight"),
        adapter=src.matrix("transformer.adapter.weight"),
        coda_norm=ln_f if huginn else None,
        final_norm=ln_f,
    )


def open_tinyloop(c, src):
    spec = Spec(
        d_model=c["hidden_size"],
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"],
        d_head=c["head_dim"],
        n_prelude=c["prelude_layers"],
        n_core=c["core_layers"],
        n_coda=c["coda_layers"],
        loops_default=c["loops_default"],
        norm_eps=c["norm_eps"],
        embed_scale=c["embed_scale"],
        inject=c["inject"],
        state_init=c["state_init"],
        skip_first_inject=c["skip_first_inject"],
        rope=c["rope"],
        rope_base=c["rope_base"],
        rope_scaling=c["rope_scaling"],
        qk_norm=c["qk_norm"],
        mlp=c["mlp"],
    )
    layers = []
    for group, count in (("prelude", spec.n_prelude), ("core", spec.n_core), ("coda", spec.n_coda)):
        for i in range(count):
            b = f"model.{group}.{i}."
            has_values = c["value_embeds"] and len(layers) % 2
            ups = ("gate", "up") if spec.mlp == "silu_gated" else ("up",)
            has_qk_weights = spec.qk_norm in ("full", "head")
            layers.append(
                Layer(
                    qkv=stacked([src.matrix(f"{b}attn.{n}.weight") for n in "qkv"]),
                    o=src.matrix(b + "attn.o.weight"),
                    up=stacked([src.matrix(f"{b}mlp.{n}.weight") for n in ups]),
                    down=src.matrix(b + "mlp.down.weight"),
                    norm={n: src.vector(f"{b}{n}.weight") for n in c["norms"]},
                    q_norm=src.vector(b + "attn.q_norm.weight") if has_qk_weights else None,
                    k_norm=src.vector(b + "attn.k_norm.weight") if has_qk_weights else None,
                    qk_bias=src.vectors([f"{b}attn.{n}_bias" for n in "qk"]) if c["qk_bias"] else None,
                    qkv_bias=src.vectors([f"{b}attn.{n}.bias" for n in "qkv"]) if c["qkv_bias"] else None,
                    value_embed=src.matrix(b + "attn.value_embed.weight") if has_values else None,
                    value_gate=src.vector(b + "attn.value_gate.weight").reshape(-1, 32) if has_values else None,
                )
            )
    embed = src.matrix("model.embed_tokens.weight")
    diag = spec.inject == "diag"
    gate = c["exit"] == "gate_cdf"
    return Model(
        spec,
        layers,
        embed,
        embed if c["tie_word_embeddings"] else src.matrix("lm_head.weight"),
        inject_norm=src.vector("model.inject_norm.weight") if c["inject_norm"] else None,
        adapter=src.matrix("model.adapter.weight") if spec.inject == "concat_linear" else None,
        inject_b=src.matrix("model.inject.b.weight") if diag else None,
        inject_decay=src.vector("model.inject.decay") if diag else None,
        inject_gain=src.vector("model.inject.gain") if diag else None,
        loop_norm=src.vector("model.loop_norm.weight") if c["loop_end_norm"] else None,
        coda_norm=src.vector("model.coda_norm.weight") if c["core_to_coda"] == "norm" else None,
        coda_in=src.matrix("model.coda_in.weight") if c["core_to_coda"] == "linear" else None,
        final_norm=src.vector("model.final_norm.weight") if c["final_norm"] else None,
        gate_w=src.vector("model.gate.weight") if gate else None,
        gate_b=src.vector("model.gate.bias")[0] if gate else None,
    )


def open_model(directory, half_products=False):
    with open(os.path.join(directory, "config.json")) as f:
        config = json.load(f)
    src = Source(read_tensors(directory))
    openers = {"ouro": open_ouro, "huginn_raven": open_huginn, "tinyloop": open_tinyloop}
    model = openers[config["model_type"]](config, src)
    src.check_all_used(ignored=("freqs_cis",))
    model.half_products = half_products
    return model
