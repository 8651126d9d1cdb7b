"""RAM trained and read on cached features: what `adapt` and `study` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.sampler import ResumableSampler
from ..modeling.ram import RAM, Output, Trunk
from .config import CachedConfig
from .distributed import World
from .features import FeatureCache, Stem
from .task import Batch, RAMTask
from .trainer import Trainer, seed_all


def ram_stem(ram: RAM, dtype: torch.dtype = torch.float32) -> Stem:
    """What of RAM's pass no training changes."""
    return Stem(partial(ram.region_set.stem, ram.backbone), ram.preprocess, ram.backbone.device, dtype)


class CachedTask(RAMTask):
    """RAM from a random view of each cached image, and targets (n, N) (1 present, 0 absent, −1 not known) of N labels;
    the first `annotated` of them are what `CachedConfig.focus` is for."""

    def __init__(
        self,
        ram: RAM,
        cache: FeatureCache,
        targets: Tensor,
        labels: Sequence[str],
        config: CachedConfig,
        annotated: int = 0,
    ) -> None:
        super().__init__(ram, labels, config.loss, config.dtype(ram.backbone.device))
        self.cache, self.targets = cache, targets.to(ram.backbone.device)
        self.config, self.annotated, self.focus = config, annotated, config.focus if annotated else 0.0
        self.prepare()
        self.fixed = None
        if ram.label_set.mode == "none":  # nothing in the label set learns
            with torch.no_grad():
                self.fixed = ram.encode_labels(self.labels)
        self.sampler = ResumableSampler(len(cache), config.seed, min(config.batch_size, len(cache)))

    def batches(self) -> Iterable[Batch]:
        return self.cache.batches(self.sampler)

    def trunks(self) -> Iterator[Trunk]:
        order = torch.randperm(len(self.cache), generator=torch.Generator().manual_seed(self.config.seed))
        for rows in order.to(self.targets.device).split(128):
            with self.autocast():  # not of what the system does with them
                found = self.ram.trunk(self.cache.pick(0, rows))
            yield found

    def forward(self, view: Tensor, rows: Tensor) -> Tensor:
        targets = self.targets[rows]
        with self.autocast():
            output = self.match(self.cache.pick(view, rows), targets, self.fixed)
            loss = self.ram.loss(output, targets, self.kind)
            if self.focus:
                alone = targets.clone()
                alone[:, self.annotated :] = -1
                loss = loss + self.focus * self.ram.loss(output, alone, self.kind)
        return loss

    def constants(self) -> Any:
        return super().constants(), self.fixed


def fit_cached(task: CachedTask, *, progress: bool = False) -> dict[str, Any]:
    """Train the adapters on cached features, where there is anything that learns; what there is to say of it."""
    tau = [task.ram.tau_global.item(), task.ram.tau_region.item()]
    if not task.learns:
        return {"seconds": 0.0, "images_per_second": 0, "loss": [], "tau": tau}
    seed_all(task.config)
    trainer = Trainer(task, task.config, World(task.ram.backbone.device), progress=progress)
    seconds, tau = trainer.fit(), [task.ram.tau_global.item(), task.ram.tau_region.item()]
    rate, losses = round(trainer.place.images / max(seconds, 1e-9)), [round(e["loss"], 4) for e in trainer.history]
    return {"seconds": round(seconds, 2), "images_per_second": rate, "loss": losses, "tau": tau}


@torch.inference_mode()
def recognize_cached(ram: RAM, cache: FeatureCache, labels: Sequence[str], *, batch: int = 128) -> Iterator[Output]:
    """What the model finds on the cached images' first view, batch by batch."""
    ram.eval()
    device, encoded = ram.backbone.device.type, ram.encode_labels(labels)
    for start in range(0, len(cache), batch):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = ram.recognize(ram.trunk(cache.pick(0, slice(start, start + batch))), encoded)
        yield found


def collect_cached(ram: RAM, cache: FeatureCache, labels: Sequence[str], *, batch: int = 128) -> Tensor:
    """s_G, s_R (plan scaled by N) and best region's cosine of every image and label: (n, N, 3), on the CPU."""
    out = []
    for o in recognize_cached(ram, cache, labels, batch=batch):
        region = o.region / o.mass if ram.config.plan_scale == "one" else o.region
        out.append(torch.stack([o.image, region, o.best], -1).float().cpu())
    return torch.cat(out)
