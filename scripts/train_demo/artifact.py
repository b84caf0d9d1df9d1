"""Reads and writes the artifact folder: config.json, tokenizer files and model.safetensors in the project's own layout."""
import json
import os
import shutil
import struct

import numpy as np

DTYPES = {"F32": np.float32, "I8": np.int8, "U8": np.uint8}
CHAT_TEMPLATE = ("{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
                 "{% elif message['role'] == 'system' %}{{ '<|system|>' + message['content'] }}"
                 "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def pack_nibbles(a):
    """Two values -8..15 of a row in a byte, the first one low; a row of odd length gets a zero."""
    a = a.astype(np.int8).view(np.uint8) & 15
    if a.shape[1] % 2:
        a = np.concatenate([a, np.zeros_like(a[:, :1])], 1)
    return a[:, 0::2] | (a[:, 1::2] << 4)


def unpack_nibbles(a):
    """Values 0..15, two of each byte."""
    return np.stack([a & 15, a >> 4], -1).reshape(len(a), -1)


def write_safetensors(path, tensors, metadata):
    """Tensors are numpy arrays; names sorted, data 8-byte aligned as the format's own writer does."""
    header, at = {"__metadata__": metadata}, 0
    names = sorted(tensors)
    for name in names:
        a = tensors[name]
        kind = next(k for k, t in DTYPES.items() if a.dtype == t)
        header[name] = {"dtype": kind, "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            f.write(np.ascontiguousarray(tensors[name]).tobytes())


def read_safetensors(path):
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        header, blob = json.loads(f.read(size)), f.read()
    header.pop("__metadata__", None)
    return {name: np.frombuffer(blob[e["data_offsets"][0]:e["data_offsets"][1]], DTYPES[e["dtype"]]).reshape(e["shape"])
            for name, e in header.items()}


def config_json(config, quantization):
    return {
        "model_type": "tinyloop", "architectures": ["TinyLoopForCausalLM"],
        "vocab_size": config.vocab, "hidden_size": config.hidden, "intermediate_size": config.mlp,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "prelude_layers": config.prelude, "core_layers": config.core, "coda_layers": config.coda,
        "loops_default": config.default_loops, "loops_trained": config.max_loops, "loops_max": config.max_loops,
        "max_position_embeddings": config.max_positions, "norm_eps": config.norm_eps, "embed_scale": config.embed_scale,
        "inject": "concat_linear", "state_init": "zero", "norms": ["n1", "n4"], "loop_end_norm": True, "core_to_coda": "none",
        "final_norm": True, "rope": "half", "rope_base": config.rope_base, "qk_norm": "none", "qk_bias": False, "qkv_bias": False,
        "mlp": "silu_gated", "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0, "stop_token_ids": [0, 1],
        "quantization": quantization,
    }


def write_folder(folder, config, quantization, tensors, tokenizer_path):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config_json(config, quantization), f, indent=2)
        f.write("\n")
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_positions, "bos_token": None,
                   "eos_token": "<|end|>", "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}, f, indent=2)
        f.write("\n")
    if os.path.abspath(tokenizer_path) != os.path.abspath(os.path.join(folder, "tokenizer.json")):
        shutil.copy(tokenizer_path, os.path.join(folder, "tokenizer.json"))
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors, {"format": "tinyloop", "quantization": quantization})
