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
from ..data.augment import with_mosaics
from ..data.decode import decode_all
from ..data.lexicon import Lexicon
from ..evaluation.familiarity import known_words
from ..files import new_folder, whole_folder, write_json, write_text
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.folder import save_ram
from ..modeling.known import LEAST
from ..modeling.ram import RAM
from ..recognizer import pick_device
from ..settings import Count, NotNegative, OneOf, dotted_names, parse_overrides
from .assemble import load_frozen
from .cached import CachedTask, fit_cached, ram_stem, recognize_cached
from .config import CachedConfig, OptimConfig
from .features import FeatureCache, Views, cache_features
from .targets import ConceptConfig, Sources, Told, known_concepts


@dataclass(frozen=True)
class AdaptConfig(ConceptConfig, CachedConfig):
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


def broad_targets(backbone: Backbone, told: Told, config: AdaptConfig) -> BroadTargets:
    """What is known of each image from its sentences, its labels, or both."""

    @torch.inference_mode()
    def near(names: Sequence[str]) -> Tensor:
        return F.normalize(backbone.encode_text(names).float(), dim=-1)

    known = known_concepts(told, Lexicon.named(config.lexicon), config, near, silent=True)
    sources = {name: i for i, name in enumerate(known.names)}
    for i, words in enumerate(known.texts):  # every synonym of a meaning is a name of its own
        for word in words:
            sources.setdefault(word, i)
    columns = list(sources.values())
    return BroadTargets(tuple(sources), known.targets[:, columns], known.labels, tuple(columns))


@torch.inference_mode()
def leave_open(model: RAM, cache: FeatureCache, broad: BroadTargets, targets: Tensor, omitted: float) -> Tensor:
    """The targets, with `omitted` times as many of a tag's absences open (−1) as it has presences, the likeliest ones
    by the model without its adapters; never more than half of them."""
    bare = RAM(model.backbone, model.config.replace(tss_share=0.0)).to(model.backbone.device)
    share, found = model.config.region_share, recognize_cached(bare, cache, broad.names)
    likely = torch.cat([torch.lerp(o.image, o.best, share).half().cpu() for o in found])
    targets = targets.clone()
    for tag in sorted(set(broad.sources))[broad.labels :]:
        absent = (targets[:, tag] == 0).nonzero()[:, 0]
        count = min(int(omitted * (targets[:, tag] == 1).sum()), len(absent) // 2)
        targets[absent[likely[absent, tag].float().topk(count).indices], tag] = -1
    return targets[:, list(broad.sources)]


def adapt_folder(
    backbone: str | Path,
    data: Sources,
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
    out, ram, config = new_folder(out), ram or preset("aligned-best"), config or AdaptConfig()
    found = data.read()
    own = load_frozen(str(backbone)).to(pick_device(device))
    own.name = Path(backbone).name  # the folder stands alone, so it need not remember where this lay
    broad = broad_targets(own, found.told, config)
    torch.manual_seed(config.seed)
    model = RAM(own, ram).to(own.device)
    pixels, size = decode_all(found.records, model.preprocess, progress=progress), model.preprocess.size
    pixels, targets = with_mosaics(pixels, broad.targets, config.mosaics, size, config.seed, own.device)
    cache = cache_features(ram_stem(model, config.dtype(own.device)), pixels, Views(config.views, seed=config.seed))
    if config.omitted:
        targets = leave_open(model, cache, broad, targets, config.omitted)
    log = fit_cached(CachedTask(model, cache, targets.float(), broad.names, config, broad.labels), progress=progress)
    model.background = tuple(background)
    if len(broad.names) >= LEAST:
        model.known = known_words(model.eval(), broad.names)
    tags = broad.names[broad.labels :]
    truth = found.told.labels.truth
    report = {
        "images": len(found.records),
        "captioned": sum(map(bool, found.told.captions)),
        "labelled": 0 if truth is None else int((truth[:, 0] >= 0).sum()),
        "excluded": found.excluded,
        "labels": broad.labels,
        "tags": len(tags),
        "background": len(background),
        "settings": config.to_dict() | {"ram": ram.to_dict()},
        "data": found.accounts,
        "log": log,
    }
    with whole_folder(out) as folder:
        save_ram(model.eval(), folder, with_backbone=True, weights=config.weights)
        write_text(folder / "tags.txt", "".join(f"{tag}\n" for tag in tags))
        write_json(folder / "adapt.json", report)
    return report


def settings_from(overrides: Sequence[str], base: str = "aligned-best") -> tuple[AdaptConfig, RAMConfig]:
    """How `adapt` trains, and the named preset of `RAMConfig`, with `name=value` changes of either."""
    names = [f.name for f in fields(RAMConfig)]
    changes = parse_overrides(overrides, [*dotted_names(AdaptConfig), *names])
    ram = {name: value for name, value in changes.items() if name in names}
    return AdaptConfig().replace(**{n: v for n, v in changes.items() if n not in ram}), preset(base, **ram)
