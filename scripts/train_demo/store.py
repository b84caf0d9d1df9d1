"""Weights, checkpoints and the loss plot on disk."""
import glob
import json
import os

import numpy as np
import torch

import artifact
from model import GROUP, Config, IntegerWeight


PART_BYTES = 15 << 20


def save_shards(params, config, folder, extra=None, part_bytes=PART_BYTES):
    """Half-precision weights as files of at most `part_bytes` each (no tensor is cut), plus settings.json. Each file is
    written beside and renamed; parts of an earlier save that are not written again are removed."""
    os.makedirs(folder, exist_ok=True)
    parts, room = [], 0
    for name in sorted(params):
        a = params[name].detach().half().cpu().numpy()
        size = a.nbytes + 1024                           # with what the archive says about it, twice
        if size + 1024 > part_bytes:
            raise ValueError(f"{name} takes {size + 1024} bytes, a part may have {part_bytes}")
        if size > room:
            parts.append({})
            room = part_bytes - 1024
        parts[-1][name] = a
        room -= size
    for i, part in enumerate(parts):
        path = os.path.join(folder, f"weights{i}.npz")
        np.savez(path + ".new.npz", **part)
        os.replace(path + ".new.npz", path)
    for path in part_paths(folder)[len(parts):]:
        os.remove(path)
    with open(os.path.join(folder, "settings.json"), "w") as f:
        json.dump({"config": vars(config), **(extra or {})}, f, indent=1)


def part_paths(folder):
    """The weight files of a folder, in order."""
    paths = glob.glob(os.path.join(folder, "weights[0-9]*.npz"))
    numbers = {p: os.path.basename(p)[len("weights"):-len(".npz")] for p in paths}
    return sorted((p for p in paths if numbers[p].isdigit()), key=lambda p: int(numbers[p]))


def load_shards(folder, device="cpu"):
    """(parameters, config, settings)"""
    with open(os.path.join(folder, "settings.json")) as f:
        settings = json.load(f)
    config = Config()
    vars(config).update(settings["config"])
    params = {}
    for path in part_paths(folder):
        with np.load(path) as z:
            params.update({k: torch.from_numpy(z[k]).float().to(device).requires_grad_() for k in z.files})
    return params, config, settings


def load_artifact(folder, device="cpu"):
    """(parameters, config) of an INT8 artifact as floats: for measuring what is shipped, or for training on from it. Matrices
    of an INT4 artifact come as model.IntegerWeight: they are for measuring in mode int4 alone."""
    with open(os.path.join(folder, "config.json")) as f:
        j = json.load(f)
    config = Config(j["vocab_size"], j["hidden_size"], j["intermediate_size"], j["num_attention_heads"], j["num_key_value_heads"],
                    j["head_dim"], j["prelude_layers"], j["core_layers"], j["coda_layers"], j["max_position_embeddings"],
                    j["loops_max"], j["loops_default"])
    tensors, params = artifact.read_safetensors(os.path.join(folder, "model.safetensors")), {}
    for name, a in tensors.items():
        if name.endswith("_q4"):
            name = name[:-len("_q4")]
            q, g = (artifact.unpack_nibbles(tensors[name + end]).astype(np.float32) for end in ("_q4", "_gscale"))
            params[name] = IntegerWeight.of_groups(*(torch.from_numpy(x).to(device) for x in (
                np.where(q > 7, q - 16, q), g[:, :q.shape[1] // GROUP].copy(), tensors[name + "_scale"].copy())))
        elif not name.endswith(("_scale", "_gscale")):
            w, scale = torch.from_numpy(a.astype(np.float32)), tensors.get(name + "_scale")
            params[name] = (w if scale is None else w * torch.from_numpy(scale.copy())[:, None]).to(device)
    return params, config


def load(folder, device="cpu"):
    """(parameters, config) of a folder of half-precision weights or of an artifact."""
    if os.path.exists(os.path.join(folder, "config.json")):
        return load_artifact(folder, device)
    return load_shards(folder, device)[:2]


def save_checkpoint(path, state):
    """Written beside and renamed, so that a killed run leaves the previous one."""
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


def loss_plot(path, history):
    """SVG of the loss curves: history is a list of dicts with "step" and one number per curve."""
    names = [k for k in history[0] if k in ("text", "task")]
    width, height, left = 760, 320, 50
    top = max(h[n] for h in history for n in names)
    steps = max(1, history[-1]["step"])
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for i in range(6):
        y = height - 30 - i / 5 * (height - 50)
        parts.append(f'<line x1="{left}" x2="{width - 10}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
                     f'<text x="8" y="{y + 4:.0f}">{top * i / 5:.2f}</text>')
    for name, colour in zip(names, ("#1f77b4", "#d62728")):
        points = " ".join(f"{left + h['step'] / steps * (width - left - 10):.1f},{height - 30 - h[name] / top * (height - 50):.1f}"
                          for h in history)
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
        parts.append(f'<text x="{width - 150}" y="{30 + 14 * names.index(name)}" fill="{colour}">{name} loss</text>')
    parts.append(f'<text x="{left}" y="{height - 10}">steps (to {steps})</text></svg>')
    with open(path, "w") as f:
        f.write("\n".join(parts))
