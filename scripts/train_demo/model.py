"""The looped decoder: prelude, adapter + core x loops, coda, final norm, tied head. Plain functions over a dict of tensors
whose names are those of the artifact; quantisers of the artifact's INT8 and INT4 formats; a cached decoder for text.

Shapes: hidden states are [batch, tokens, D]. Runs on PyTorch 1.13 (CPU smoke) and 2.x (training).
"""
import math

import torch
import torch.nn.functional as F

LINEAR = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
EMBED = "model.embed_tokens.weight"
ADAPTER = "model.adapter.weight"
GROUP = 32                            # inputs that share an INT4 group scale
OBSERVER = None                       # called with the rounded input (integers, scales) and the IntegerWeight of every product


class Config:
    """Sizes; the default is the shipped model."""

    def __init__(self, vocab=4096, hidden=384, mlp=1024, heads=6, kv_heads=2, head_dim=64, prelude=2, core=4, coda=2,
                 max_positions=1024, max_loops=16, default_loops=8):
        self.vocab, self.hidden, self.mlp = vocab, hidden, mlp
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.prelude, self.core, self.coda = prelude, core, coda
        self.max_positions, self.max_loops, self.default_loops = max_positions, max_loops, default_loops
        self.norm_eps, self.rope_base, self.embed_scale = 1e-5, 10000.0, math.sqrt(hidden)

    def segments(self):
        return (("prelude", self.prelude), ("core", self.core), ("coda", self.coda))


def init_parameters(config, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    d, q, kv, m = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim, config.mlp
    shapes = dict(zip(LINEAR, ((q, d), (kv, d), (kv, d), (d, q), (m, d), (m, d), (d, m))))
    p = {EMBED: torch.randn(config.vocab, d, generator=g) * 0.05}
    for segment, layers in config.segments():
        for i in range(layers):
            base = f"model.{segment}.{i}."
            p[base + "n1.weight"], p[base + "n4.weight"] = torch.ones(d), torch.ones(d)
            for name in LINEAR:
                scale = 0.02 / (math.sqrt(2) if name in ("attn.o", "mlp.down") else 1)
                p[base + name + ".weight"] = torch.randn(*shapes[name], generator=g) * scale
    p[ADAPTER] = torch.cat([torch.eye(d), torch.eye(d)], 1) * 0.7        # columns: state, then injected input
    p["model.loop_norm.weight"], p["model.final_norm.weight"] = torch.ones(d), torch.ones(d)
    return {k: v.to(device).requires_grad_() for k, v in p.items()}


def is_linear(name):
    return name == ADAPTER or name[:-7].endswith(LINEAR)


# ---- quantisers ----

def round_through(x):
    """Rounds to even; the gradient passes unchanged."""
    return (torch.round(x) - x).detach() + x


def quantise_rows(x):
    """Activation quantiser of the engine: per row, s = max(absmax, 1e-8) / 127; returns integer-valued floats and s."""
    s = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return torch.clamp(round_through(x / s), -127, 127), s


def int8_weight(w):
    """([out, in] integers, [out] scales): absmax per output row."""
    s = w.abs().amax(1).clamp_min(1e-8) / 127
    return torch.round(w / s[:, None]).clamp(-127, 127), s


def int4_weight(w):
    """([out, in] integers -7..7, [out, in/32] group scales 1..15, [out] scales): w = scale x group scale x integer."""
    groups = w.view(w.shape[0], -1, GROUP)
    peak = groups.abs().amax(2).clamp_min(1e-8)
    s = peak.amax(1) / 105
    g = torch.clamp(torch.round(peak / 7 / s[:, None]), 1, 15)
    q = torch.round(groups / (s[:, None] * g)[..., None]).clamp(-7, 7)
    return q.view_as(w), g, s


def as_int8(w):
    q, s = int8_weight(w)
    return q * s[:, None]


def as_int4(w):
    q, g, s = int4_weight(w)
    return (q.view(w.shape[0], -1, GROUP) * g[..., None]).view_as(w) * s[:, None]


def quantiser_of(name, shape, mode):
    """Which quantiser an artifact of this mode applies to a tensor: the embedding stays INT8 in INT4 artifacts."""
    if mode == "none" or not (is_linear(name) or name == EMBED):
        return None
    return as_int4 if mode == "int4" and name != EMBED and shape[1] % GROUP == 0 else as_int8


def straight_through(p, mode, fake=None):
    """Weights as quantised, gradients to the float weights: for quantisation-aware steps."""
    out = {}
    for name, w in p.items():
        quantiser = quantiser_of(name, w.shape, mode)
        if quantiser is None:
            out[name] = w
        else:
            with torch.no_grad():
                step = (fake or {}).get(quantiser, quantiser)(w) - w
            out[name] = w + step
    return out


class IntegerWeight:
    """A quantised matrix for exact evaluation: integer-valued floats and one scale per output."""

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    @classmethod
    def of_groups(cls, q, g, scale):
        return cls((q.view(q.shape[0], -1, GROUP) * g[..., None]).view_as(q), scale)


def quantised(p, mode):
    """Weights for exact evaluation in the engine's rounding: matrices and embedding become IntegerWeight, if they are not."""
    out = {}
    with torch.no_grad():
        for name, w in p.items():
            quantiser = None if isinstance(w, IntegerWeight) else quantiser_of(name, w.shape, mode)
            if quantiser is None:
                out[name] = w if isinstance(w, IntegerWeight) else w.detach()
            elif quantiser is as_int4:
                out[name] = IntegerWeight.of_groups(*int4_weight(w.detach().float()))
            else:
                out[name] = IntegerWeight(*int8_weight(w.detach().float()))
    return out


# ---- layers ----

def common_input(x, w):
    """The input of several matrices like `w`: for IntegerWeight it is rounded here, once for all of them."""
    return quantise_rows(x.float()) if isinstance(w, IntegerWeight) else x


def linear(x, w, quantise):
    """x @ w.T; quantise: round activations as the engine does. With IntegerWeight the sums are exact integers, and x may
    be rounded already."""
    if isinstance(w, IntegerWeight):
        q, s = x if isinstance(x, tuple) else quantise_rows(x.float())
        if OBSERVER:
            OBSERVER((q, s), w)
        return F.linear(q, w.integers) * (s * w.scale)
    if quantise:
        q, s = quantise_rows(x.float())
        x = (q * s).to(x.dtype)
    return F.linear(x, w.to(x.dtype))


def rms_norm(x, w, eps=1e-5):
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * w).to(x.dtype)


