"""What all compared systems share: frozen features in, logits out; the rest is RAM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import RAMConfig
from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.losses import Gather
from ..modeling.ram import RAM, Labels, Output, Trunk
from ..modeling.types import Match
from ..settings import Settings


@dataclass(frozen=True)
class NoSettings(Settings):
    """A system with nothing to set."""


@dataclass(frozen=True)
class MethodOutput(Output):
    """`extra`: what the system's own loss looks at besides its logits (`region` = `image`, (B, N))."""

    extra: tuple[Tensor, ...] = ()


class Method(RAM):
    """A system with RAM's interface on the same frozen features.

    A subclass says what it needs and gives `logits`; `criterion` if it learns; `prepare` if it looks at images first.
    It holds what it learns in modules and parameters of its own: parameters whose name ends with "prompts" learn by
    SGD, all others by AdamW (`RAMTask.roles`). RAM's ladder and temperatures are switched off; prompts of the label set
    are on where `prompts` says so.
    """

    foldable = False
    name: ClassVar[str]  # key of `config.METHODS`
    settings_type: ClassVar[type[Settings]] = NoSettings
    learns: ClassVar[bool] = True  # false: nothing is trained by gradient
    needs_text: ClassVar[bool] = False  # a text tower: given label features are not enough
    needs_images: ClassVar[bool] = False  # `prepare` must have seen images before it can be used
    needs_labels: ClassVar[bool] = True  # of the images it learns from; false: it takes images or sentences alone
    prompts: ClassVar[str] = "none"  # of the label set: "none", "coop", "dualcoop", "deep"

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: Settings) -> None:
        if self.needs_text and backbone.text is None:
            raise RamatchError(
                f"method '{self.name}' learns through a text tower, and '{backbone.name}' has none: given label "
                "features are not enough for it; take a backbone with a text tower (`ramatch align` makes one)"
            )
        # RAM's teacher looks past `trunk`, and guides a plan that there is none of
        super().__init__(backbone, self.configure(config, backbone.vision.config.layers).replace(tkt=False))
        self.settings = settings
        self.method = {"name": self.name, "settings": settings.to_dict()}
        self.tau_global.requires_grad_(False)
        self.tau_region.requires_grad_(False)

    @classmethod
    def configure(cls, config: RAMConfig, layers: int) -> RAMConfig:
        """The frozen features it works on, of `config` for a tower of so many layers."""
        return config.frozen(layers).replace(prompts=cls.prompts)

    # ------------------------------------------------------------------------------------- what a subclass gives

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        """Global feature (B, D) and regions (B, M, D), float32, not normalized, and N labels → logits (B, N); where it
        looked, (B, M, N) ≥ 0, if it looks anywhere; whatever else `criterion` wants."""
        raise NotImplementedError

    def look(self, trunk: Trunk, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        """The same for a system that wants more of the trunk than these features."""
        return self.logits(image, regions, labels)

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        """Its own loss (), of logits `output.image` and targets (B, N): 1 present, 0 absent, −1 not known."""
        raise RamatchError(f"method '{self.name}' is not trained: it has nothing to learn")

    def prepare(self, trunks: Iterable[Trunk], labels: Sequence[str]) -> None:
        """Look at training images (without their labels) before anything else; what is kept must be in buffers, finite
        and of sizes that settings alone decide. The trunks come in a random order, so who wants but some may stop."""

    # ------------------------------------------------------------------------------------------ RAM's interface

    def recognize(
        self,
        trunk: Trunk,
        labels: Labels,
        *,
        plan: bool = True,
        best: bool = True,
        matcher: str | None = None,
        teacher: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> MethodOutput:
        """Logits as `region`, `image` and `best_region`; with `plan` cosines of the regions, and where it looked."""
        if matcher is not None:
            raise RamatchError(f"method '{self.name}' has a way of matching of its own; matchers are RAM's")
        image, regions = (x.float() for x in self.features(trunk, labels))
        scores, where, extra = self.look(trunk, image, regions, labels)
        n = len(labels)
        scores = scores[:, :n]
        kept: dict[str, Any] = {}
        if plan:
            sim = self.similarity(regions, labels).float()[..., :n]
            where = torch.full_like(sim, 1 / sim.shape[1]) if where is None else where[..., :n].float().clamp(min=1e-9)
            share = where / where.sum(1, keepdim=True) / n
            kept |= {"sim": sim, "match": Match(share, share.sum(-1))}
        kept |= {"mass": 1 / n, "grid": trunk.grid, "extra": extra}
        return MethodOutput(scores, scores, scores, **kept)

    def with_config(self, config: RAMConfig) -> RAM:
        raise RamatchError(f"method '{self.name}' matches and scores in a way of its own; these settings are RAM's")

    def loss(self, output: Output, targets: Tensor, kind: str = "", gather: Gather | None = None) -> Tensor:
        """Its own loss; RAM's (`kind`) are not asked."""
        assert isinstance(output, MethodOutput)
        return self.criterion(output, targets)

    def score(self, output: Output, rule: str | None = None) -> Tensor:
        """Logits for ranking; their softmax over the vocabulary for people ("softmax"), as RAM has it."""
        return output.image.softmax(-1) if rule == "softmax" else output.image


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def cosines(features: Tensor, labels: Tensor) -> Tensor:
    """Cosine of features (..., D) with unit label features (N, D): (..., N), float32 under autocast too."""
    with torch.autocast(features.device.type, enabled=False):
        return unit(features.float()) @ labels.float().T


def scaled(x: Tensor) -> Tensor:
    """Features (..., D) at length √D: of about one size whatever the backbone, for layers that learn from them."""
    return unit(x) * x.shape[-1] ** 0.5


def products(x: Tensor, names: Tensor) -> Tensor:
    """Inner products of x (..., D) with labels (N, D), in full precision under autocast too: scores that differ by
    little must not fall together."""
    with torch.autocast(x.device.type, enabled=False):
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ names.to(wide).T


def top_mean(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Mean of each label's k highest scores of regions, (B, M, N) → (B, N), and the share each region has in it."""
    best, places = scores.topk(min(k, scores.shape[1]), dim=1)
    return best.mean(1), torch.zeros_like(scores).scatter(1, places, 1 / best.shape[1])


def check_heads(heads: int, width: int) -> None:
    if width % heads:
        raise RamatchError(f"setting 'heads' must divide the width of what attends, {width}; got {heads}")
