"""Importing a checkpoint of the authors' program: their names → a RAM with the `reference` preset.

A checkpoint holds the student under `clip_model.` (frozen towers in OpenAI's names, adapters inside the last blocks), a
frozen copy under `clip_model_teacher.`, and two temperatures. Layer counts, prompt counts and the mask's kernel are
read off the tensors; what a checkpoint does not tell (lambda1, lambda2, ...) comes from the preset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from ...config import preset
from ...errors import RamatchError
from ..ram import RAM
from .files import read_tensors, take
from .folder import load_adapters, save_ram
from .openai import from_state_dict

STUDENT, TEACHER = "clip_model.", "clip_model_teacher."
VISION_BLOCK, TEXT_BLOCK = "visual.transformer.resblocks.{}.", "transformer.resblocks.{}."
# our part of a TSS ← its part in an adapted block; q1 and the first stream belong to the 1×1 convolution
TSS_PARTS = {
    "point.0": "conv_adapter_layers1.0",
    "point.1": "conv_adapter_layers1.1",
    "area.0": "conv_adapter_layers2.0",
    "area.1": "conv_adapter_layers2.1",
    "norm_point": "adapter_norm_q1",
    "norm_area": "adapter_norm_q2",
    "norm_labels": "adapter_norm_kv",
    "mask": "conv_adapter_layers",
    "back": "conv_adapter_final",
}
TOP = ("temperature", "temperature_loc")
KNOWN = re.compile(  # every name of the student that is read, or is safe to leave out
    r"(visual\.)?transformer\.resblocks\.\d+\.("
    r"(ln_[12]|mlp\.c_fc|mlp\.c_proj|attn\.qkv|attn\.out_proj)\.(weight|bias)|attn\.in_proj_(weight|bias)|adapt_embeds|deep_embeds|"
    r"(conv_adapter\.)?(conv_adapter_layers[12]\.(0\.weight|1\.\w+)|conv_adapter_(layers|final)\.weight|adapter_norm_(q1|q2|kv)\.(weight|bias)))"
    r"|visual\.(conv1\.weight|class_embedding|positional_embedding|proj|ln_(pre|post)\.(weight|bias))"
    r"|token_embedding\.weight|positional_embedding|ln_final\.(weight|bias)|text_projection|logit_scale"
    r"|input_resolution|context_length|vocab_size"
)


def import_authors(checkpoint: str | Path, out: str | Path, *, templates: Sequence[str] | None = None) -> list[str]:
    """Turn a checkpoint of the authors' program into a model folder that stands alone; returns notes for the user.

    `templates` are the sentences the model was trained with ("A photo of a {}." unless given).
    """
    checkpoint = Path(checkpoint)
    if not checkpoint.is_file():
        raise RamatchError(f"no such checkpoint: {checkpoint}")
    tensors = read_tensors(checkpoint)
    ram = ram_from_authors(tensors, templates=templates, name=checkpoint.name)
    save_ram(ram, out, with_backbone=True)
    return _notes(tensors, ram)


def ram_from_authors(
    tensors: Mapping[str, Tensor], *, templates: Sequence[str] | None = None, name: str = "authors' checkpoint"
) -> RAM:
    """The tensors of a checkpoint → RAM in eval mode. `name` appears in errors and as the backbone's name."""
    student = take(tensors, STUDENT)
    if not student:
        raise RamatchError(
            f"{name}: no tensor starts with '{STUDENT}', so this is not a checkpoint of the authors' program "
            "(a bare CLIP state dict can be given as the backbone itself)"
        )
    # OpenAI's weights, which the program starts from, were trained with QuickGELU
    backbone = from_state_dict(dict(student), name=name, act="quick_gelu")
    vision = _Blocks(student, VISION_BLOCK, len(backbone.vision.blocks), "vision", name)
    adapted = vision.last({"adapt_embeds", *(f"{part}.weight" for part in TSS_PARTS.values())})
    changes: dict[str, object] = {"adapted_layers": len(adapted), "prompts": "none", "prompt_layers": 0}
    state: dict[str, Tensor] = {}

    changes["visual_prompts"], tokens = vision.tokens(adapted, "adapt_embeds", backbone.vision.config.width)
    state["region_set.visual_prompts"] = tokens
    changes["tss"] = any("conv_adapter_final.weight" in vision.inside(i) for i in adapted)
    if changes["tss"]:
        mask = vision.get(adapted[0], "conv_adapter_layers.weight")
        if mask.ndim != 4 or mask.shape[0] != 2 or mask.shape[1] not in (1, 2) or mask.shape[-1] != mask.shape[-2]:
            vision.wrong(adapted[0], "conv_adapter_layers.weight", "(2, 2, k, k)")
        changes |= {"mask_kernel": mask.shape[-1], "mask_conv": "full" if mask.shape[1] == 2 else "depthwise"}

    if backbone.text is not None:
        text = _Blocks(student, TEXT_BLOCK, len(backbone.text.blocks), "text", name)
        prompted = text.last({"deep_embeds"})
        r, prompts = text.tokens(prompted, "deep_embeds", backbone.text.config.width)
        state["label_set.prompts"] = prompts
        if prompted:
            changes |= {"prompts": "deep", "prompt_layers": len(prompted), "prompt_tokens": r}
    if templates is not None:
        changes["templates"] = tuple(templates)

    ram = RAM(backbone, preset("reference", **changes))
    own = ram.adapters()
    for j, i in enumerate(adapted if changes["tss"] else ()):
        for key in [k for k in own if k.startswith(f"region_set.tss.{j}.")]:
            ours, leaf = key.removeprefix(f"region_set.tss.{j}.").rsplit(".", 1)
            if leaf == "num_batches_tracked":  # momentum is fixed, so the count means nothing
                state[key] = torch.zeros_like(own[key])
                continue
            state[key] = vision.get(i, f"{TSS_PARTS[ours]}.{leaf}", own[key].shape).float()
    for ours, theirs in zip(("tau_global", "tau_region"), TOP, strict=True):
        if theirs not in tensors:
            raise RamatchError(f"{name}: tensor '{theirs}' is missing")
        if tensors[theirs].numel() != 1:
            raise RamatchError(f"{name}: tensor '{theirs}' is {tuple(tensors[theirs].shape)}, expected one number")
        state[ours] = tensors[theirs].float().reshape(())
    state.setdefault("label_set.prompts", own["label_set.prompts"])
    load_adapters(ram, state, name)
    return ram.eval()


