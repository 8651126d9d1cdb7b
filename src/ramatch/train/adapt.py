"""Broad-vocabulary training: tags mined from captions together with labelled data.

Captioned images know their tags, labelled images their labels; what an image's source does not tell is left out of the
loss (−1): labels of images that have captions only, tags too close in meaning to a positive one to be called absent,
and, since captions omit much, the images where the untrained model finds a tag likeliest although no caption has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import LOSSES, WEIGHTS, RAMConfig, preset
from ..data.annotations import Annotations, Record, Summary
from ..data.augment import with_mosaics
from ..data.captions import CaptionRecord, read_caption_sets
from ..data.decode import decode_all
from ..data.lexicon import Lexicon, concepts, unsettled
from ..data.splits import find_data, read_split
from ..data.tags import mine_tags
from ..errors import RamatchError
from ..evaluation.familiarity import known_words
from ..files import new_folder, whole_folder, write_json, write_text
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.folder import save_ram
from ..modeling.known import LEAST
from ..modeling.ram import RAM
from ..settings import Count, NotNegative, OneOf, dotted_names, parse_overrides
from .assemble import load_frozen
from .cached import Examples, fit_cached, ram_stem, recognize_cached
from .config import CachedConfig, OptimConfig
from .distributed import pick_device
from .features import FeatureCache, Views, cache_features


@dataclass(frozen=True)
class AdaptConfig(CachedConfig):
    """Defaults made `ramatch-mini`; chosen on validation images and tags (docs/results.md)."""

    epochs: Count = 8
    batch_size: Count = 256
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=1e-3, temperature_lr=5e-4, ema_decay=0.99, ema_restart=False, ema_warmup=True
        )
    )
    loss: Annotated[str, OneOf(LOSSES)] = "sigmoid"
    focus: NotNegative = 1.0
    max_tags: Count = 1500
    min_images: Count = 12  # a tag must occur in the captions of so many
    lexicon: str | None = "built-in"  # synonyms and parents of tags and labels, as in `align`
    ignore_above: NotNegative = 0.6  # tags this close to a positive one are not called absent
    omitted: NotNegative = 1.0  # how often captions leave a tag out for each time they have it: see `leave_open`
    weights: Annotated[str, OneOf(WEIGHTS)] = "fp16"  # on disk


@dataclass(frozen=True)
class BroadTargets:
    """names (N,): labels first, then tags, then other words for them; targets int8 (images, N): 1 present, 0 absent,
    −1 not known; how many are labels; whose targets each name has."""

    names: tuple[str, ...]
    targets: Tensor
    labels: int
    sources: tuple[int, ...]


def broad_targets(
    backbone: Backbone,
    keys: Sequence[str],
    captions: dict[str, Sequence[str]],
    annotations: Annotations,
    config: AdaptConfig,
) -> BroadTargets:
    """What is known of each image in `keys`, from its captions, its labels, or both."""
    lexicon, place = Lexicon.named(config.lexicon) or Lexicon({}), {key: i for i, key in enumerate(keys)}
    captioned = [key for key in keys if key in captions]
    tags = mine_tags([captions[key] for key in captioned], min_images=config.min_images, max_tags=config.max_tags)
    found = concepts(tags, lexicon)
    meanings = Meanings(annotations.classes, found.names, lexicon)
    known, spoken, present = torch.zeros(3, len(keys), len(meanings.names), dtype=torch.bool)
    if captioned:
        rows = torch.tensor([place[key] for key in captioned])[:, None]
        columns = torch.tensor([meanings.column[name] for name in found.names], dtype=torch.long)
        known[rows, columns] = True
        known[:, : len(annotations.classes)] = False  # that a caption does not mention a label says little
        present[rows, columns], spoken[rows, columns] = found.targets, found.said
    certain = torch.zeros_like(known)  # annotations are complete, captions are not: labels win
    kept = [i for i, record in enumerate(annotations.records) if record.key in place]
    if kept:
        rows = torch.tensor([place[annotations.records[i].key] for i in kept])[:, None]
        truth = annotations.targets()[kept].bool()
        certain[rows, torch.arange(truth.shape[1])] = True
        present[rows, torch.arange(truth.shape[1])] = truth
        spoken[rows, torch.arange(truth.shape[1])] |= truth
        for label, higher in meanings.above(annotations.classes, lexicon).items():  # a dog is an animal
            present[rows, higher] |= truth[:, [label]]
    with torch.inference_mode():
        words = F.normalize(backbone.encode_text(meanings.names).float(), dim=-1)
        close = (words @ words.T > config.ignore_above).cpu()
    absent = certain | (known & ~unsettled(spoken, present, close, meanings.below(lexicon)))
    targets = torch.where(present, 1, torch.where(absent, 0, -1)).to(torch.int8)
    names, sources = meanings.with_synonyms(lexicon)
    return BroadTargets(names, targets[:, sources], len(annotations.classes), tuple(sources))


class Meanings:
    """Columns of meanings, and their places by the lexicon's name: labels first, then what captions speak of."""

    def __init__(self, classes: Sequence[str], concepts: Sequence[str], lexicon: Lexicon) -> None:
        self.column = {lexicon.find(name).name: i for i, name in reversed(list(enumerate(classes)))}
        self.names = list(classes)
        for name in concepts:
            if name not in self.column:
                self.column[name] = len(self.names)
                self.names.append(name)

    def above(self, classes: Sequence[str], lexicon: Lexicon) -> dict[int, list[int]]:
        """Of each label, the columns of what it is a kind of."""
        found = {i: lexicon.above(lexicon.find(name)) for i, name in enumerate(classes)}
        return {i: [self.column[n] for n in names if n in self.column] for i, names in found.items()}

    def below(self, lexicon: Lexicon) -> Tensor:
        """bool (N, N): whether the second is a kind of the first."""
        out = torch.zeros(len(self.names), len(self.names), dtype=torch.bool)
        for name, column in self.column.items():
            for higher in lexicon.above(lexicon.find(name)):
                if higher in self.column:
                    out[self.column[higher], column] = True
        return out

    def with_synonyms(self, lexicon: Lexicon) -> tuple[tuple[str, ...], list[int]]:
        """All names, then every synonym of a meaning as a name of its own; and whose column each has."""
        sources = {name: i for i, name in enumerate(self.names)}
        for name in self.names:
            for word in lexicon.find(name).words:
                sources.setdefault(word, sources[name])
        return tuple(sources), list(sources.values())


