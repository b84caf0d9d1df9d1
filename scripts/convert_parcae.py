#!/usr/bin/env python3
"""A Parcae checkpoint as a model directory that tinyloop reads.

    scripts/convert_parcae.py --model parcae-370m --out models/parcae [--dtype f32|bf16]

Parcae is released as config.json and pytorch_model.bin, a pickle. A pickle may run any code, so this reads it without
PyTorch and lets it name tensors and nothing else. The result is TinyLoop's own layout: the injection's A_log and dt_bias become
the decay and gain that they stand for, all else keeps its numbers. tokenizer files are copied. Flags that the code knows and the
released models do not use are refused by name. Needs Python and numpy.
"""
import argparse
import json
import pathlib
import pickle
import shutil
import struct
import sys
import zipfile

import numpy as np

# ---- pytorch_model.bin: a zip file with data.pkl and one file of numbers per storage ----------------------------------

STORAGES = {"FloatStorage": ("<f4", 4), "HalfStorage": ("<f2", 2), "BFloat16Storage": ("<u2", 2), "DoubleStorage": ("<f8", 8)}


class Storage:
    def __init__(self, name):
        self.name = name


class Unpickler(pickle.Unpickler):
    """Knows ordered dictionaries, storages and the function that makes a tensor of one."""

    def __init__(self, file, archive, root):
        super().__init__(file)
        self.archive, self.root = archive, root

    def find_class(self, module, name):
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in STORAGES:
            return Storage(name)
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return getattr(self, name)
        raise ValueError(f"the pickle asks for {module}.{name}, which no table of weights needs")

    def persistent_load(self, pid):
        kind, storage, key = pid[:3]
        if kind != "storage" or not isinstance(storage, Storage):
            raise ValueError(f"the pickle refers to a {kind}, which is no storage")
        return storage.name, self.archive.read(f"{self.root}/data/{key}")

    @staticmethod
    def _rebuild_tensor_v2(storage, offset, shape, stride, *_):
        name, raw = storage
        dtype, size = STORAGES[name]
        n = int(np.prod(shape))
        if tuple(stride) != tuple(int(np.prod(shape[i + 1:])) for i in range(len(shape))):
            raise ValueError(f"a tensor of shape {list(shape)} has strides {list(stride)}; only whole tensors are read")
        if offset < 0 or (offset + n) * size > len(raw):
            raise ValueError(f"a tensor of {n} numbers begins at {offset}, its storage has {len(raw) // size}")
        values = np.frombuffer(raw, dtype=dtype, count=n, offset=offset * size).reshape(shape)
        return (values.astype(np.uint32) << 16).view("<f4") if name == "BFloat16Storage" else values.astype("<f4")

    @staticmethod
    def _rebuild_parameter(tensor, *_):
        return tensor


