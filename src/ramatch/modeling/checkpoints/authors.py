"""Importing a checkpoint of the authors' program: their names → a RAM with the `reference` preset.

A checkpoint holds the student under `clip_model.` (frozen towers in OpenAI's names, adapters inside the last blocks), a
frozen copy under `clip_model_teacher.`, and two temperatures. Layer counts, prompt counts and the mask's kernel are
read off the tensors; what a checkpoint does not tell (lambda1, lambda2, ...) comes from the preset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

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
ADAPTER = "conv_adapter."  # what TSS is called inside an adapted block; some checkpoints leave it out
VISUAL_PROMPTS, PROMPTS = "adapt_embeds", "deep_embeds"
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
TOP = {"tau_global": "temperature", "tau_region": "temperature_loc"}
KNOWN = re.compile(  # every name of the student that is read, or is safe to leave out
    r"(visual\.)?transformer\.resblocks\.\d+\.("
    r"(ln_[12]|mlp\.c_fc|mlp\.c_proj|attn\.qkv|attn\.out_proj)\.(weight|bias)|attn\.in_proj_(weight|bias)"
    r"|adapt_embeds|deep_embeds|conv_adapter\.conv_adapter_layers[12]\.(0\.weight|1\.\w+)"
    r"|conv_adapter\.conv_adapter_(layers|final)\.weight|conv_adapter\.adapter_norm_(q1|q2|kv)\.(weight|bias))"
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
    student = _student(tensors)
    if not student:
        raise RamatchError(
            f"{name}: no tensor starts with '{STUDENT}', so this is not a checkpoint of the authors' program "
            "(a bare CLIP state dict can be given as the backbone itself)"
        )
    # OpenAI's weights, which the program starts from, were trained with QuickGELU
    backbone = from_state_dict(student, name=name, act="quick_gelu")
    tower, blocks = backbone.vision.config, [VISION_BLOCK.format(i) for i in range(len(backbone.vision.blocks))]
    adapted = _last(student, blocks, (VISUAL_PROMPTS, *(f"{ADAPTER}{p}.weight" for p in TSS_PARTS.values())), name)
    state = {"region_set.visual_prompts": _tokens(student, adapted, VISUAL_PROMPTS, tower.width, name)}
    changes: dict[str, object] = {
        "adapted_layers": len(adapted),
        "visual_prompts": state["region_set.visual_prompts"].shape[1],
        "tss": any(f"{block}{ADAPTER}conv_adapter_final.weight" in student for block in adapted),
        "prompts": "none",
        "prompt_layers": 0,
    }
    if changes["tss"]:
        place = f"{adapted[0]}{ADAPTER}conv_adapter_layers.weight"
        mask = _get(student, place, name)
        if mask.ndim != 4 or mask.shape[0] != 2 or mask.shape[1] not in (1, 2) or mask.shape[-1] != mask.shape[-2]:
            raise RamatchError(f"{name}: tensor '{STUDENT}{place}' is {tuple(mask.shape)}, expected (2, 2, k, k)")
        changes |= {"mask_kernel": mask.shape[-1], "mask_conv": "full" if mask.shape[1] == 2 else "depthwise"}
    if backbone.text is not None:
        prompted = _last(student, [TEXT_BLOCK.format(i) for i in range(len(backbone.text.blocks))], (PROMPTS,), name)
        state["label_set.prompts"] = prompts = _tokens(student, prompted, PROMPTS, backbone.text.config.width, name)
        if prompted:
            changes |= {"prompts": "deep", "prompt_layers": len(prompted), "prompt_tokens": prompts.shape[1]}
    if templates is not None:
        changes["templates"] = tuple(templates)

    ram = RAM(backbone, preset("reference", **changes))
    own = ram.adapters()
    for key in (key for key in own if key.startswith("region_set.tss.")):
        part, leaf = key.removeprefix("region_set.tss.").rsplit(".", 1)
        j, part = part.split(".", 1)
        if leaf == "num_batches_tracked":  # momentum is fixed, so the count means nothing
            state[key] = torch.zeros_like(own[key])
        else:
            place = f"{adapted[int(j)]}{ADAPTER}{TSS_PARTS[part]}.{leaf}"
            state[key] = _get(student, place, name, own[key].shape)
    for ours, theirs in TOP.items():
        if theirs not in tensors:
            raise RamatchError(f"{name}: tensor '{theirs}' is missing")
        if tensors[theirs].numel() != 1:
            raise RamatchError(f"{name}: tensor '{theirs}' is {tuple(tensors[theirs].shape)}, expected one number")
        state[ours] = tensors[theirs].float().reshape(())
    state.setdefault("label_set.prompts", own["label_set.prompts"])
    load_adapters(ram, state, name)
    return ram.eval()


def _student(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The student's tensors, TSS always under its module's name."""
    bare = re.compile(r"(resblocks\.\d+\.)(?=conv_adapter_|adapter_norm_)")
    return {bare.sub(rf"\1{ADAPTER}", name): tensor for name, tensor in take(tensors, STUDENT).items()}


