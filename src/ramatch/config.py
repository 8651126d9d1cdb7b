"""Settings of RAM as frozen dataclasses, and the presets.

Every point on which the paper and the authors' program differ is a named field; `PRESETS["paper"]` and
`PRESETS["reference"]` are the two readings, `PRESETS["ramatch"]` is ours, `PRESETS["aligned"]` ours for encoders of `ramatch align`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .errors import RamatchError

MATCHERS = {
    "kcot": "KCOT (RAM)",
    "ot": "Optimal transport",
    "bipartite": "Bipartite",
    "average": "Average",
    "reweight": "Re-weighting",
}
CHOICES = {
    "combine": ("mean", "sum"),
    "tss_input": ("before", "after"),
    "tss_labels": ("unit", "raw"),
    "tss_init": ("default", "zero"),
    "mask_conv": ("depthwise", "full"),
    "prompts": ("none", "deep", "coop", "dualcoop"),
    "matcher": tuple(MATCHERS),
    "teacher": ("labels", "regions"),
    "teacher_floor": ("image", "batch"),
    "stop": ("marginal", "scaling"),
    "plan_scale": ("labels", "one"),
    "score": ("softmax", "cosine", "joint", "partial"),
    "pixels": ("backbone", "half"),
    "pooled": ("frozen", "adapted"),
}


# Settings that a trained model may be tested with in another way: they touch matching and scores, not what was learned.
AT_TEST = (
    "matcher", "lambda1", "lpd", "tau_u", "max_iter", "stop", "tol", "plan_scale", "max_weight", "score", "region_share",
    "best_share", "partial_share",
)  # fmt: skip


@dataclass(frozen=True)
class RAMConfig:
    """All settings of the model. Defaults are ours (`PRESETS["ramatch"]`)."""

    # Recover (Section 4.2)
    adapted_layers: int = 3  # last layers with TSS and visual prompts (l_s = 10 of 12)
    saa_layers: int = (
        3  # last layers whose SAA feeds the local stream; -1: all; 0: no local stream, the main one's patches
    )
    tss: bool = True
    tss_input: str = "before"  # TSS reads the features before or after the layer
    tss_labels: str = "unit"  # label features of unit length, or as the text tower gives them
    tss_init: str = "default"  # zero: training starts from the frozen model's regions
    combine: str = "mean"  # of SAA and TSS
    tss_share: float = (
        1.0  # of what TSS learned, outside training: less keeps closer to the frozen model, and unseen labels
    )
    mask_conv: str = "depthwise"
    mask_kernel: int = 3
    visual_prompts: int = 8
    pooled: str = (
        "frozen"  # which regions join the global feature of a backbone that pools them: the tower's or the adapted
    )
    pixels: str = "backbone"  # normalisation: the backbone's own, or mean = std = 0.5
    # Label set (Section 4.1)
    templates: tuple[str, ...] = ("A photo of a {}.",)
    prompts: str = "deep"
    prompt_tokens: int = 4
    prompt_layers: int = 3
    # Match (Section 4.3)
    matcher: str = "kcot"
    lambda1: float = 0.1
    lambda2: float = 0.05
    lpd: bool = True
    tkt: bool = True
    tau_u: float | None = None  # LPD temperature; None: CLIP's own, 1 / logit_scale
    teacher: str = "labels"  # softmax over labels; or that, times 20, then over regions
    teacher_floor: str = "image"  # absent labels get the smallest entry of the image or of the batch
    max_iter: int = 100
    stop: str = "marginal"  # L1 error of the marginal; or the mean change of the scaling over the batch
    tol: float = 1e-4
    # Score (Section 4.4)
    plan_scale: str = "labels"  # plan times N, so that s_R does not depend on the vocabulary's size; or as it is
    score: str = (
        "cosine"  # softmax: mean of two softmaxes over labels; joint: one softmax; cosine: mean of s_G and s_R;
    )
    # partial: that mean less a part of its log-sum-exp over labels
    region_share: float = 0.5  # of s_R in those means (cosine, partial), beside s_G
    best_share: float = 0.0  # of each label's best region in that s_R, beyond `max_weight`: for ranking only
    partial_share: float = 0.5  # of the log-sum-exp that `partial` takes off
    max_weight: float = 0.0  # share of the best region's cosine in s_R beside the plan (0: the paper's)
    tau_global: float | None = None  # start of the learnable temperature; None: 1 / logit_scale
    tau_region: float | None = 0.01  # likewise

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise RamatchError(f"setting '{name}' is '{value}'; it must be one of {', '.join(allowed)}")
        for name in ("lambda1", "tol"):
            if not getattr(self, name) > 0:
                raise RamatchError(f"setting '{name}' must be positive, got {getattr(self, name)}")
        for name in ("lambda2", "visual_prompts", "adapted_layers", "prompt_tokens", "prompt_layers"):
            if getattr(self, name) < 0:
                raise RamatchError(f"setting '{name}' must not be negative, got {getattr(self, name)}")
        if self.mask_kernel % 2 == 0 or self.max_iter < 1 or self.saa_layers < -1:
            raise RamatchError("mask_kernel must be odd, max_iter at least 1, saa_layers at least -1")
        for name in ("max_weight", "tss_share", "region_share", "best_share", "partial_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise RamatchError(f"setting '{name}' must lie in [0, 1], got {getattr(self, name)}")
        if self.best_share and self.plan_scale == "one":
            raise RamatchError("best_share needs plan_scale 'labels': a plan as it is and a cosine are not of one size")
        for name in ("tau_u", "tau_global", "tau_region"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RamatchError(f"setting '{name}' must be positive or null, got {value}")
        object.__setattr__(self, "templates", tuple(self.templates))
        if not self.templates:
            raise RamatchError("setting 'templates' is empty; give at least one, such as 'A photo of a {}.'")
        for template in self.templates:
            if template.count("{}") != 1:
                raise RamatchError(f"template '{template}' must contain {{}} exactly once, where the label goes")

    def replace(self, **changes: Any) -> RAMConfig:
        """A copy with some settings changed; unknown names are an error."""
        unknown = set(changes) - {f.name for f in dataclasses.fields(self)}
        if unknown:
            known = ", ".join(f.name for f in dataclasses.fields(self))
            raise RamatchError(f"unknown setting(s) {', '.join(sorted(unknown))}; known: {known}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"templates": list(self.templates)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RAMConfig:
        return cls().replace(**values)


PRESETS: dict[str, RAMConfig] = {
    "ramatch": RAMConfig(
        tss_init="zero",
        tss_input="after",
        tss_share=0.7,
        max_weight=0.75,
        region_share=0.6,
        best_share=0.5,
    ),
    # for encoders made by `ramatch align`: DINOv2's final patches are local already and appended tokens upset its attention
    "aligned": RAMConfig(
        tss_init="zero",
        tss_input="after",
        max_weight=0.75,
        region_share=0.7,
        best_share=0.5,
        templates=("{}", "{}s"),
        saa_layers=0,
        visual_prompts=0,
        prompts="none",
        pooled="adapted",
        tss_share=0.7,
        tau_region=None,
    ),
    "paper": RAMConfig(tss_labels="raw", plan_scale="one", score="softmax", tau_region=2e-3),
    "reference": RAMConfig(
        saa_layers=-1,
        combine="sum",
        tss_labels="raw",
        tss_input="after",
        mask_conv="full",
        tau_u=0.1,
        teacher="regions",
        teacher_floor="batch",
        stop="scaling",
        tol=1e-3,
        plan_scale="one",
        score="softmax",
        tau_region=2e-3,
        pixels="half",
    ),
}


def preset(name: str, **changes: Any) -> RAMConfig:
    """The named preset, with changes."""
    if name not in PRESETS:
        raise RamatchError(f"unknown preset '{name}'; known: {', '.join(PRESETS)}")
    return PRESETS[name].replace(**changes)
