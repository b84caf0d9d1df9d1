"""INT4 rounding that knows what the matrices are fed with. Rounding to the nearest step treats every input alike; here the
products of the inputs over a sample of text say how much an error in one input counts and how the inputs after it can make up
for it. The steps (row scale times group scale) are chosen first, then the columns are rounded one after the other, and what
each loses is taken from the columns that are still to come (the method known as GPTQ).
"""
import random

import torch

import data
import model

SHRINK = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)      # row scales that are tried, against that of the largest weight
DAMPING = 0.01                        # of the mean of the products' diagonal, added to it
COLUMNS = 64                          # columns that are rounded before the rest hears of it
DEPTHS = (1, 4)                       # the core's inputs are taken at all loops up to the last, the coda's at these
KINDS = ("prose", "story", "prose", "chat", "prose", "puzzles", "prose", "puzzles")        # of the sample's windows, in turn
PUZZLES = ("walk", "walk", "walk", "turn", "logic", "variables", "nest", "hand")
SHARED = (("attn.k", "attn.q"), ("attn.v", "attn.q"), ("mlp.up", "mlp.gate"))       # matrices that have the same input


def sample(builder, prose, windows, length=512, seed=5):
    """[windows, length] ids."""
    r, out = random.Random(seed), []
    for i in range(windows):
        kind, ids = KINDS[i % len(KINDS)], []
        while len(ids) < length:
            if kind == "prose":
                ids += builder.tokenizer.encode(r.choice(prose))[:length] + [data.END]
            elif kind != "puzzles":
                ids += builder.stream(kind, r.randrange(1 << 30), length)[0].tolist()
            else:
                ids += builder.row(r.choice(PUZZLES), data.DEEPEST, r, length=256)[0]
        out.append(ids[:length])
    return torch.tensor(out)


@torch.no_grad()
def input_products(params, config, ids, chunk=8):
    """{name of a matrix: sum of x xᵀ over its inputs x, as rounded activations}"""
    weights, device = model.quantised(params, "int8"), params[model.EMBED].device
    names, products = {id(w): n for n, w in weights.items() if isinstance(w, model.IntegerWeight)}, {}
    shared = {n: n.replace(a, b) for n in weights for a, b in SHARED if a in n}

    def observe(x, w):
        name = names[id(w)]
        if name != model.EMBED and name not in shared:
            rows = (x[0] * x[1]).flatten(0, -2)
            products[name] = products.get(name, 0) + (rows.t() @ rows).double()
    network = model.Network(config, weights, model.rope_table(config, device), True, True)
    model.OBSERVER = observe
    for part in ids.to(device).split(chunk):
        states = network.states(part, DEPTHS[-1], set(DEPTHS))
        for t in DEPTHS:
            network.hidden(states[t])
    model.OBSERVER = None
    return {**products, **{n: products[source] for n, source in shared.items()}}


def steps(w, importance):
    """([out, groups] group scales, [out] scales) with the least error, each input's weighed by its importance."""
    groups, weighed = w.view(len(w), -1, model.GROUP), importance.view(1, -1, model.GROUP)
    peak, best = groups.abs().amax(2).clamp_min(1e-8), None
    for shrink in SHRINK:
        s = peak.amax(1) / 105 * shrink
        least, chosen = torch.full_like(peak, float("inf")), torch.ones_like(peak)
        for g in range(1, 16):
            step = (s * g)[:, None, None]
            error = ((torch.round(groups / step).clamp(-7, 7) * step - groups) ** 2 * weighed).sum(2)
            chosen, least = torch.where(error < least, torch.full_like(chosen, g), chosen), torch.minimum(error, least)
        total = least.sum(1)
        if best is None:
            best = total, chosen, s
        else:
            better = total < best[0]
            best = (torch.where(better, total, best[0]), torch.where(better[:, None], chosen, best[1]),
                    torch.where(better, s, best[2]))
    return best[1:]


def compensated(w, products):
    """What model.int4_weight returns, for a matrix whose inputs have these products."""
    n, h = w.shape[1], products.clone()
    diagonal = torch.diagonal(h)
    diagonal += DAMPING * diagonal.mean() + 1e-12
    g, s = steps(w, diagonal.float())
    order = torch.argsort(diagonal, descending=True)
    step = (s[:, None] * g).repeat_interleave(model.GROUP, 1)[:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h[order][:, order]))
    upper = torch.linalg.cholesky(inverse).t().float()
    rest, rounded = w[:, order].clone(), torch.zeros_like(w)
    for a in range(0, n, COLUMNS):
        b = min(n, a + COLUMNS)
        lost = torch.zeros_like(rest[:, a:b])
        for j in range(a, b):
            q = torch.round(rest[:, j] / step[:, j]).clamp(-7, 7)
            lost[:, j - a] = (rest[:, j] - q * step[:, j]) / upper[j, j]
            rest[:, j:b] -= lost[:, j - a, None] * upper[j, j:b]
            rounded[:, order[j]] = q
        rest[:, b:] -= lost @ upper[a:b, b:]
    # With the integers fixed, the row's best scale.
    v = (rounded * g.repeat_interleave(model.GROUP, 1)).double()
    best = ((w.double() @ h * v).sum(1) / (v @ h * v).sum(1).clamp_min(1e-30)).float()
    return rounded, g, torch.where((best / s - 1).abs() < 0.2, best, s)


@torch.no_grad()
def calibrated(params, config, ids):
    """{name: (integers, group scales, scales)} of all matrices that an INT4 artifact has as INT4."""
    products = input_products(params, config, ids)
    return {name: compensated(w.detach().float(), products[name]) for name, w in params.items()
            if model.quantiser_of(name, w.shape, "int4") is model.as_int4}