def _get(student: Mapping[str, Tensor], place: str, where: str, shape: Sequence[int] | None = None) -> Tensor:
    """One tensor, of this shape."""
    if place not in student:
        raise RamatchError(f"{where}: tensor '{STUDENT}{place}' is missing")
    found = student[place].float()
    if shape is not None and found.shape != tuple(shape):
        raise RamatchError(f"{where}: tensor '{STUDENT}{place}' is {tuple(found.shape)}, expected {tuple(shape)}")
    return found


def _last(student: Mapping[str, Tensor], blocks: list[str], learned: Sequence[str], where: str) -> list[str]:
    """The blocks that hold any of these tensors; they must be the last ones of the tower."""
    found = [i for i, block in enumerate(blocks) if any(block + part in student for part in learned)]
    if found != list(range(len(blocks) - len(found), len(blocks))):
        tower = "vision" if blocks[0].startswith("visual") else "text"
        raise RamatchError(
            f"{where}: the {tower} layers {found} of {len(blocks)} are adapted; "
            "only the last ones, without a gap, can be"
        )
    return [blocks[i] for i in found]


def _tokens(student: Mapping[str, Tensor], blocks: list[str], part: str, width: int, where: str) -> Tensor:
    """Learned tokens of these blocks, (blocks, r, width), stored with a batch axis or without; none without any."""
    if not any(block + part in student for block in blocks):
        return torch.zeros(0, 0, width)
    stored = {block + part: student[block + part] for block in blocks if block + part in student}
    plain = {place: t[0] if t.ndim == 3 and len(t) == 1 else t for place, t in stored.items()}
    rows = len(next(iter(plain.values())))
    return torch.stack([_get(plain, block + part, where, (rows, width)) for block in blocks])


def _notes(tensors: Mapping[str, Tensor], ram: RAM) -> list[str]:
    """What the user should know: the teacher's copy, tensors that were left out, settings read off the tensors."""
    student, teacher, c = _student(tensors), take(tensors, TEACHER), ram.config
    notes = [
        f"adapted layers {c.adapted_layers}, visual prompts {c.visual_prompts}, TSS {'on' if c.tss else 'off'}, "
        f"label prompts {c.prompt_tokens if c.prompts == 'deep' else 0} in {c.prompt_layers} layers, "
        f"mask kernel {c.mask_kernel}, temperatures {ram.tau_global.item():.6g} and {ram.tau_region.item():.6g}"
    ]
    differing = [k for k, v in teacher.items() if k in student and not torch.equal(v.float(), student[k].float())]
    if differing:
        notes.append(
            f"the teacher's '{TEACHER}{differing[0]}' ({len(differing)} tensors in all) differs from the student's "
            "frozen weights; the teacher's copy is left out"
        )
    elif teacher:
        notes.append("the teacher's copy equals the student's frozen weights; one is kept")
    extra = [k for k in tensors if not k.startswith((STUDENT, TEACHER)) and k not in TOP.values()]
    extra += [STUDENT + k for k in student if not KNOWN.fullmatch(k)]
    if extra:
        notes.append(f"{len(extra)} tensors have no place here and are left out: {', '.join(extra[:5])}")
    return notes
