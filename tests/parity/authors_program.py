"""An oracle for the `reference` preset: the authors' forward pass, written naively from the method's description.

Plain functions over a checkpoint in the authors' own names; nothing of ramatch is used. Everything that could be
shared, cut short or fused is written out instead: text is padded to the full context with an explicit causal mask, the
teacher is a second tower, attention is spelled out, Sinkhorn is the plain loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

LAMBDA1, LAMBDA2 = 0.1, 0.05


@dataclass(frozen=True)
class Sizes:
    """Of a checkpoint: towers, and what was learned."""

    width: int = 128
    text_width: int = 64
    dim: int = 64
    layers: int = 4
    text_layers: int = 4
    patch: int = 16
    side: int = 4
    context: int = 77
    vocab: int = 49408
    adapted: int = 2
    prompted: int = 2
    visual_prompts: int = 8
    prompts: int = 4
    kernel: int = 3


def make_checkpoint(*, seed=0, tau_loc=2e-3, **sizes):
    """A random checkpoint of `Sizes`, teacher included, at scales where every part matters to the result."""
    size = Sizes(**sizes)
    width, text_width, dim, layers, text_layers = size.width, size.text_width, size.dim, size.layers, size.text_layers
    g = torch.Generator().manual_seed(seed)

    def r(*shape, std=0.02):
        return torch.randn(*shape, generator=g) * std

    def norm(name, n):
        return {f"{name}.weight": 1 + r(n, std=0.2), f"{name}.bias": r(n, std=0.1)}

    def block(name, w, qkv):
        out = norm(f"{name}.ln_1", w) | norm(f"{name}.ln_2", w)
        layers = {
            f"attn.{qkv}": (3 * w, w),
            "attn.out_proj.": (w, w),
            "mlp.c_fc.": (4 * w, w),
            "mlp.c_proj.": (w, 4 * w),
        }
        for layer, (rows, columns) in layers.items():
            out[f"{name}.{layer}weight"] = r(rows, columns, std=columns**-0.5)
            out[f"{name}.{layer}bias"] = r(rows, std=0.1)
        return out

    clip = {
        "visual.conv1.weight": r(width, 3, size.patch, size.patch, std=0.05),
        "visual.class_embedding": r(width, std=0.5),
        "visual.positional_embedding": r(1 + size.side * size.side, width, std=0.5),
        **norm("visual.ln_pre", width),
        **norm("visual.ln_post", width),
        "visual.proj": r(width, dim, std=width**-0.5),
        "token_embedding.weight": r(size.vocab, text_width, std=0.5),
        "positional_embedding": r(size.context, text_width, std=0.1),
        **norm("ln_final", text_width),
        "text_projection": r(text_width, dim, std=text_width**-0.5),
        "logit_scale": torch.tensor(3.0),
    }
    for i in range(layers):
        clip |= block(f"visual.transformer.resblocks.{i}", width, "qkv.")
    for i in range(text_layers):
        clip |= block(f"transformer.resblocks.{i}", text_width, "in_proj_")
    out = {f"clip_model_teacher.{k}": v.clone() for k, v in clip.items()}
    for i in range(layers - size.adapted, layers):
        b, a = f"visual.transformer.resblocks.{i}", f"visual.transformer.resblocks.{i}.conv_adapter"
        clip[f"{b}.adapt_embeds"] = r(size.visual_prompts, width, std=0.7)
        for n, k in ((1, 1), (2, 3)):
            clip[f"{a}.conv_adapter_layers{n}.0.weight"] = r(dim, width, k, k, std=(width * k * k) ** -0.5)
            clip |= norm(f"{a}.conv_adapter_layers{n}.1", dim)
            clip[f"{a}.conv_adapter_layers{n}.1.running_mean"] = r(dim, std=0.3)
            clip[f"{a}.conv_adapter_layers{n}.1.running_var"] = 1 + r(dim, std=0.3).abs()
            clip[f"{a}.conv_adapter_layers{n}.1.num_batches_tracked"] = torch.tensor(7)
        clip[f"{a}.conv_adapter_layers.weight"] = r(2, 2, size.kernel, size.kernel, std=0.6)
        clip[f"{a}.conv_adapter_final.weight"] = r(width, dim, 1, 1, std=2 * dim**-0.5)
        for n in ("q1", "q2", "kv"):
            clip |= norm(f"{a}.adapter_norm_{n}", dim)
    for i in range(text_layers - size.prompted, text_layers):
        clip[f"transformer.resblocks.{i}.deep_embeds"] = r(size.prompts, text_width, std=0.7)
    out |= {f"clip_model.{k}": v for k, v in clip.items()}
    out["temperature"], out["temperature_loc"] = torch.tensor(0.05), torch.tensor(tau_loc)
    return out


LEARNED = ("adapt_embeds", "conv_adapter", "adapter_norm", "deep_embeds", "temperature")


def learned(sd):
    """Names of the tensors that training changes (running statistics are not among them)."""
    return [k for k in sd if any(part in k for part in LEARNED) and "running" not in k and "num_batches" not in k]


def _norm(sd, name, x):
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + 1e-5) * sd[f"{name}.weight"] + sd[f"{name}.bias"]


def _linear(sd, name, x):
    return x @ sd[f"{name}.weight"].T + sd[f"{name}.bias"]


def _heads(x):
    b, t, w = x.shape
    return x.reshape(b, t, w // 64, 64).permute(0, 2, 1, 3)


def _unheads(x):
    b, h, t, d = x.shape
    return x.permute(0, 2, 1, 3).reshape(b, t, h * d)


def _softmax_attention(q, k, v, mask=None):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1) @ v


def _mlp(sd, name, x):
    y = _linear(sd, f"{name}.mlp.c_fc", x)
    return _linear(sd, f"{name}.mlp.c_proj", y * torch.sigmoid(1.702 * y))


def _split_qkv(sd, name, x):
    y = _linear(sd, f"{name}.attn.qkv", _norm(sd, f"{name}.ln_1", x))
    w = y.shape[-1] // 3
    return y[..., :w], y[..., w : 2 * w], y[..., 2 * w :]


def _batch_norm(sd, name, x, train):
    if train:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    else:
        mean, var = sd[f"{name}.running_mean"], sd[f"{name}.running_var"]
    x = (x - mean[:, None, None]) / torch.sqrt(var[:, None, None] + 1e-5)
    return x * sd[f"{name}.weight"][:, None, None] + sd[f"{name}.bias"][:, None, None]


def _tss(sd, a, patches, side, labels, train):
    """Text-guided spatial selection on patches (B, M, W) → (B, M, W)."""
    b, _, w = patches.shape
    image = patches.reshape(b, side, side, w).permute(0, 3, 1, 2)
    keys = _norm(sd, f"{a}.adapter_norm_kv", labels)
    streams = []
    for n in (1, 2):
        kernel = sd[f"{a}.conv_adapter_layers{n}.0.weight"]
        y = F.conv2d(image, kernel, padding=kernel.shape[-1] // 2)
        y = F.gelu(_batch_norm(sd, f"{a}.conv_adapter_layers{n}.1", y, train))
        flat = y.reshape(b, y.shape[1], side * side).permute(0, 2, 1)
        query = _norm(sd, f"{a}.adapter_norm_q{n}", flat)
        weights = torch.softmax(query @ keys.T * keys.shape[-1] ** -0.5, dim=-1)
        streams.append(flat + weights @ keys)
    both = torch.cat(streams, dim=-1)
    maps = torch.stack([both.mean(-1), both.max(-1).values], dim=1).reshape(b, 2, side, side)
    kernel = sd[f"{a}.conv_adapter_layers.weight"]
    masks = torch.sigmoid(F.conv2d(maps, kernel, padding=kernel.shape[-1] // 2)).reshape(b, 2, side * side)
    chosen = streams[0] * masks[:, 0, :, None] + streams[1] * masks[:, 1, :, None]
    return chosen @ sd[f"{a}.conv_adapter_final.weight"][:, :, 0, 0].T


def vision(sd, prefix, pixels, labels, train):
    """Global (B, D) and regions (B, M, D). Blocks without adapters only have SAA, so the teacher runs here too."""
    p = f"{prefix}visual."
    kernel = sd[f"{p}conv1.weight"]
    x = F.conv2d(pixels, kernel, stride=kernel.shape[-1])
    b, w, side, _ = x.shape
    x = x.reshape(b, w, side * side).permute(0, 2, 1)
    x = torch.cat([sd[f"{p}class_embedding"].expand(b, 1, w), x], dim=1) + sd[f"{p}positional_embedding"]
    x = _norm(sd, f"{p}ln_pre", x)
    local = x
    i = 0
    while f"{p}transformer.resblocks.{i}.ln_1.weight" in sd:
        name = f"{p}transformer.resblocks.{i}"
        _, _, v = _split_qkv(sd, name, x)
        v = _heads(v)
        saa = _linear(sd, f"{name}.attn.out_proj", _unheads(_softmax_attention(v, v, v)))
        tokens = x
        if f"{name}.adapt_embeds" in sd:
            tokens = torch.cat([x, sd[f"{name}.adapt_embeds"].expand(b, -1, -1)], dim=1)
        q, k, v = (_heads(t) for t in _split_qkv(sd, name, tokens))
        y = tokens + _linear(sd, f"{name}.attn.out_proj", _unheads(_softmax_attention(q, k, v)))
        y = y + _mlp(sd, name, _norm(sd, f"{name}.ln_2", y))
        x = y[:, : x.shape[1]]
        local = local + saa
        if f"{name}.conv_adapter.conv_adapter_final.weight" in sd:
            found = _tss(sd, f"{name}.conv_adapter", x[:, 1:], side, labels, train)
            local = torch.cat([local[:, :1], local[:, 1:] + found], dim=1)
        i += 1
    head = sd[f"{p}proj"]
    image = _norm(sd, f"{p}ln_post", x[:, 0]) @ head
    return image, _norm(sd, f"{p}ln_post", local[:, 1:]) @ head


def text(sd, prefix, ids):
    """Label features (N, D) for ids (N, context), padded with zeros; the end token has the highest id."""
    x = sd[f"{prefix}token_embedding.weight"][ids] + sd[f"{prefix}positional_embedding"]
    i = 0
    while f"{prefix}transformer.resblocks.{i}.ln_1.weight" in sd:
        name = f"{prefix}transformer.resblocks.{i}"
        deep, r = f"{name}.deep_embeds", 0
        if deep in sd:
            r = len(sd[deep])
            x = torch.cat([x[:, :1], sd[deep].expand(len(x), -1, -1), x[:, 1:]], dim=1)
        t = x.shape[1]
        mask = torch.full((t, t), float("-inf")).triu(1)
        y = _norm(sd, f"{name}.ln_1", x) @ sd[f"{name}.attn.in_proj_weight"].T + sd[f"{name}.attn.in_proj_bias"]
        q, k, v = (_heads(part) for part in y.chunk(3, dim=-1))
        x = x + _linear(sd, f"{name}.attn.out_proj", _unheads(_softmax_attention(q, k, v, mask)))
        x = x + _mlp(sd, name, _norm(sd, f"{name}.ln_2", x))
        if r:
            x = torch.cat([x[:, :1], x[:, 1 + r :]], dim=1)
        i += 1
    x = _norm(sd, f"{prefix}ln_final", x)
    return x[torch.arange(len(x)), ids.argmax(-1)] @ sd[f"{prefix}text_projection"]


def _unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def sinkhorn(cost, u, v, eps, iterations=100, threshold=1e-3):
    """Plain scaling loop; the batch goes on until in every image the mean change of the row scaling is below the
    threshold."""
    kernel = torch.exp(-cost / eps)
    r, c = torch.ones_like(u), torch.ones_like(v)
    for _ in range(iterations):
        before = r
        r = u / torch.einsum("bmn,bn->bm", kernel, c)
        c = v / torch.einsum("bmn,bm->bn", kernel, r)
        if all(change.mean() < threshold for change in (r - before).abs()):
            break
    return r[:, :, None] * kernel * c[:, None, :]


def forward(sd, pixels, ids, targets=None, train=False):
    """Everything the tests compare: features, plan, scores, and the loss where there are targets."""
    scale = sd["clip_model.logit_scale"].exp()
    raw = text(sd, "clip_model.", ids)
    image, regions = vision(sd, "clip_model.", pixels, raw, train)
    labels = _unit(raw)
    sim = torch.einsum("bmd,nd->bmn", _unit(regions), labels)
    score_global = _unit(image) @ labels.T
    with torch.no_grad():
        cost, eps = 1 - torch.softmax(sim * scale, dim=-1), LAMBDA1
        u = torch.softmax(sim.max(-1).values / 0.1, dim=-1)
        v = torch.full((len(sim), sim.shape[-1]), 1 / sim.shape[-1])
        if targets is not None:
            guide_labels = _unit(text(sd, "clip_model_teacher.", ids))
            _, guide = vision(sd, "clip_model_teacher.", pixels, None, False)
            teacher = torch.softmax(torch.einsum("bmd,nd->bmn", _unit(guide), guide_labels) * scale, dim=-1)
            teacher = torch.softmax(teacher * 20, dim=1)
            absent = (targets == 0)[:, None, :].expand_as(teacher)
            teacher = teacher.masked_fill(absent, teacher.min().item())
            cost, eps = cost - LAMBDA2 * teacher.log(), LAMBDA1 + LAMBDA2
        plan = sinkhorn(cost, u, v, eps)
    score_region = (plan * sim).sum(1)
    logits_global, logits_region = score_global / sd["temperature"], score_region / sd["temperature_loc"]
    score = (torch.softmax(logits_global, -1) + torch.softmax(logits_region, -1)) / 2
    out = {"labels": raw, "image": image, "regions": regions, "sim": sim, "u": u, "plan": plan, "score": score}
    out |= {"s_G": score_global, "s_R": score_region}
    if targets is not None:
        out["loss"] = mmc(logits_region, targets) + mmc(logits_global, targets)
    return out


def mmc(logits, targets):
    """Every positive pair against all pairs of the batch."""
    everything = torch.log(torch.exp(logits - logits.max()).sum()) + logits.max()
    terms = [everything - logits[b, i] for b, i in (targets > 0).nonzero().tolist()]
    return torch.stack(terms).sum() / len(terms)
