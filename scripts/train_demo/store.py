"""Weights, checkpoints and the loss plot on disk."""
import json
import os

import numpy as np
import torch

import artifact
from model import Config


def save_shards(params, config, folder, extra=None):
    """Half-precision weights as two files of about equal size, plus settings.json."""
    os.makedirs(folder, exist_ok=True)
    total, done, shards = sum(v.numel() for v in params.values()), 0, ({}, {})
    for name in sorted(params):
        shards[int(done >= total / 2)][name] = params[name].detach().half().cpu().numpy()
        done += params[name].numel()
    for i, shard in enumerate(shards):
        np.savez(os.path.join(folder, f"weights{i}.npz"), **shard)
    with open(os.path.join(folder, "settings.json"), "w") as f:
        json.dump({"config": vars(config), **(extra or {})}, f, indent=1)


def load_shards(folder, device="cpu"):
    """(parameters, config, settings)"""
    with open(os.path.join(folder, "settings.json")) as f:
        settings = json.load(f)
    config = Config()
    vars(config).update(settings["config"])
    params = {}
    for i in (0, 1):
        with np.load(os.path.join(folder, f"weights{i}.npz")) as z:
            params.update({k: torch.from_numpy(z[k]).float().to(device).requires_grad_() for k in z.files})
    return params, config, settings


def load_artifact(folder, device="cpu"):
    """(parameters, config) of an INT8 artifact as floats: for measuring what is shipped, or for training on from it."""
    with open(os.path.join(folder, "config.json")) as f:
        j = json.load(f)
    config = Config(j["vocab_size"], j["hidden_size"], j["intermediate_size"], j["num_attention_heads"], j["num_key_value_heads"],
                    j["head_dim"], j["prelude_layers"], j["core_layers"], j["coda_layers"], j["max_position_embeddings"],
                    j["loops_max"], j["loops_default"])
    tensors, params = artifact.read_safetensors(os.path.join(folder, "model.safetensors")), {}
    for name, a in tensors.items():
        if not name.endswith("_scale"):
            w, scale = torch.from_numpy(a.astype(np.float32)), tensors.get(name + "_scale")
            params[name] = (w if scale is None else w * torch.from_numpy(scale.copy())[:, None]).to(device)
    return params, config


def load(folder, device="cpu"):
    """(parameters, config) of a folder of half-precision weights or of an INT8 artifact."""
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
