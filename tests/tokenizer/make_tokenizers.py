"""Train small tokenizers of the kinds that released models use, and write their tokenizer.json files."""
import copy
import json
import pathlib
import random
import sysconfig

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import make_strings

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
# One pattern with line runs, single digits, operators, LaTeX commands, words and blank runs.
CUSTOM = (r"(?:\r?\n)+|\d|\\(?:begin|end|[a-zA-Z]+)| ?(?:==|!=|<=|>=|->|\+\+|--|&&|\|\|)|[^\s\w]?[\p{L}\p{M}]+|[^\s\w]| +(?=\S)|\s+")
WORDS = r"\w+|\W|^x|y$|\b\d|[\s\S]{,2}\u4f60|\p{Han}+|[\w'-]+(?<=s)"


def corpus():
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = [(folder / f).read_text(errors="ignore")[:60000]
             for f in ("argparse.py", "datetime.py", "pathlib.py", "json/decoder.py", "statistics.py", "unittest/mock.py")]
    rng = random.Random(7)
    texts += [make_strings.one(rng) for _ in range(2000)]
    texts += [" ".join(rng.choice(make_strings.WORDS) for _ in range(400)) for _ in range(60)]
    return texts


def train(texts, pre, normalizer=None, size=2000, special=(), byte_level=True, **model):
    tk = Tokenizer(models.BPE(**model))
    tk.pre_tokenizer = pre
    if normalizer:
        tk.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else [f"<0x{b:02X}>" for b in range(256)]
    special = list(special) + ([] if byte_level else alphabet)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, max_token_length=24,
                                  initial_alphabet=alphabet if byte_level else [], limit_alphabet=600)
    tk.train_from_iterator(texts, trainer)
    return tk


def bare(tk):
    """The file as a dict."""
    return json.loads(tk.to_str())


def gpt2(texts):
    tk = train(texts, pre_tokenizers.ByteLevel(add_prefix_space=False), special=["<|endoftext|>"])
    tk.decoder = decoders.ByteLevel()
    tk.post_processor = processors.ByteLevel(trim_offsets=False)
    return bare(tk)


def llama3(texts, pattern=LLAMA3, ignore_merges=True):
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                   pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    special = ["<|begin_of_text|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tk = train(texts, pre, normalizers.NFC(), special=special, ignore_merges=ignore_merges)
    tk.decoder = decoders.ByteLevel()
    tk.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])])
    data = bare(tk)
    # Some words that no merge leads to: only ignore_merges finds them.
    vocab = data["model"]["vocab"]
    for word in ("ĠSchleife", "snake_case_name", "qzxj"):
        vocab.setdefault(word, max(vocab.values()) + 1)
    return data


def digits(texts):
    pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                   pre_tokenizers.ByteLevel(add_prefix_space=True)])
    tk = train(texts, pre, normalizers.NFC(), special=["<s>", "</s>"])
    tk.add_special_tokens([AddedToken("[MASK]", lstrip=True), AddedToken("[BOTH]", lstrip=True, rstrip=True)])
    tk.add_tokens([AddedToken("[WORD]", single_word=True), AddedToken("[LEFT]", lstrip=True, normalized=False),
                   AddedToken("[RIGHT]", rstrip=True), AddedToken("[NORMΏ]", normalized=True),
                   AddedToken("<|im_start|>", normalized=False), AddedToken("<|im", normalized=False),
                   AddedToken("camelCase"), AddedToken("ώ1"), AddedToken("the", single_word=True)])
    tk.decoder = decoders.ByteLevel()
    tk.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    data = bare(tk)
    data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]  # the older form
    return data


def digit_runs(texts):
    pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(False)])
    tk = train(texts, pre, special=["<|endoftext|>"])
    tk.decoder = decoders.ByteLevel()
    return bare(tk)


LLAMA_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])


def sentencepiece(texts):
    """As converted from SentencePiece: no pre-tokenizer, a normalizer that marks blanks, byte fallback."""
    tk = train(texts, pre_tokenizers.Metaspace(), special=["<unk>", "<s>", "</s>"], byte_level=False, size=2500,
               unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tk.decoder = LLAMA_DECODER
    tk.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    data = bare(tk)
    data["pre_tokenizer"] = None
    data["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    # In such files the bytes are tokens of the vocabulary, not added ones.
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    return data


def metaspace(data, scheme, split):
    data = copy.deepcopy(data)
    data["normalizer"] = None
    data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
    vocab = data["model"]["vocab"]
    n = max(vocab.values())
    data["added_tokens"] += [
        {"id": vocab.get("[MASK]", n + 1), "content": "[MASK]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True},
        {"id": vocab.get("<|im_end|>", n + 2), "content": "<|im_end|>", "single_word": False, "lstrip": False, "rstrip": True, "normalized": True,
         "special": False}]
    return data


def no_bytes(data, fuse_unk):
    """Unknown characters become <unk>."""
    data = copy.deepcopy(data)
    data["model"].update(byte_fallback=False, fuse_unk=fuse_unk)
    return data


def some_bytes(data):
    data = copy.deepcopy(data)
    for b in range(0x80, 0xA0):
        del data["model"]["vocab"][f"<0x{b:02X}>"]  # ids with gaps
    return data


def splits(data):
    """Every behavior of Split, straight and inverted, on one vocabulary."""
    patterns = [{"String": " "}, {"Regex": r"[aeiou]+"}, {"Regex": r"\s*"}, {"String": "ab"}, {"Regex": r"(?<=\d)|(?=[A-Z])"}]
    k = 0
    for behavior in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        for invert in (False, True):
            for pattern in (patterns[k % 5], patterns[(k + 2) % 5]):
                out = copy.deepcopy(data)
                out["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert},
                    {"type": "ByteLevel", "add_prefix_space": k % 3 == 0, "trim_offsets": True, "use_regex": k % 2 == 0}]}
                out["normalizer"] = {"type": "Replace", "pattern": {"Regex": r"[\t\r]+"}, "content": "<->"} if k % 4 == 0 else None
                yield f"split {behavior}{' inverted' if invert else ''} {pattern}", out
                k += 1


def make_all(folder):
    """name -> (path, share of strings)"""
    texts = corpus()
    base, spm = gpt2(texts), sentencepiece(texts)
    made = [
        ("gpt2", base, 1), ("llama3", llama3(texts), 1), ("digits", digits(texts), 1), ("sentencepiece", spm, 1),
        ("metaspace first", metaspace(spm, "first", True), 1), ("metaspace always", metaspace(spm, "always", False), 0.3),
        ("metaspace never", metaspace(spm, "never", True), 0.3), ("digit runs", digit_runs(texts), 0.3),
        ("qwen2", llama3(texts, QWEN2, False), 0.5), ("o200k", llama3(texts, O200K), 0.5),
        ("cl100k", llama3(texts, CL100K), 0.5), ("custom", llama3(texts, CUSTOM), 0.5), ("words", llama3(texts, WORDS), 0.5),
        ("unk", no_bytes(spm, False), 0.3), ("unk fused", no_bytes(spm, True), 0.3), ("some bytes", some_bytes(spm), 0.3)]
    made += [(name, data, 0.15) for name, data in splits(base)]
    out = {}
    for i, (name, data, share) in enumerate(made):
        path = folder / f"{i}.json"
        path.write_text(json.dumps(data, ensure_ascii=i % 2 == 0))
        out[name] = (path, share)
    return out
