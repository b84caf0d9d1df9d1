#!/usr/bin/env python3
"""Trains the demo model.

    python3 train.py --out .data/run --seconds 570 --end 0.6                      # first part of the schedule
    python3 train.py --out .data/run --seconds 400 --begin 0.6 --resume .data/run/checkpoint.pt

The schedule runs over progress 0 … 1; --begin and --end say which part of it this command covers in --seconds. Needs
.data/corpus (corpus.py) and .data/tokenizer.json (tokenizer.py). Leaves checkpoint.pt, half-precision weights, log.jsonl
and loss.svg in --out. --tiny trains a toy-sized model on the CPU.
"""
import argparse
import json
import math
import os
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

import data
import model
import store
import tasks
from optimiser import Optimiser
from tokenizer import SYSTEM, USER, Tokenizer

READOUTS = 5                # depths at which a task row is read out per step
KEPT_WEIGHT = 2.0           # further weight of a role's word that comes back in a story
TAKEN_WEIGHT = 20.0         # weight of the loss that holds down words which other roles of the story have


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default=".data/run")
    p.add_argument("--corpus", default=".data/corpus")
    p.add_argument("--tokenizer", default=".data/tokenizer.json")
    p.add_argument("--pools", help="file that keeps the built data between commands")
    p.add_argument("--seconds", type=float, default=570)
    p.add_argument("--begin", type=float, default=0.0)
    p.add_argument("--end", type=float, default=1.0)
    p.add_argument("--resume", help="checkpoint.pt, a folder of half-precision weights, or an INT8 artifact")
    p.add_argument("--families", default="walk:4,turn:2,logic:2", help="shares of the task rows")
    p.add_argument("--text", default="story:0.46,chat:0.42,prose:0.12", help="shares of the text rows")
    p.add_argument("--log-every", type=int, default=25, help="steps")
    p.add_argument("--warmup", type=int, default=100, help="steps")
    p.add_argument("--optimiser", choices=("muon", "adamw"), default="muon")
    p.add_argument("--matrix-rate", type=float, default=0.02)
    p.add_argument("--rate", type=float, default=3e-3)
    p.add_argument("--text-rows", type=int, default=16)
    p.add_argument("--text-length", type=int, default=1024)
    p.add_argument("--task-rows", type=int, default=128)
    p.add_argument("--task-weight", type=float, default=1.0)
    p.add_argument("--qat", type=float, default=0.88, help="progress from which steps use quantised weights and activations")
    p.add_argument("--int4-share", type=float, default=0.6, help="share of those steps that use INT4; the others use INT8")
    p.add_argument("--scale", type=float, default=1.0, help="amount of data")
    p.add_argument("--processes", type=int, default=os.cpu_count())
    p.add_argument("--row", type=int, default=data.ROW, help="tokens of a task row")
    p.add_argument("--mean-loops", type=float, default=8, help="mean loops of text batches after the ramp")
    p.add_argument("--part-bytes", type=int, default=store.PART_BYTES, help="largest weight file that is written")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tiny", action="store_true")
    return p.parse_args()


class Batches:
    """Draws text windows and task rows from pools that live on the device."""

    def __init__(self, pools, device, r, text_shares):
        self.r, self.device, self.text_shares = r, device, text_shares
        self.pools = {k: tuple(torch.from_numpy(a).to(device) for a in v) for k, v in pools.items()}
        self.starts = {k: (self.pools[k][1] >= data.FIRST).nonzero()[:, 0] for k in text_shares}

    def text(self, rows, length):
        """(inputs, targets, weights, is a row generated?) of windows that begin where a document begins, as a served prompt does."""
        picks = self.r.choices(list(self.text_shares), self.text_shares.values(), k=rows)
        xs, ws, told = [], [], []
        for name in self.text_shares:
            n = picks.count(name)
            if n:
                (ids, weights), starts = self.pools[name], self.starts[name]
                at = starts[torch.tensor([self.r.randrange(len(starts)) for _ in range(n)], device=self.device)]
                at = at.clamp(max=len(ids) - length - 1)[:, None] + torch.arange(length + 1, device=self.device)
                xs.append(ids[at].long())
                ws.append((weights[at[:, 1:]] % data.FIRST).float())
                told += [name != "prose"] * n
        x, w = torch.cat(xs), torch.cat(ws)
        return x[:, :-1].contiguous(), x[:, 1:].contiguous(), w, torch.tensor(told, device=self.device)

    def tasks(self, rows, shares, level_of):
        """The arrays of data.Builder.rows and the family index of each row: mostly at each family's present level, some at others."""
        names, total = list(shares), sum(shares.values())
        counts = [int(rows * shares[n] / total) for n in names]
        counts[0] += rows - sum(counts)
        parts, family = [], []
        for f, (name, n) in enumerate(zip(names, counts)):
            now = level_of[name]
            at_level = n * 3 // 4
            other = self.r.choice(data.LEVELS[:now + 1]) if self.r.random() < 0.7 else self.r.choice(data.LEVELS)
            for level, m in ((data.LEVELS[now], at_level), (other, n - at_level)):
                pool = self.pools[("rows", name, level)]
                i = torch.tensor([self.r.randrange(len(pool[0])) for _ in range(m)], device=self.device, dtype=torch.long)
                parts.append([a[i].long() for a in pool])
            family += [f] * n
        return [torch.cat(a) for a in zip(*parts)] + [torch.tensor(family, device=self.device)]


