#!/usr/bin/env python3
"""Independent reference: loads an artifact (numpy only) and runs it row by row in float64 or float32.

    python3 reference.py --model config/demo-model --loops 8 --chat "Start with 4. Add 3. Double it. Keep the last digit."
    python3 reference.py --model config/demo-model --ids 1,55,89 --logits out.npy      # [tokens, vocabulary]

Linear layers of quantised artifacts follow the engine's rules exactly: activations per row s = max(absmax, 1e-8) / 127 in
float32, rounded to even and clamped to 127, integer sums, result = float32(sum) * (s * scale). Keys and values are rounded
to half precision for quantised artifacts. Everything else is computed in --precision (float64 by default).
"""
import argparse
import json
import math
import os
import sys

import numpy as np

import artifact
from tokenizer import ASSISTANT, USER, Tokenizer


class Matrix:
    """A linear layer's weight: float, or integers with one scale per output."""

    def __init__(self, tensors, name):
        self.integers = self.scale = self.floats = None
        if name in tensors and tensors[name].dtype == np.int8:
            self.integers, self.scale = tensors[name].astype(np.int64), tensors[name + "_scale"]
        elif name in tensors:
            self.floats = tensors[name]
        else:
            packed, groups = tensors[name + "_q4"], tensors[name + "_gscale"]
            q = artifact.unpack_nibbles(packed).astype(np.int64)
            q = np.where(q > 7, q - 16, q)
            g = artifact.unpack_nibbles(groups)[:, :q.shape[1] // 32].astype(np.int64)
            self.integers, self.scale = q * np.repeat(g, 32, axis=1), tensors[name + "_scale"]

    def rows(self, ids, kind):
        if self.integers is None:
            return self.floats[ids].astype(kind)
        return (self.integers[ids].astype(np.float32) * self.scale[ids][:, None]).astype(kind)

    def apply(self, x, kind):
        if self.integers is None:
            return x @ self.floats.astype(kind).T
        x = x.astype(np.float32)
        s = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-8)) / np.float32(127)
        q = np.clip(np.rint(x / s), -127, 127).astype(np.int64)
        return ((q @ self.integers.T).astype(np.float32) * (s * self.scale)).astype(kind)


class Reference:
    def __init__(self, folder, kind=np.float64):
        with open(os.path.join(folder, "config.json")) as f:
            self.c = json.load(f)
        t, c = artifact.read_safetensors(os.path.join(folder, "model.safetensors")), self.c
        self.kind = kind
        self.head = Matrix(t, "model.embed_tokens.weight")
        self.adapter = Matrix(t, "model.adapter.weight")
        self.loop_norm, self.final_norm = t["model.loop_norm.weight"], t["model.final_norm.weight"]
        self.layers = {}
        for segment in ("prelude", "core", "coda"):
            self.layers[segment] = [
                {**{n: t[f"model.{segment}.{i}.{n}.weight"] for n in ("n1", "n4")},
                 **{n: Matrix(t, f"model.{segment}.{i}.{n}.weight")
                    for n in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")}}
                for i in range(c[segment + "_layers"])]

    def norm(self, x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["norm_eps"]) * w.astype(self.kind)

    def rotate(self, x, at):
        d = self.c["head_dim"]
        f = self.c["rope_base"] ** (-np.arange(0, d, 2, dtype=np.float64) / d)
        angle = at[:, None] * f
        cos, sin = np.cos(angle).astype(self.kind)[:, None], np.sin(angle).astype(self.kind)[:, None]
        a, b = x[..., :d // 2], x[..., d // 2:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def stored(self, x):
        return x.astype(np.float16).astype(self.kind) if self.c["quantization"] != "none" else x

    def layer(self, x, w, at):
        c, t = self.c, len(x)
        heads, groups, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        h = self.norm(x, w["n1"])
        q = self.rotate(w["attn.q"].apply(h, self.kind).reshape(t, heads, d), at)
        k = self.stored(self.rotate(w["attn.k"].apply(h, self.kind).reshape(t, groups, d), at))
        v = self.stored(w["attn.v"].apply(h, self.kind).reshape(t, groups, d))
        out = np.zeros((t, heads, d), self.kind)
        hidden = np.triu(np.ones((t, t), bool), 1)
        for head in range(heads):
            g = head * groups // heads
            scores = q[:, head] @ k[:, g].T / math.sqrt(d)
            scores[hidden] = -np.inf
            e = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = e @ v[:, g] / e.sum(-1, keepdims=True)
        x = x + w["attn.o"].apply(out.reshape(t, -1), self.kind)
        h = self.norm(x, w["n4"])
        gate = w["mlp.gate"].apply(h, self.kind)
        return x + w["mlp.down"].apply(gate / (1 + np.exp(-gate)) * w["mlp.up"].apply(h, self.kind), self.kind)

    def logits(self, ids, loops):
        """[tokens, vocabulary] for the whole sequence at one depth."""
        at = np.arange(len(ids), dtype=np.float64)

        def run(x, segment):
            for w in self.layers[segment]:
                x = self.layer(x, w, at)
            return x
        injected = run(self.head.rows(np.array(ids), self.kind) * self.kind(self.c["embed_scale"]), "prelude")
        state = np.zeros_like(injected)
        for _ in range(loops):
            state = self.norm(run(self.adapter.apply(np.concatenate([state, injected], -1), self.kind), "core"), self.loop_norm)
        return self.head.apply(self.norm(run(state, "coda"), self.final_norm), self.kind)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="config/demo-model")
    p.add_argument("--loops", type=int, default=8)
    p.add_argument("--ids", help="comma-separated token ids of the prompt")
    p.add_argument("--chat", help="a user message, wrapped in the chat template")
    p.add_argument("--text", help="plain text, no template")
    p.add_argument("--tokens", type=int, default=16, help="greedy tokens to print")
    p.add_argument("--precision", choices=("float64", "float32"), default="float64")
    p.add_argument("--logits", help="write the prompt's logits to this .npy file")
    args = p.parse_args()
    reference = Reference(args.model, np.dtype(args.precision).type)
    tokenizer = Tokenizer(os.path.join(args.model, "tokenizer.json"))
    if args.ids:
        ids = [int(i) for i in args.ids.split(",")]
    elif args.chat is not None:
        ids = [USER] + tokenizer.encode(args.chat) + [ASSISTANT]
    elif args.text is not None:
        ids = tokenizer.encode(args.text)
    else:
        sys.exit("give --ids, --chat or --text")
    z = reference.logits(ids, args.loops)
    if args.logits:
        np.save(args.logits, z)
    out = []
    for _ in range(args.tokens):
        token = int(z[-1].argmax())
        if token in reference.c["stop_token_ids"]:
            break
        out.append(token)
        if len(out) < args.tokens:
            z = reference.logits(ids + out, args.loops)
    print(json.dumps({"prompt": ids, "tokens": out, "text": tokenizer.decode(out)}))


if __name__ == "__main__":
    main()
