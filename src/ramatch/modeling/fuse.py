"""A copy of a RAM for recognizing: everything that is constant at test time is multiplied into the weights beforehand.

The copy is a RAM like any other and runs the same pass; only its modules are simpler. All of it is exact algebra, done
in float32 or better before the last rounding: pixel normalization into the patch embedding (so it takes uint8 images),
LayerScale into output projections, BatchNorm into the convolutions of TSS, its weight beside SAA into its way back.

Half precision: the tower runs in its own type, bfloat16 say; TSS and similarities, whose values norms keep in bounds,
in float16, which is eight times finer; the global feature, matching and scores in float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .backbone import Backbone
from .ram import RAM, Stream

CENTER = 128.0  # taken off uint8 pixels


@torch.no_grad()
def fuse(ram: RAM, dtype: torch.dtype | None = None) -> RAM:
    """A fused copy, with the tower in `dtype` (by default its own). Weights that need no folding are shared, not
    copied, if the type is theirs. It has no text tower: labels are encoded by the original. A model that is RAM in its
    interface only stays as it is."""
    if not ram.foldable:
        return ram
    own, device = ram.backbone, ram.backbone.device
    dtype = dtype or own.dtype
    fine = torch.float16 if device.type == "cuda" and dtype == torch.bfloat16 else dtype
    shape = replace(own.vision.config, layer_scale=False, patch_bias=True)
    with torch.device("meta"):  # no weights yet
        options = {name: getattr(own, name) for name in ("logit_scale", "global_pool", "name")}
        copy = RAM(Backbone(shape, None, own.dim, own.preprocess, **options), ram.config, fused=True)
    state = _adapters(ram) | _without_layer_scale(own) | _without_normalization(ram)
    exact = ("backbone.vision.norm.", "backbone.vision.pool.", "backbone.visual_projection.", "tau_")  # cast where used
    kinds = {"backbone.vision.": dtype, "region_set.visual_prompts": dtype, "region_set.": fine}
    for name, value in state.items():
        kind = next((kind for prefix, kind in kinds.items() if name.startswith(prefix)), torch.float32)
        learned = not name.startswith("backbone.")  # training changes it in place
        state[name] = value.to(torch.float32 if name.startswith(exact) else kind, copy=learned)
    copy.load_state_dict(state, assign=True)
    copy.backbone.vision.offset, copy.region_set.tss_weight, copy.workspace_mb = CENTER, 1.0, ram.workspace_mb
    if dtype in (torch.bfloat16, torch.float16):
        copy.region_set.region_dtype = fine
    return copy.requires_grad_(False).eval()


def _without_normalization(ram: RAM) -> dict[str, Tensor]:
    """Patch embedding of centered uint8 pixels: conv((x − mean) / std) = W' (x − 128) + b'."""
    patch, preprocess = ram.backbone.vision.patch, ram.preprocess
    weight = patch.weight.double()
    mean, std = (255 * weight.new_tensor(v).view(1, 3, 1, 1) for v in (preprocess.mean, preprocess.std))
    bias = (weight * ((CENTER - mean) / std)).sum((1, 2, 3))
    bias = bias if patch.bias is None else bias + patch.bias.double()
    return {"backbone.vision.patch.weight": weight / std, "backbone.vision.patch.bias": bias}


def _without_layer_scale(backbone: Backbone) -> dict[str, Tensor]:
    """The vision tower and its projection, with LayerScale's factors in the layers before them."""
    kept = ("vision.", "visual_projection.")
    state = {f"backbone.{k}": v for k, v in backbone.state_dict().items() if k.startswith(kept)}
    for name in [k for k in state if k.endswith((".scale1", ".scale2"))]:
        block, scale = name.rsplit(".", 1)
        gain, linear = state.pop(name).float(), f"{block}.{'out' if scale == 'scale1' else 'fc2'}"
        state[f"{linear}.weight"] = state[f"{linear}.weight"].float() * gain[:, None]
        state[f"{linear}.bias"] = state[f"{linear}.bias"].float() * gain
    return state


def _adapters(ram: RAM) -> dict[str, Tensor]:
    """The adapters but label prompts, with BatchNorm in the convolutions before it and TSS's weight in its way back."""
    state = {k: v for k, v in ram.adapters().items() if not k.startswith("label_set.")}
    for name, stream in ram.region_set.named_modules(prefix="region_set"):
        if not isinstance(stream, Stream):
            continue
        mean, var, weight, bias = (
            state.pop(f"{name}.1.{k}").float() for k in ("running_mean", "running_var", "weight", "bias")
        )
        state.pop(f"{name}.1.num_batches_tracked")
        gain = weight * (var + stream[1].eps).rsqrt()  # type: ignore[operator]
        folded = state[f"{name}.0.weight"].float() * gain.view(-1, 1, 1, 1)
        state[f"{name}.0.weight"] = folded.contiguous(memory_format=torch.channels_last)
        state[f"{name}.0.bias"] = bias - mean * gain
    for name in [k for k in state if k.endswith(".back.weight")]:
        state[name] = state[name].float() * ram.region_set.tss_weight
    return state | {"label_set.prompts": torch.zeros(0, 0, 0, device=ram.backbone.device)}
