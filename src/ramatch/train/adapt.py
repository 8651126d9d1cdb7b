"""Broad-vocabulary training: tags mined from captions together with labelled data.

Captioned images know their tags, labelled images their labels; what an image's source does not tell is left out of the loss
(−1): labels of images that have captions only, tags too close in meaning to a positive one to be called absent, and, since
captions omit much, the images where the untrained model finds a tag likeliest although no caption has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import RAMConfig, preset
from ..data.annotations import Annotations, Record
from ..data.captions import CaptionRecord, read_captions
from ..data.tags import mine_tags
from ..errors import RamatchError
from ..files import new_folder, write_json, write_text
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.folder import save_ram
from ..modeling.ram import RAM
from ..settings import parse_overrides
from .align_run import load_pixels
from .assemble import find_data, load_frozen, read_split
from .distributed import pick_device
from .kept import FitConfig, Kept, fit, keep, recognised, with_mosaics


@dataclass(frozen=True)
class BroadTargets:
    """names (N,): labels first, then tags; targets int8 (images, N): 1 present, 0 absent, −1 not known; how many are labels."""

    names: tuple[str, ...]
    targets: Tensor
    labels: int


def broad_targets(
    backbone: Backbone,
    keys: Sequence[str],
    captions: dict[str, Sequence[str]],
    annotations: Annotations,
    *,
    max_tags: int = 1500,
    min_images: int = 12,
    ignore_above: float = 0.6,
) -> BroadTargets:
    """What is known of each image in `keys`, from its captions, its labels, or both."""
    captioned = [key for key in keys if key in captions]
    tags = mine_tags([captions[key] for key in captioned], min_images=min_images, max_tags=max_tags)
    names = (*annotations.classes, *(t for t in tags.names if t not in set(annotations.classes)))
    column = {name: i for i, name in enumerate(names)}
    with torch.inference_mode():
        words = F.normalize(backbone.encode_text(names).float(), dim=-1)
        close = (words @ words.T > ignore_above).cpu()
    place = {key: i for i, key in enumerate(keys)}
    known, present = torch.zeros(2, len(keys), len(names), dtype=torch.bool)
    if captioned:
        rows = torch.tensor([place[key] for key in captioned])[:, None]
        columns = torch.tensor([column[t] for t in tags.names], dtype=torch.long)
        known[rows, columns] = True
        known[:, : len(annotations.classes)] = False  # that a caption does not mention a label says little
        present[rows, columns] = tags.targets
    mentioned = present.clone()
    certain = torch.zeros_like(known)  # annotations are complete, captions are not: labels win
    records = [record for record in annotations.records if record.key in place]
    if records:
        rows = torch.tensor([place[record.key] for record in records])[:, None]
        columns = torch.arange(len(annotations.classes))  # labels come first
        certain[rows, columns] = True
        present[rows, columns] = annotations.targets()[
            [i for i, record in enumerate(annotations.records) if record.key in place]
        ].bool()
    there = (mentioned | present).float()
    near = there @ close.float() > 0  # too close in meaning to something there to be called absent
    absent = certain | (known & ~near)
    targets = torch.where(present, 1, torch.where(absent, 0, -1)).to(torch.int8)
    return BroadTargets(names, targets, len(annotations.classes))


# What made ramatch-mini; chosen on validation images and tags (docs/results.md)
ADAPT = FitConfig(epochs=8, batch_size=256, lr=1e-3, lr_tau=5e-4, ema=0.99, loss="sigmoid", focus=1.0)


@torch.inference_mode()
def leave_open(model: RAM, kept: Kept, broad: BroadTargets, targets: Tensor, omitted: float) -> Tensor:
    """The targets, with `omitted` times as many of a tag's absences open (−1) as it has presences, the likeliest ones by the model
    without its adapters; never more than half of them."""
    bare = RAM(model.backbone, model.config.replace(tss_share=0.0)).to(model.backbone.device)
    share = model.config.region_share
    likely = torch.cat([torch.lerp(o.image, o.best, share).half().cpu() for o in recognised(bare, kept, broad.names)])
    targets = targets.clone()
    for tag in range(broad.labels, len(broad.names)):
        absent = (targets[:, tag] == 0).nonzero()[:, 0]
        count = min(int(omitted * (targets[:, tag] == 1).sum()), len(absent) // 2)
        targets[absent[likely[absent, tag].float().topk(count).indices], tag] = -1
    return targets


def adapt(
    backbone: Backbone,
    pixels: Tensor,
    broad: BroadTargets,
    out: str | Path,
    *,
    ram: RAMConfig,
    config: FitConfig = ADAPT,
    views: int = 3,
    omitted: float = 1.0,
    seed: int = 0,
    with_backbone: bool = False,
    background: Sequence[str] = (),
) -> dict[str, Any]:
    """Train adapters on uint8 images (n, 3, h, w) with broad targets and write a model folder. `omitted`: see `leave_open`."""
    torch.manual_seed(seed)
    model = RAM(backbone, ram).to(backbone.device)
    pixels, targets = with_mosaics(pixels, broad.targets, config.mosaics, model.preprocess.size, seed, backbone.device)
    kept = keep(model, pixels, views, seed=seed)
    if omitted:
        targets = leave_open(model, kept, broad, targets, omitted)
    log = fit(model, kept, targets.float(), list(broad.names), config, seed, broad.labels)
    model.background = tuple(background)
    save_ram(model.eval(), out, with_backbone=with_backbone, half=True)
    return log


def adapt_folder(
    backbone: str | Path,
    captions: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    images_roots: Sequence[str] | None = None,
    split: str | None = "train",
    exclude: Iterable[str] = (),
    ram: RAMConfig | None = None,
    config: FitConfig | None = None,
    max_tags: int = 1500,
    min_images: int = 12,
    ignore_above: float = 0.6,
    omitted: float = 1.0,
    views: int = 3,
    seed: int = 0,
    background: Sequence[str] = (),
    device: str | None = None,
) -> dict[str, Any]:
    """Train adapters on captioned and labelled images together; write a model folder that stands alone to `out`.

    An image that both files name (by the same key) counts once, with its captions and its labels. `exclude`: keys of
    images to leave out, for example those kept for calibration. The backbone is written in half precision; what was read,
    the settings and the log go into adapt.json, the mined tags into tags.txt. Returns what adapt.json holds.
    """
    out = new_folder(out)
    ram, config = ram or preset("aligned"), config or ADAPT
    if views < 1:
        raise RamatchError(f"views must be at least 1, got {views}")
    if not 0 <= omitted < float("inf"):
        raise RamatchError(f"omitted must not be negative, got {omitted}")
    place = find_data(data)
    # captions may tell of the labelled images: look for pictures there too
    captioned = read_captions(captions, [*(images_roots or []), place if place.is_dir() else place.parent])
    labelled = read_split(place, split, images=list(images_roots or []))
    gone = set(exclude)
    everything: list[CaptionRecord | Record] = [*captioned.records, *labelled.records]
    records = {r.key: r for r in everything if r.key not in gone}
    if len(records) < 2:
        raise RamatchError(f"{len(records)} images are left to train on; at least 2 are needed")
    own = load_frozen(str(backbone)).to(pick_device(device))
    own.name = Path(backbone).name  # the folder stands alone, so it need not remember where this lay
    broad = broad_targets(
        own, list(records), {r.key: r.captions for r in captioned.records if r.key not in gone},
        labelled, max_tags=max_tags, min_images=min_images, ignore_above=ignore_above,
    )  # fmt: skip
    pixels = load_pixels(list(records.values()), own.preprocess.size)
    log = adapt(
        own,
        pixels,
        broad,
        out,
        ram=ram,
        config=config,
        views=views,
        omitted=omitted,
        seed=seed,
        with_backbone=True,
        background=background,
    )
    tags = broad.names[broad.labels :]
    report = {
        "images": len(records),
        "captioned": sum(r.key in records for r in captioned.records),
        "labelled": sum(r.key in records for r in labelled.records),
        "excluded": len({r.key for r in everything} & gone),
        "labels": len(labelled.classes),
        "tags": len(tags),
        "background": len(background),
        "settings": {
            "fit": dataclasses.asdict(config), "ram": ram.to_dict(), "max_tags": max_tags, "min_images": min_images,
            "ignore_above": ignore_above, "omitted": omitted, "views": views, "seed": seed,
        },
        "data": [s.to_dict() | {"path": Path(s.path).name} for s in (captioned.summary, labelled.summary)],
        "log": log,
    }  # fmt: skip
    write_text(out / "tags.txt", "".join(f"{tag}\n" for tag in tags))
    write_json(out / "adapt.json", report)
    return report


def settings_from(overrides: Sequence[str], base: str = "aligned") -> tuple[FitConfig, RAMConfig]:
    """How `adapt` trains, and the named preset of `RAMConfig`, with `name=value` changes."""
    fit_names = [f.name for f in dataclasses.fields(FitConfig)]
    changes = parse_overrides(overrides, sorted({*fit_names, *(f.name for f in dataclasses.fields(RAMConfig))}))
    ram = {name: value for name, value in changes.items() if name not in fit_names}
    return ADAPT.replace(**{name: changes[name] for name in changes if name in fit_names}), preset(base, **ram)