@torch.inference_mode()
def leave_open(model: RAM, cache: FeatureCache, broad: BroadTargets, targets: Tensor, omitted: float) -> Tensor:
    """The targets, with `omitted` times as many of a tag's absences open (−1) as it has presences, the likeliest ones
    by the model without its adapters; never more than half of them."""
    bare = RAM(model.backbone, model.config.replace(tss_share=0.0)).to(model.backbone.device)
    share, found = model.config.region_share, recognize_cached(bare, cache, broad.names)
    likely = torch.cat([torch.lerp(o.image, o.best, share).half().cpu() for o in found])
    targets = targets.clone()
    for tag, source in enumerate(broad.sources):
        if tag != source:
            targets[:, tag] = targets[:, source]
        if tag != source or tag < broad.labels:
            continue
        absent = (targets[:, tag] == 0).nonzero()[:, 0]
        count = min(int(omitted * (targets[:, tag] == 1).sum()), len(absent) // 2)
        targets[absent[likely[absent, tag].float().topk(count).indices], tag] = -1
    return targets


def adapt(
    model: RAM, pixels: Tensor, broad: BroadTargets, config: AdaptConfig, *, progress: bool = False
) -> dict[str, Any]:
    """Train a model's adapters on uint8 images (n, 3, h, w) with broad targets."""
    device, size = model.backbone.device, model.preprocess.size
    pixels, targets = with_mosaics(pixels, broad.targets, config.mosaics, size, config.seed, device)
    stem, views = ram_stem(model, config.dtype(device)), Views(config.views, seed=config.seed)
    cache = cache_features(stem, pixels, views)
    if config.omitted:
        targets = leave_open(model, cache, broad, targets, config.omitted)
    examples = Examples(cache, targets.float(), broad.names, broad.labels)
    return fit_cached(model, examples, config, progress=progress)


@dataclass(frozen=True)
class BroadData:
    """Captioned and labelled images. One that both files name (by the same key) counts once, with its captions and its
    labels. `exclude`: keys of images to leave out, for example those kept for calibration."""

    captions: str | Path | Sequence[str | Path]
    labels: str | Path
    images_roots: Sequence[str] = ()
    split: str | None = "train"
    exclude: Sequence[str] = ()

    def read(self) -> tuple[list[CaptionRecord], list[Summary], Annotations, dict[str, CaptionRecord | Record]]:
        """Captioned images and accounts of their sets; labelled images; those of both to train on."""
        place = find_data(self.labels)
        # captions may tell of the labelled images: look for pictures there too
        roots: list[str | Path] = [*self.images_roots, place if place.is_dir() else place.parent]
        captioned, summaries = read_caption_sets(self.captions, roots)
        labelled = read_split(place, self.split, images=list(self.images_roots))
        everything: list[CaptionRecord | Record] = [*captioned, *labelled.records]
        gone = set(self.exclude)
        records = {r.key: r for r in everything if r.key not in gone}
        if len(records) < 2:
            raise RamatchError(f"{len(records)} images are left to train on; at least 2 are needed")
        return captioned, summaries, labelled, records


def adapt_folder(
    backbone: str | Path,
    data: BroadData,
    out: str | Path,
    *,
    ram: RAMConfig | None = None,
    config: AdaptConfig | None = None,
    background: Sequence[str] = (),
    device: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train adapters on captioned and labelled images together; write a model folder that stands alone to `out`.

    What was read, the settings and the log go into adapt.json, the mined
    tags into tags.txt. Returns what adapt.json holds."""
    out, ram, config = new_folder(out), ram or preset("aligned"), config or AdaptConfig()
    captioned, summaries, labelled, records = data.read()
    own = load_frozen(str(backbone)).to(pick_device(device))
    own.name = Path(backbone).name  # the folder stands alone, so it need not remember where this lay
    captions: dict[str, Sequence[str]] = {r.key: r.captions for r in captioned if r.key in records}
    broad = broad_targets(own, list(records), captions, labelled, config)
    torch.manual_seed(config.seed)
    model = RAM(own, ram).to(own.device)
    pixels = decode_all(list(records.values()), model.preprocess, progress=progress)
    log = adapt(model, pixels, broad, config, progress=progress)
    model.background = tuple(background)
    if len(broad.names) >= LEAST:
        model.known = known_words(model.eval(), broad.names)
    tags = broad.names[broad.labels :]
    everything = {r.key for r in captioned} | {r.key for r in labelled.records}
    report = {
        "images": len(records),
        "captioned": len(captions),
        "labelled": sum(r.key in records for r in labelled.records),
        "excluded": len(everything & set(data.exclude)),
        "labels": len(labelled.classes),
        "tags": len(tags),
        "background": len(background),
        "settings": config.to_dict() | {"ram": ram.to_dict()},
        "data": [s.to_dict() | {"path": Path(s.path).name} for s in (*summaries, labelled.summary)],
        "log": log,
    }
    with whole_folder(out) as folder:
        save_ram(model.eval(), folder, with_backbone=True, weights=config.weights)
        write_text(folder / "tags.txt", "".join(f"{tag}\n" for tag in tags))
        write_json(folder / "adapt.json", report)
    return report


def settings_from(overrides: Sequence[str], base: str = "aligned") -> tuple[AdaptConfig, RAMConfig]:
    """How `adapt` trains, and the named preset of `RAMConfig`, with `name=value` changes of either."""
    names = [f.name for f in fields(RAMConfig)]
    changes = parse_overrides(overrides, [*dotted_names(AdaptConfig), *names])
    ram = {name: value for name, value in changes.items() if name in names}
    return AdaptConfig().replace(**{n: v for n, v in changes.items() if n not in ram}), preset(base, **ram)