class _Blocks:
    """The learned tensors inside the blocks of one tower, under the checkpoint's own names."""

    def __init__(self, student: Mapping[str, Tensor], prefix: str, layers: int, tower: str, where: str) -> None:
        self.student, self.prefix, self.layers, self.tower, self.where = student, prefix, layers, tower, where

    def inside(self, i: int) -> dict[str, Tensor]:
        """Tensors of block i; the adapter's parts with or without their module's name in front."""
        return {k.removeprefix("conv_adapter."): v for k, v in take(self.student, self.prefix.format(i)).items()}

    def last(self, learned: set[str]) -> list[int]:
        """Indices of the blocks that hold any of these tensors; they must be the last ones of the tower."""
        found = [i for i in range(self.layers) if learned & set(self.inside(i))]
        if found != list(range(self.layers - len(found), self.layers)):
            raise RamatchError(
                f"{self.where}: the {self.tower} layers {found} of {self.layers} are adapted; "
                "only the last ones, without a gap, can be"
            )
        return found

    def get(self, i: int, part: str, shape: Sequence[int] | None = None) -> Tensor:
        """One tensor of block i, of this shape."""
        inside = self.inside(i)
        if part not in inside:
            raise RamatchError(f"{self.where}: tensor '{self.full(i, part)}' is missing")
        if shape is not None and tuple(inside[part].shape) != tuple(shape):
            self.wrong(i, part, str(tuple(shape)))
        return inside[part]

    def tokens(self, blocks: Sequence[int], part: str, width: int) -> tuple[int, Tensor]:
        """Learned tokens of these blocks: how many each has, and all of them (blocks, r, width)."""
        if not any(part in self.inside(i) for i in blocks):
            return 0, torch.zeros(0, 0, width)
        found = [self.get(i, part).float() for i in blocks]
        found = [t[0] if t.ndim == 3 and len(t) == 1 else t for t in found]
        r = len(found[0])
        for i, tokens in zip(blocks, found, strict=True):
            if tokens.shape != (r, width):
                self.wrong(i, part, f"({r}, {width})")
        return r, torch.stack(found)

    def full(self, i: int, part: str) -> str:
        """The name of a part in the checkpoint, as it is there or would be."""
        plain = self.prefix.format(i) + part
        below = self.prefix.format(i) + "conv_adapter." + part
        nested = below in self.student or (plain not in self.student and part not in ("adapt_embeds", "deep_embeds"))
        return STUDENT + (below if nested else plain)

    def wrong(self, i: int, part: str, expected: str) -> NoReturn:
        shape = tuple(self.inside(i)[part].shape)
        raise RamatchError(f"{self.where}: tensor '{self.full(i, part)}' is {shape}, expected {expected}")


def _notes(tensors: Mapping[str, Tensor], ram: RAM) -> list[str]:
    """What the user should know: the teacher's copy, tensors that were left out, settings read off the tensors."""
    student, teacher, c = take(tensors, STUDENT), take(tensors, TEACHER), ram.config
    notes = [
        f"adapted layers {c.adapted_layers}, visual prompts {c.visual_prompts}, TSS {'on' if c.tss else 'off'}, "
        f"label prompts {c.prompt_tokens if c.prompts == 'deep' else 0} in {c.prompt_layers} layers, "
        f"mask kernel {c.mask_kernel}, temperatures {ram.tau_global.item():.6g} and {ram.tau_region.item():.6g}"
    ]
    differing = [k for k, v in teacher.items() if k in student and not _same(v, student[k])]
    if differing:
        notes.append(
            f"the teacher's '{TEACHER}{differing[0]}' ({len(differing)} tensors in all) differs from the student's "
            "frozen weights; the teacher's copy is left out"
        )
    elif teacher:
        notes.append("the teacher's copy equals the student's frozen weights; one is kept")
    extra = [k for k in tensors if not k.startswith((STUDENT, TEACHER)) and k not in TOP]
    extra += [STUDENT + k for k in student if not KNOWN.fullmatch(k)]
    if extra:
        notes.append(f"{len(extra)} tensors have no place here and are left out: {', '.join(extra[:5])}")
    return notes


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.float(), b.float())