def text_loss(network_logits, targets, weights):
    z = torch.logsumexp(network_logits, -1)
    loss = z - network_logits.gather(-1, targets[..., None])[..., 0]
    return ((loss + 1e-4 * z * z) * weights).sum() / weights.sum().clamp_min(1)


class Roles:
    """A further loss on the words of stories that play a role. A generated story gives two roles two words, but a model that
    sees only the next word learns this slowly: among sixty names the one that is taken hardly counts. So where a word is new
    in its story, the probability of all words of its kind that the story holds already is pushed to zero; a word that comes
    back gets a larger weight. Questions (where any word may come) are left out."""

    def __init__(self, tokenizer_path, vocabulary, device):
        canonical, kind = data.role_words(Tokenizer(tokenizer_path))
        self.canonical, self.kind = (torch.zeros(vocabulary, dtype=torch.long, device=device) for _ in range(2))
        for table, entries in ((self.canonical, canonical), (self.kind, kind)):
            for token, value in entries.items():
                table[token] = value

    def loss(self, logits, x, y, told):
        """Sum over the role words among the targets y[rows, tokens] of the windows x that are told[rows]."""
        position = torch.arange(x.shape[1], device=x.device).expand_as(x)
        special = (x <= SYSTEM).long()
        turn, opened = special.cumsum(1), x.gather(1, (position * special).cummax(1)[0])
        row, at = (told[:, None] & (self.canonical[y] > 0) & (opened != USER)).nonzero(as_tuple=True)
        word, here = self.canonical[y[row, at]][:, None], self.canonical[x[row]]
        earlier = (turn[row] == turn[row, at][:, None]) & (position[row] <= at[:, None])
        kept = (earlier & (here == word)).any(1)
        taken = earlier & (self.kind[here] == self.kind[word])
        z = logits[row, at].log_softmax(-1)
        held = torch.zeros_like(z).scatter_add_(1, here, taken.to(z.dtype)) > 0
        share = (z.exp() * held).sum(1).clamp(max=0.99)
        again = -z.gather(1, y[row, at][:, None])[:, 0]
        return torch.where(kept, KEPT_WEIGHT * again, -TAKEN_WEIGHT * torch.log1p(-share)).sum()


def sample_loops(r, mean):
    """Mostly log-normal Poisson around the mean; a quarter of the batches shallow, so that few loops stay usable."""
    if r.random() < 0.25:
        return r.randint(1, 4)
    rate = math.exp(r.gauss(math.log(mean) - 0.125, 0.5))
    return min(tasks.MAX_STEPS, 1 + int(np.random.poisson(rate)))


def task_loss(network, batch, top, r):
    """Staircase rule: after loop t the answer position says the answer after min(t, k) steps, then the end token. The last
    token of operation j says the value after it from loop j on, and the end token before ("not known yet")."""
    x, p, k, y, mark, number, value, _ = batch
    loops = min(tasks.MAX_STEPS, max(READOUTS + 1, top + 2) + r.randint(0, 6))
    wanted = {loops, r.randint(top + 1, loops - 1), r.randint(1, 2), r.randint(1, 4)}
    while len(wanted) < READOUTS:
        wanted.add(r.randint(1, loops - 1))
    wanted = sorted(wanted)
    states = network.states(x, loops, wanted)
    hidden = network.hidden(torch.cat([states[t] for t in wanted])).view(READOUTS, len(x), x.shape[1], -1)
    row = torch.arange(len(x), device=x.device)[:, None]
    z = network.logits(torch.cat([hidden[:, row, p], hidden[:, row, p + 1], hidden[:, row, mark]], 2))
    steps = torch.stack([y.gather(2, (k.clamp(1, t) - 1)[..., None])[..., 0] for t in wanted])
    known = torch.stack([torch.where(number <= t, value, torch.zeros_like(value)) for t in wanted])
    target = torch.cat([steps, torch.zeros_like(steps), known], 2)
    asked, marked = (k > 0).float(), (number > 0).float()
    answered = asked * (x.gather(1, p + 1) != USER)
    weight = torch.cat([asked, 0.3 * answered, 0.5 * marked * asked.sum() / marked.sum().clamp_min(1)], 1).expand_as(target)
    loss = F.cross_entropy(z.flatten(0, 2), target.flatten(), reduction="none").view(target.shape)
    right = z[-1, :, :k.shape[1]].argmax(-1) == steps[-1]
    return (loss * weight).sum() / (asked.sum() * READOUTS), right