def read_checkpoint(path):
    with zipfile.ZipFile(path) as z:
        pickles = [n for n in z.namelist() if n.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{path} holds {len(pickles)} files data.pkl instead of one")
        with z.open(pickles[0]) as f:
            tensors = Unpickler(f, z, pickles[0].rpartition("/")[0]).load()
    if not isinstance(tensors, dict) or not all(isinstance(v, np.ndarray) for v in tensors.values()):
        raise ValueError(f"{path} is no table of tensors")
    return tensors


# ---- config.json ------------------------------------------------------------------------------------------------------

FIXED = {  # what the released models say; another value is another model
    "block_class_name": "TransformerPreNormBlock", "norm_class_name": "RMSNorm", "mlp_class_name": "BaseMLP", "nonlin_name": "ReLU2",
    "injection_type": "diagonal", "prelude_norm": True, "qk_norm": True, "bias": False, "qk_bias": False, "tie_embeddings": True,
    "clip_qkv": None, "logit_softcap": None, "mup_model_scaling_factor": 1,
}


def config_of(c):
    if c.get("_class_name") != "ParcaeConfig":
        raise ValueError(f"config.json has the _class_name {c.get('_class_name')!r}, not 'ParcaeConfig'")
    for key, value in FIXED.items():
        if c.get(key, value) != value:
            raise ValueError(f"config.json: {key} is {json.dumps(c[key])}, only {json.dumps(value)} is supported")
    d, heads, core = c["n_embd"], c["num_attention_heads"], c["n_layers_in_recurrent_block"]
    same = {"num_key_value_heads": heads, "padded_vocab_size": c["vocab_size"], "recurrent_embedding_dimension": d,
            "recurrent_intermediation_embedding_dimension": c["intermediate_size"], "recurrent_num_attention_heads": heads}
    for key, value in same.items():
        if c.get(key) not in (None, value):
            raise ValueError(f"config.json: {key} is {c[key]}, only {value} is supported, as outside the loop")
    rope = c.get("rope_settings") or {}
    if not rope.get("use_rope", True) or rope.get("rope_condense_ratio", 1) != 1:
        raise ValueError("config.json: rope_settings switches rope off or condenses it, which is not supported")
    n_layers = c["n_layers_in_prelude"] + core + c["n_layers_in_coda"]
    if n_layers % 2 or core * c["mean_backprop_depth"] % 2:
        raise ValueError(f"config.json: {n_layers} layers with {core} in the loop put value embeddings at even places, only odd ones are known")
    eos = c.get("eos_token_id")
    return {
        "model_type": "tinyloop", "vocab_size": c["vocab_size"], "hidden_size": d, "intermediate_size": c["intermediate_size"],
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": d // heads, "prelude_layers": c["n_layers_in_prelude"],
        "core_layers": core, "coda_layers": c["n_layers_in_coda"], "loops_default": c["mean_recurrence"], "loops_trained": c["mean_recurrence"],
        "loops_max": min(64, 4 * c["mean_recurrence"]), "max_position_embeddings": c["block_size"], "norm_eps": c["norm_eps"],
        "inject": "diag", "inject_norm": True, "state_init": "truncnorm", "state_std": float(np.float32(np.sqrt(2 / (5 * d)))),
        "core_to_coda": "linear", "rope": "pair", "rope_base": rope.get("rope_base", c.get("rope_base", 50000)),
        "qk_norm": "head_after_rope", "value_embeds": True, "mlp": "relu2", "tie_word_embeddings": True,
        "eos_token_id": -1 if eos is None else eos, "bos_token_id": -1 if c.get("bos_token_id") is None else c["bos_token_id"],
    }


# ---- tensors ----------------------------------------------------------------------------------------------------------

LAYER = {"norm_1.weight": "n1.weight", "norm_2.weight": "n4.weight", "attn.c_q.weight": "attn.q.weight", "attn.c_k.weight": "attn.k.weight",
         "attn.c_v.weight": "attn.v.weight", "attn.c_proj.weight": "attn.o.weight", "mlp.fc.weight": "mlp.up.weight",
         "mlp.proj.weight": "mlp.down.weight"}


def tensors_of(w, c):
    """Our names and numbers; every tensor of the file has to have a place."""
    left = dict(w)

    def take(name, *shape):
        if name not in left:
            raise ValueError(f"the checkpoint lacks the tensor {name}")
        if left[name].shape != shape:
            raise ValueError(f"{name} has shape {list(left[name].shape)}, expected is {list(shape)}")
        if not np.isfinite(left[name]).all():
            raise ValueError(f"{name} holds a value that is not finite")
        return left.pop(name)

    d, f, v, heads = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["num_attention_heads"]
    out = {"model.embed_tokens.weight": take("transformer.wte.weight", v, d)}
    shapes = {"norm": (d,), "attn": (d, d), "mlp.fc": (f, d), "mlp.proj": (d, f)}
    at = 0
    for theirs, ours in (("prelude", "prelude"), ("core_block", "core"), ("coda", "coda")):
        for i in range(c[ours + "_layers"]):
            for a, b in LAYER.items():
                shape = next(s for start, s in shapes.items() if a.startswith(start))
                out[f"model.{ours}.{i}.{b}"] = take(f"transformer.{theirs}.{i}.{a}", *shape)
            if at % 2:
                out[f"model.{ours}.{i}.attn.value_embed.weight"] = take(f"value_embeds.{at}.weight", v, d)
                out[f"model.{ours}.{i}.attn.value_gate.weight"] = take(f"transformer.{theirs}.{i}.attn.ve_gate.weight", heads, 32)
            at += 1
    step = np.logaddexp(0, take("transformer.adapter.dt_bias", d).astype(np.float64))
    out["model.inject.decay"] = np.exp(-step * np.exp(take("transformer.adapter.A_log", d).astype(np.float64))).astype("<f4")
    out["model.inject.gain"] = step.astype("<f4")
    out["model.inject.b.weight"] = take("transformer.adapter.B", d, d)
    out["model.inject_norm.weight"] = take("transformer.ln_prelude.weight", d)
    out["model.coda_in.weight"] = take("transformer.C.weight", d, d)
    out["model.final_norm.weight"] = take("transformer.ln_f.weight", d)
    if "lm_head.weight" in left and not np.array_equal(take("lm_head.weight", v, d), out["model.embed_tokens.weight"]):
        raise ValueError("tie_embeddings is set, but lm_head.weight and transformer.wte.weight differ")
    left.pop("freqs_cis", None)  # a table of cosines and sines, made anew
    if left:
        raise ValueError(f"{len(left)} tensors have no place here, the first is {sorted(left)[0]}")
    return out


def write_safetensors(path, tensors, dtype):
    """Matrices in dtype, vectors and gates in F32."""
    def bits(name, a):
        a = np.ascontiguousarray(a, dtype="<f4")
        if dtype == "f32" or a.ndim == 1 or name.endswith("value_gate.weight"):
            return "F32", a
        b = a.view(np.uint32)
        return "BF16", ((b + 0x7FFF + (b >> 16 & 1)) >> 16).astype("<u2")

    header, at = {}, 0
    for name, a in tensors.items():
        label, stored = bits(name, a)
        header[name] = {"dtype": label, "shape": list(a.shape), "data_offsets": [at, at + stored.nbytes]}
        at += stored.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, a in tensors.items():
            out.write(bits(name, a)[1].tobytes())


def convert(model, out, dtype="f32"):
    model, out = pathlib.Path(model), pathlib.Path(out)
    config = config_of(json.loads((model / "config.json").read_text()))
    tensors = tensors_of(read_checkpoint(model / "pytorch_model.bin"), config)
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / "model.safetensors", tensors, dtype)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "LICENSE"):
        if (model / name).exists():
            shutil.copyfile(model / name, out / name)
    print(f"{out}: {len(tensors)} tensors, {sum(a.size for a in tensors.values())} parameters, {dtype}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="folder with config.json and pytorch_model.bin")
    p.add_argument("--out", required=True, help="folder to write")
    p.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="of matrices (default f32)")
    a = p.parse_args()
    try:
        convert(a.model, a.out, a.dtype)
    except KeyError as e:
        sys.exit(f"convert_parcae: config.json lacks {e}")
    except (ValueError, OSError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError, IndexError, TypeError) as e:
        sys.exit(f"convert_parcae: {e}")


if __name__ == "__main__":
    main()