def rope_table(config, device):
    """cos and sin, [positions, head_dim], both halves alike."""
    f = config.rope_base ** (-torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim)
    a = torch.arange(config.max_positions, device=device).float()[:, None] * f
    return torch.cat([a.cos(), a.cos()], -1), torch.cat([a.sin(), a.sin()], -1)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    xf = x.float()
    return (xf * cos + torch.cat([-xf[..., half:], xf[..., :half]], -1) * sin).to(x.dtype)


def causal_attention(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    t = q.shape[-2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def project(x, cos, sin, w, heads, kv_heads, quantise, half_kv):
    """Queries, keys and values of one layer, [batch, heads, tokens, head_dim], rotated; keys and values as they are stored."""
    b, t, _ = x.shape
    h = common_input(rms_norm(x, w["n1"]), w["attn.q"])
    q, k, v = (linear(h, w["attn." + n], quantise).view(b, t, c, -1).transpose(1, 2)
               for n, c in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if half_kv:
        k, v = k.half().to(k.dtype), v.half().to(v.dtype)
    return q, k, v


def spread(x, heads):
    b, g, t, d = x.shape
    return x[:, :, None].expand(b, g, heads // g, t, d).reshape(b, heads, t, d)


def finish(x, o, w, quantise):
    b, t, _ = x.shape
    x = x + linear(o.transpose(1, 2).reshape(b, t, -1), w["attn.o"], quantise)
    h = common_input(rms_norm(x, w["n4"]), w["mlp.gate"])
    return x + linear(F.silu(linear(h, w["mlp.gate"], quantise)) * linear(h, w["mlp.up"], quantise), w["mlp.down"], quantise)


def block(x, cos, sin, w, heads, kv_heads, quantise=False, half_kv=False):
    q, k, v = project(x, cos, sin, w, heads, kv_heads, quantise, half_kv)
    return finish(x, causal_attention(q, spread(k, heads), spread(v, heads)), w, quantise)


class Network:
    """One set of weights made ready for forward passes; `run_block` and `step` may be compiled versions."""

    def __init__(self, config, weights, rope, quantise=False, half_kv=False, dtype=torch.float32, run_block=block):
        self.config, self.w, self.rope = config, weights, rope
        self.quantise, self.half_kv, self.dtype, self.run_block = quantise, half_kv, dtype, run_block
        cast = {k: (v if isinstance(v, IntegerWeight) or not is_linear(k) else v.to(dtype)) for k, v in weights.items()}
        self.layers = {s: [{n: cast[f"model.{s}.{i}.{n}.weight"] for n in ("n1", "n4") + LINEAR} for i in range(count)]
                       for s, count in config.segments()}
        self.adapter, self.head = cast[ADAPTER], weights[EMBED]
        self.loop_norm, self.final_norm = weights["model.loop_norm.weight"], weights["model.final_norm.weight"]

    def embed(self, ids):
        e = self.head
        if isinstance(e, IntegerWeight):
            x = F.embedding(ids, e.integers) * e.scale[ids][..., None]
        else:
            x = F.embedding(ids, e)
        return (x * self.config.embed_scale).to(self.dtype)

    def blocks(self, x, segment):
        cos, sin = self.rope[0][:x.shape[1]], self.rope[1][:x.shape[1]]
        for w in self.layers[segment]:
            x = self.run_block(x, cos, sin, w, self.config.heads, self.config.kv_heads, self.quantise, self.half_kv)
        return x

    def loop(self, state, injected):
        u = linear(torch.cat([state, injected], -1), self.adapter, self.quantise)
        return rms_norm(self.blocks(u, "core"), self.loop_norm)

    def states(self, ids, loops, wanted, free=0):
        """{t: state after loop t} for the wanted t; the first `free` loops run without gradient."""
        injected = self.blocks(self.embed(ids), "prelude")
        state, out = torch.zeros_like(injected), {}
        for t in range(1, loops + 1):
            if t <= free:
                with torch.no_grad():
                    state = self.loop(state, injected)
            else:
                state = self.loop(state, injected)
            if t in wanted:
                out[t] = state
        return out

    def logits(self, hidden):
        return linear(rms_norm(hidden, self.final_norm), self.head, self.quantise).float()

    def hidden(self, state):
        return self.blocks(state, "coda")


class Decoder:
    """Text generation with keys and values kept per segment, loop and layer; rows of a batch may have different lengths."""

    def __init__(self, network, batch, length):
        self.n, self.batch, self.length, self.kv = network, batch, length, {}

    def attend(self, key, x, at, w):
        """One layer over new tokens at absolute positions at[batch, tokens]."""
        n, c = self.n, self.n.config
        cos, sin = n.rope[0][at][:, None], n.rope[1][at][:, None]
        q, k, v = project(x, cos, sin, w, c.heads, c.kv_heads, n.quantise, n.half_kv)
        if key not in self.kv:
            shape = (self.batch, c.kv_heads, self.length, c.head_dim)
            self.kv[key] = (x.new_zeros(shape), x.new_zeros(shape))
        for store, new in zip(self.kv[key], (k, v)):
            store.scatter_(2, at[:, None, :, None].expand(-1, c.kv_heads, -1, c.head_dim), new)
        end = int(at.max()) + 1
        ks, vs = (spread(s[:, :, :end], c.heads) for s in self.kv[key])
        scores = q @ ks.transpose(-1, -2) / math.sqrt(c.head_dim)
        visible = torch.arange(end, device=x.device) <= at[:, None, :, None]
        return finish(x, scores.masked_fill(~visible, float("-inf")).softmax(-1) @ vs, w, n.quantise)

    def forward(self, ids, at, loops):
        """Logits of every new token: ids and at are [batch, tokens]."""
        n = self.n

        def run(x, segment, t):
            for i, w in enumerate(n.layers[segment]):
                x = self.attend((segment, t, i), x, at, w)
            return x
        injected = run(n.embed(ids), "prelude", 0)
        state = torch.zeros_like(injected)
        for t in range(loops):
            u = linear(torch.cat([state, injected], -1), n.adapter, n.quantise)
            state = rms_norm(run(u, "core", t), n.loop_norm)
        return n.logits(run(state, "coda", 0))


@torch.no_grad()
def generate(network, prompts, loops, limit=160, temperature=0.0, seed=0, stop=(0, 1)):
    """Completions (lists of ids, without the stop token) of prompts (lists of ids)."""
    device = network.rope[0].device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths.max())
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    for i, p in enumerate(prompts):
        ids[i, :len(p)] = torch.tensor(p, device=device)
    limit = min(limit, network.config.max_positions - longest)
    decoder = Decoder(network, len(prompts), longest + limit)
    at = torch.arange(longest, device=device).expand(len(prompts), -1)
    logits = decoder.forward(ids, at, loops)[torch.arange(len(prompts), device=device), lengths - 1]
    generator = torch.Generator(device="cpu").manual_seed(seed)
    out, alive, position = [[] for _ in prompts], [True] * len(prompts), lengths.clone()
    for _ in range(limit):
        if temperature > 0:
            token = torch.multinomial((logits.float().cpu() / temperature).softmax(-1), 1, generator=generator)[:, 0].to(device)
        else:
            token = logits.argmax(-1)
        for i, t in enumerate(token.tolist()):
            alive[i] = alive[i] and t not in stop
            if alive[i]:
                out[i].append(t)
        if not any(alive):
            break
        logits = decoder.forward(token[:, None], position[:, None], loops)[:, 0]
        position = position + 1
    return out
