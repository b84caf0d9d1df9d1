"""Muon for the matrices inside the blocks, AdamW for the embedding and the norms; plain code that runs on old PyTorch too."""
import math

import torch

from model import EMBED


def orthogonalise(g, steps=5):
    """Newton-Schulz iteration on a stack [n, rows, columns]: all singular values go to about one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(torch.bfloat16 if g.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        y = x @ x.transpose(-1, -2)
        x = a * x + (b * y + c * y @ y) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Optimiser:
    """Both rules over one dict of parameters. `kind`: "muon" or "adamw" for the matrices."""

    def __init__(self, parameters, kind="muon", matrix_rate=0.02, rate=3e-3, decay=0.1):
        self.p, self.kind, self.decay = parameters, kind, decay
        self.matrix_rate, self.rate, self.steps = matrix_rate, rate, 0
        matrices = [k for k, v in parameters.items() if v.dim() == 2 and k != EMBED and kind == "muon"]
        self.stacks = {}
        for k in matrices:
            self.stacks.setdefault(tuple(parameters[k].shape), []).append(k)
        self.rest = [k for k in parameters if k not in matrices]
        self.state = {k: torch.zeros_like(v) for k, v in parameters.items()}
        self.square = {k: torch.zeros_like(parameters[k]) for k in self.rest}

    @torch.no_grad()
    def step(self, factor):
        """One update; `factor` scales the learning rates (warm-up, decay)."""
        self.steps += 1
        for shape, names in self.stacks.items():
            grads = torch.stack([self.p[k].grad for k in names])
            momentum = torch.stack([self.state[k] for k in names]).mul_(0.95).add_(grads, alpha=0.05)
            update = orthogonalise(grads * 0.05 + momentum * 0.95)
            rate = factor * self.matrix_rate * math.sqrt(max(1.0, shape[0] / shape[1]))
            for i, k in enumerate(names):
                self.state[k].copy_(momentum[i])
                self.p[k].mul_(1 - factor * self.matrix_rate * self.decay).add_(update[i], alpha=-rate)
        b1, b2 = 0.9, 0.95
        c1, c2 = 1 - b1 ** self.steps, 1 - b2 ** self.steps
        names = self.rest
        params, grads = [self.p[k] for k in names], [self.p[k].grad for k in names]
        first, second = [self.state[k] for k in names], [self.square[k] for k in names]
        torch._foreach_mul_(first, b1)
        torch._foreach_add_(first, grads, alpha=1 - b1)
        torch._foreach_mul_(second, b2)
        torch._foreach_addcmul_(second, grads, grads, 1 - b2)
        rate = factor * self.rate
        for k, m, v in zip(names, first, second):
            if self.p[k].dim() == 2:
                self.p[k].mul_(1 - rate * self.decay)
            self.p[k].addcdiv_(m / c1, (v / c2).sqrt().add_(1e-8), value=-rate)

    def dump(self):
        return {"steps": self.steps, "state": self.state, "square": self.square}

    def load(self, d):
        self.steps = d["steps"]
        for mine, theirs in ((self.state, d["state"]), (self.square, d["square"])):
            for k in mine:
                mine[k].copy_(theirs[k])
