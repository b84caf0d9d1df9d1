#!/usr/bin/env python3
"""tests/parcae/test_parcae.py - scripts/convert_parcae.py and what the engine makes of its output.

Small random checkpoints in the released layout (config.json and pytorch_model.bin, made here without PyTorch) are converted; the
engine's logits are compared with a forward pass in double precision, written from the formulas and from the released names
alone. Then: INT8, chunks and depths, and damaged or hostile files, each of which has to be refused in one sentence.

usage: test_parcae.py [--bin build/release/tinyloop]      Ends with "N passed, N failed".
"""

import argparse
import io
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import types
import zipfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONVERT = ROOT / "scripts" / "convert_parcae.py"
CONFIG = {
    "_class_name": "ParcaeConfig", "block_class_name": "TransformerPreNormBlock", "norm_class_name": "RMSNorm", "mlp_class_name": "BaseMLP",
    "nonlin_name": "ReLU2", "injection_type": "diagonal", "prelude_norm": True, "qk_norm": True, "bias": False, "qk_bias": False,
    "tie_embeddings": True, "clip_qkv": None, "logit_softcap": None, "n_embd": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 2, "mean_recurrence": 4,
    "mean_backprop_depth": 2, "block_size": 512, "vocab_size": 61, "padded_vocab_size": 61, "norm_eps": 1e-5,
    "recurrent_embedding_dimension": 64, "recurrent_intermediation_embedding_dimension": 96,
    "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50000},
}
GROUPS = (("prelude", "n_layers_in_prelude"), ("core_block", "n_layers_in_recurrent_block"), ("coda", "n_layers_in_coda"))


def random_weights(c, seed):
    rng = np.random.default_rng(seed)
    d, f, v, h = c["n_embd"], c["intermediate_size"], c["vocab_size"], c["num_attention_heads"]

    def matrix(rows, n, scale=1.0):
        return (scale * rng.standard_normal((rows, n)) / np.sqrt(n)).astype("<f4")

    def vector(mean, spread):
        return (mean + spread * rng.standard_normal(d)).astype("<f4")

    w = {"transformer.wte.weight": rng.standard_normal((v, d)).astype("<f4")}
    at = 0
    for group, count in GROUPS:
        for i in range(c[count]):
            b = f"transformer.{group}.{i}."
            w[b + "norm_1.weight"], w[b + "norm_2.weight"] = vector(1, 0.2), vector(1, 0.2)
            for n in ("c_q", "c_k", "c_v", "c_proj"):
                w[f"{b}attn.{n}.weight"] = matrix(d, d)
            w[b + "mlp.fc.weight"], w[b + "mlp.proj.weight"] = matrix(f, d), matrix(d, f)
            if at % 2:
                w[b + "attn.ve_gate.weight"] = matrix(h, 32, 2)
                w[f"value_embeds.{at}.weight"] = rng.standard_normal((v, d)).astype("<f4")
            at += 1
    w["transformer.adapter.A_log"], w["transformer.adapter.dt_bias"] = vector(-0.5, 0.5), vector(-0.3, 0.7)
    w["transformer.adapter.B"], w["transformer.C.weight"] = matrix(d, d), matrix(d, d)
    w["transformer.ln_prelude.weight"], w["transformer.ln_f.weight"] = vector(1, 0.2), vector(1, 0.2)
    w["lm_head.weight"] = w["transformer.wte.weight"]
    w["freqs_cis"] = np.zeros((1, 8, 1, 8, 2), dtype="<f4")
    return w


# ---- pytorch_model.bin, written as PyTorch writes it -------------------------------------------------------------------


class Tensor:
    def __init__(self, key, array):
        self.key, self.array = key, array

    def __reduce__(self):
        a = self.array
        stride = tuple(int(np.prod(a.shape[i + 1:])) for i in range(a.ndim))
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (Stored(self.key, a), 0, a.shape, stride, False, {})


class Stored:
    def __init__(self, key, array):
        self.key, self.array = key, array


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        if isinstance(value, Stored):
            return ("storage", sys.modules["torch"].FloatStorage, value.key, "cpu", value.array.size)
        return None