def parse_shares(text):
    return {name: float(share) for name, share in (e.split(":") for e in text.split(","))}


def rate_factor(progress, step, warmup):
    """Warm-up, constant to progress 0.45, then a cosine down to 3 %."""
    warm = min(1.0, (step + 1) / warmup)
    fall = min(1.0, max(0.0, (progress - 0.45) / 0.55))
    return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * fall)))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.device = "cpu" if args.tiny or not torch.cuda.is_available() else "cuda"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.config = model.Config()
        if args.tiny:
            self.config = model.Config(hidden=64, mlp=128, heads=2, kv_heads=1, head_dim=32, prelude=1, core=2, coda=1,
                                       max_positions=512)
        self.shares = parse_shares(args.families)
        torch.manual_seed(args.seed)
        np.random.seed(args.seed)
        self.r = random.Random(args.seed)
        self.level = {f: 0 for f in self.shares}
        self.step, self.advances, self.history = 0, [], []
        self.params = model.init_parameters(self.config, args.seed, self.device)
        self.optimiser = Optimiser(self.params, args.optimiser, args.matrix_rate, args.rate)
        self.resume()
        self.rope = model.rope_table(self.config, self.device)
        self.roles = Roles(args.tokenizer, self.config.vocab, self.device)
        self.block, self.fake, self.text_loss = model.block, {}, text_loss
        if self.device == "cuda":
            torch._dynamo.config.cache_size_limit = 64
            self.block = torch.compile(model.block, dynamic=False)
            self.text_loss = torch.compile(text_loss, dynamic=False)
            self.fake = {q: torch.compile(q, dynamic=False) for q in (model.as_int8, model.as_int4)}
        self.reset_counts()

    def resume(self):
        path = self.args.resume
        if not path:
            return
        if os.path.exists(os.path.join(path, "config.json")):
            loaded, saved = store.load_artifact(path, self.device)[0], {"level": {f: len(data.LEVELS) - 1 for f in tasks.SERIAL}}
        elif os.path.isdir(path):
            loaded, _, settings = store.load_shards(path, self.device)
            saved = settings.get("progress", {})
        else:
            saved = torch.load(path, map_location=self.device)
            loaded = saved["params"]
            self.optimiser.load(saved["optimiser"])
        with torch.no_grad():
            for k in self.params:
                self.params[k].copy_(loaded[k])
        self.level.update({k: v for k, v in saved.get("level", {}).items() if k in self.level})
        self.step, self.advances, self.history = saved.get("step", 0), saved.get("advances", []), saved.get("history", [])
        self.r.seed(self.args.seed + self.step)

    def progress_state(self):
        return {"level": self.level, "step": self.step, "advances": self.advances, "history": self.history}

    def save(self):
        store.save_checkpoint(os.path.join(self.args.out, "checkpoint.pt"), {
            "params": {k: v.detach() for k, v in self.params.items()}, "optimiser": self.optimiser.dump(), **self.progress_state()})
        store.save_shards(self.params, self.config, os.path.join(self.args.out, "weights"),
                          {"progress": {k: v for k, v in self.progress_state().items() if k != "history"}},
                          self.args.part_bytes)

    def reset_counts(self):
        self.hits = torch.zeros(len(self.shares), 17, device=self.device)
        self.asked = torch.zeros(len(self.shares), 17, device=self.device)

    def network(self, progress):
        if progress < self.args.qat:
            return model.Network(self.config, self.params, self.rope, False, False, self.dtype, self.block)
        mode = "int4" if self.r.random() < self.args.int4_share else "int8"
        return model.Network(self.config, model.straight_through(self.params, mode, self.fake), self.rope, True, False, self.dtype,
                             self.block)

    def one_step(self, batches, progress):
        """(text loss, task loss) as tensors; None for both where the gradient was not finite."""
        a, network = self.args, self.network(progress)
        x, y, w, told = batches.text(a.text_rows, a.text_length)
        loops = sample_loops(self.r, 2 + (a.mean_loops - 2) * min(1, progress / 0.4))
        state = network.states(x, loops, {loops}, free=max(0, loops - 8))[loops]
        logits = network.logits(network.hidden(state))
        text, role = self.text_loss(logits, y, w), self.roles.loss(logits, x, y, told) / w.sum().clamp_min(1)
        batch = batches.tasks(a.task_rows, self.shares, self.level)
        top = data.LEVELS[max(self.level.values())]
        task, right = task_loss(network, batch, top, self.r)
        (text + role + a.task_weight * task).backward()
        self.tokens += x.numel() + batch[0].numel()
        family, k = batch[-1][:, None].expand_as(batch[2]), batch[2]
        index = (family * 17 + k).flatten()
        self.asked.view(-1).index_add_(0, index, torch.ones_like(index, dtype=torch.float))
        self.hits.view(-1).index_add_(0, index, right.flatten().float())
        rest = [self.params[n].grad for n in self.optimiser.rest]
        norm = torch.stack([g.norm() for g in rest]).norm()
        if not torch.isfinite(norm):
            self.bad += 1
        else:
            for g in rest:
                g.mul_((1.0 / norm).clamp(max=1.0))
            self.optimiser.step(rate_factor(progress, self.optimiser.steps, a.warmup))
        for v in self.params.values():
            v.grad = None
        self.step += 1
        return text.detach(), task.detach()

    def accuracies(self):
        """{family: [accuracy at k = 1 … 8, None where not asked]}"""
        hits, asked = self.hits.tolist(), self.asked.tolist()
        return {f: [round(h / n, 3) if n else None for h, n in zip(hits[i][1:9], asked[i][1:9])] for i, f in enumerate(self.shares)}

    def advance(self, accuracy, seconds):
        """A family goes to its next difficulty when it answers the present one, never by the clock."""
        for family in self.shares:
            now = self.level[family]
            top = accuracy[family][data.LEVELS[now] - 1]
            if top is not None and top > 0.85 and now + 1 < len(data.LEVELS):
                self.level[family] += 1
                self.advances.append([family, data.LEVELS[now + 1], self.step, round(seconds)])

    def run(self, batches):
        a, start = self.args, time.time()
        self.tokens, self.bad, sums, shown, saved, last = 0, 0, [0.0, 0.0], self.step, start, start
        log = open(os.path.join(a.out, "log.jsonl"), "a")
        while time.time() - start < a.seconds:
            elapsed = time.time() - start
            progress = a.begin + (a.end - a.begin) * elapsed / a.seconds
            for i, loss in enumerate(self.one_step(batches, progress)):
                sums[i] = sums[i] + loss
            if self.step % a.log_every == 0:
                now, n = time.time(), self.step - shown
                accuracy = self.accuracies()
                entry = {"step": self.step, "text": round(float(sums[0]) / n, 4), "task": round(float(sums[1]) / n, 4),
                         "seconds": round(now - start, 1), "tok_s": round(self.tokens / (now - last)), "bad": self.bad,
                         "level": {f: data.LEVELS[v] for f, v in self.level.items()}}
                self.history.append(entry)
                self.advance(accuracy, now - start)
                log.write(json.dumps({**entry, "accuracy": accuracy}) + "\n")
                log.flush()
                self.show(entry, accuracy, elapsed / a.seconds)
                self.reset_counts()
                self.tokens, sums, shown, last = 0, [0.0, 0.0], self.step, now
            if time.time() - saved > 120:
                self.save()
                saved = time.time()
        self.save()
        if self.history:
            store.loss_plot(os.path.join(a.out, "loss.svg"), self.history)

    def show(self, entry, accuracy, done):
        bar = "#" * int(20 * done) + "-" * (20 - int(20 * done))
        line = (f"[{bar}] {entry['seconds']:5.0f} s step {entry['step']:5d} text {entry['text']:.3f} task {entry['task']:.3f} "
                f"{entry['tok_s'] / 1000:.0f}k tok/s K {entry['level']}")
        if sys.stdout.isatty():
            print("\r" + line, end="", flush=True)
        elif entry["step"] % (4 * self.args.log_every) == 0:
            print(line, {f: [round(100 * v) if v is not None else "-" for v in a] for f, a in accuracy.items()}, flush=True)


def main():
    args = arguments()
    data.ROW = args.row
    os.makedirs(args.out, exist_ok=True)
    start = time.time()
    families = list(parse_shares(args.families))
    if args.pools and os.path.exists(args.pools):
        pools = torch.load(args.pools, weights_only=False)
    else:
        pools = data.build(args.tokenizer, args.corpus, families, args.scale, args.processes, args.seed)
        if args.pools:
            torch.save(pools, args.pools)
    print({str(k): len(v[0]) for k, v in pools.items()}, f"built in {time.time() - start:.0f} s", flush=True)
    trainer = Trainer(args)
    print(sum(v.numel() for v in trainer.params.values()), "parameters on", trainer.device, flush=True)
    trainer.run(Batches(pools, trainer.device, trainer.r, parse_shares(args.text)))
    peak = torch.cuda.max_memory_allocated() / 1e9 if trainer.device == "cuda" else 0
    print(f"\n{trainer.step} steps, {trainer.bad} skipped, peak {peak:.1f} GB, advances {trainer.advances}", flush=True)


if __name__ == "__main__":
    main()