def stand_in():
    """Modules with the names that the pickle has to name."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    def _rebuild_tensor_v2(*_):
        raise AssertionError("not called here")

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    torch.FloatStorage = type("FloatStorage", (), {"__module__": "torch"})
    sys.modules.update({"torch": torch, "torch._utils": utils})


def write_bin(path, weights):
    with zipfile.ZipFile(path, "w") as z:
        out = io.BytesIO()
        Pickler(out, protocol=2).dump({n: Tensor(str(i), a) for i, (n, a) in enumerate(weights.items())})
        z.writestr("pytorch_model/data.pkl", out.getvalue())
        for i, a in enumerate(weights.values()):
            z.writestr(f"pytorch_model/data/{i}", np.ascontiguousarray(a).tobytes())


def write_model(folder, config, weights):
    os.makedirs(folder, exist_ok=True)
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    write_bin(pathlib.Path(folder, "pytorch_model.bin"), weights)


# ---- the formulas, in double precision --------------------------------------------------------------------------------


def rms(x, weight, eps):
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def forward(c, weights, tokens, loops):
    """Logits of every position; the state starts at zero."""
    w = {n: a.astype(np.float64) for n, a in weights.items()}
    d, heads, n = c["n_embd"], c["num_attention_heads"], len(tokens)
    width = d // heads
    base = c["rope_settings"]["rope_base"]
    angle = np.arange(n)[:, None] * base ** (-2.0 * np.arange(width // 2) / width)[None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    mask = np.triu(np.full((n, n), -np.inf), 1)

    def turn(x):
        y = np.empty_like(x)
        y[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        y[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return rms(y, None, np.finfo(np.float32).eps)

    def block(group, i, at, x):
        def p(name):
            return w[f"transformer.{group}.{i}.{name}.weight"]

        h = rms(x, p("norm_1"), c["norm_eps"])
        q, k, v = ((h @ p(f"attn.{m}").T).reshape(n, heads, width) for m in ("c_q", "c_k", "c_v"))
        if at % 2:
            gate = 2 / (1 + np.exp(-h[:, :32] @ p("attn.ve_gate").T))
            v = v + gate[:, :, None] * w[f"value_embeds.{at}.weight"][tokens].reshape(n, heads, width)
        score = np.einsum("qhd,khd->hqk", turn(q), turn(k)) / np.sqrt(width) + mask
        score = np.exp(score - score.max(axis=-1, keepdims=True))
        score /= score.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", score, v).reshape(n, d) @ p("attn.c_proj").T
        h = np.maximum(rms(x, p("norm_2"), c["norm_eps"]) @ p("mlp.fc").T, 0)
        return x + (0.5 * h * h) @ p("mlp.proj").T

    n_prelude, n_core = c["n_layers_in_prelude"], c["n_layers_in_recurrent_block"]
    x = w["transformer.wte.weight"][tokens]
    for i in range(n_prelude):
        x = block("prelude", i, i, x)
    e = rms(x, w["transformer.ln_prelude.weight"], c["norm_eps"])
    step = np.log1p(np.exp(w["transformer.adapter.dt_bias"]))
    keep = np.exp(-step * np.exp(w["transformer.adapter.A_log"]))
    x = np.zeros_like(e)
    for _ in range(loops):
        x = keep * x + step * (e @ w["transformer.adapter.B"].T)
        for i in range(n_core):
            x = block("core_block", i, n_prelude + i, x)
    x = x @ w["transformer.C.weight"].T
    for i in range(c["n_layers_in_coda"]):
        x = block("coda", i, n_prelude + n_core + i, x)
    return rms(x, w["transformer.ln_f.weight"], c["norm_eps"]) @ w["transformer.wte.weight"].T


# ---- checks ------------------------------------------------------------------------------------------------------------


class Tally:
    passed = failed = 0

    def __call__(self, good, what):
        self.passed, self.failed = self.passed + bool(good), self.failed + (not good)
        if not good:
            print(f"FAILED {what}")


def call(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)


def engine(program, model, tokens, loops):
    done = call(program, "logits", "--model", model, "--tokens", ",".join(map(str, tokens)), "--loops", loops, "--rows", len(tokens), "--json")
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return np.array(json.loads(done.stdout)["rows"])


def check_engine(check, program, folder):
    shapes = ({}, {"n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 2}, {"n_embd": 96, "recurrent_embedding_dimension": 96, "norm_eps": 1e-3})
    for seed, change in enumerate(shapes):
        c = {**CONFIG, **change}
        weights, model, out = random_weights(c, seed), folder / f"model-{seed}", folder / f"out-{seed}"
        write_model(model, c, weights)
        done = call(sys.executable, CONVERT, "--model", model, "--out", out)
        check(done.returncode == 0, f"convert {change}: {done.stderr}")
        tokens = [int(t) for t in np.random.default_rng(seed).integers(0, c["vocab_size"], 70 if seed == 0 else 13)]
        for loops in (1, 2, 5):
            want = forward(c, weights, tokens, loops)
            error = np.abs(engine(program, out, tokens, loops) - want).max() / max(1, np.abs(want).max())
            check(error < 1e-5, f"{change}, loops {loops}: off by {error:.1e}")
        for kind, limit in (("bf16", 0.1), ("int8", 0.15)):  # the rounding itself; what it does is tested elsewhere
            small = folder / f"{kind}-{seed}"
            done = call(program, "quantize", "--model", out, "--to", kind, "--out", small, "--quiet")
            check(done.returncode == 0, f"quantize to {kind}: {done.stderr}")
            error = np.abs(engine(program, small, tokens, 2) - forward(c, weights, tokens, 2)).mean() / np.abs(want).mean()
            check(error < limit, f"{change}, {kind}: off by {error:.1e}")
        made = call(program, "generate", "--model", out, "--tokens", "5,9,2", "--max-tokens", 20, "--ignore-eos", "--temperature", 0, "--json")
        made = json.loads(made.stdout)["tokens"]
        rows = forward(c, weights, [5, 9, 2] + made, c["mean_recurrence"])[2:-1]
        check((rows[np.arange(20), made] > rows.max(axis=1) - 1e-3).all(), f"{change}: 20 greedy tokens")


class Evil:
    def __reduce__(self):
        return os.system, ("echo was run",)


def check_refusals(check, program, folder):
    weights = random_weights(CONFIG, 9)

    def refused(what, sentence, config=None, tensors=None):
        model = folder / "bad"
        write_model(model, {**CONFIG, **(config or {})}, {**weights, **(tensors or {})})
        done = call(sys.executable, CONVERT, "--model", model, "--out", folder / "never")
        check(done.returncode == 1 and sentence in done.stderr and done.stderr.count("\n") == 1, f"{what}: {done.stderr}")

    refused("injection", "injection_type is \"linear\"", {"injection_type": "linear"})
    refused("no prelude norm", "prelude_norm is false", {"prelude_norm": False})
    refused("untied", "tie_embeddings is false", {"tie_embeddings": False})
    refused("soft cap", "logit_softcap is 30", {"logit_softcap": 30})
    refused("other widths in the loop", "recurrent_embedding_dimension is 32", {"recurrent_embedding_dimension": 32})
    refused("grouped queries", "num_key_value_heads is 2", {"num_key_value_heads": 2})
    refused("odd number of layers", "value embeddings at even places", {"n_layers_in_coda": 1})
    refused("condensed rope", "rope_settings", {"rope_settings": {"use_rope": True, "rope_condense_ratio": 2}})
    refused("wrong shape", "norm_1.weight has shape [63]", tensors={"transformer.prelude.0.norm_1.weight": np.ones(63, "<f4")})
    refused("NaN", "not finite", tensors={"transformer.C.weight": np.full((64, 64), np.nan, "<f4")})
    refused("another head", "differ", tensors={"lm_head.weight": np.ones((61, 64), "<f4")})
    refused("a tensor too many", "have no place", tensors={"transformer.extra.weight": np.ones(3, "<f4")})
    write_model(folder / "bad", CONFIG, {n: a for n, a in weights.items() if n != "value_embeds.3.weight"})
    done = call(sys.executable, CONVERT, "--model", folder / "bad", "--out", folder / "never")
    check(done.returncode == 1 and "lacks the tensor value_embeds.3.weight" in done.stderr, f"missing table: {done.stderr}")
    with zipfile.ZipFile(folder / "bad" / "pytorch_model.bin", "w") as z:
        z.writestr("pytorch_model/data.pkl", pickle.dumps({"a": Evil()}, protocol=2))
    done = call(sys.executable, CONVERT, "--model", folder / "bad", "--out", folder / "never")
    check(done.returncode == 1 and "system" in done.stderr and "was run" not in done.stdout, f"hostile pickle: {done.stderr}")
    for cut in (b"", b"PK\x03\x04", (folder / "model-0" / "pytorch_model.bin").read_bytes()[:-2000]):
        (folder / "bad" / "pytorch_model.bin").write_bytes(cut)
        done = call(sys.executable, CONVERT, "--model", folder / "bad", "--out", folder / "never")
        check(done.returncode == 1 and "Traceback" not in done.stderr, f"{len(cut)} bytes: {done.stderr}")
    check(not (folder / "never").exists(), "nothing was written")
    write_bin(folder / "bad" / "pytorch_model.bin", weights)
    done = call(program, "inspect", folder / "bad")
    check(done.returncode == 1, f"the unconverted checkpoint: {done.stdout}{done.stderr}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", default=ROOT / "build/release/tinyloop", type=pathlib.Path)
    a = p.parse_args()
    check = Tally()
    stand_in()
    with tempfile.TemporaryDirectory() as folder:
        check_engine(check, a.bin, pathlib.Path(folder))
        check_refusals(check, a.bin, pathlib.Path(folder))
    print(f"{check.passed} passed, {check.failed} failed")
    return check.failed > 0


if __name__ == "__main__":
    sys.exit(main())
