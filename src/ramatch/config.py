"""Names, settings and presets of RAM. Importing this does not load torch: the command line, the server's schema, the
page, the documentation and the tests read their lists here.

Every point on which the paper and the authors' program differ is a named field; `PRESETS["paper"]` and
`PRESETS["reference"]` are the two readings, `PRESETS["ramatch"]` is ours, `PRESETS["aligned"]` ours for encoders of
`ramatch align`, `PRESETS["aligned-best"]` what that was before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from .errors import RamatchError
from .settings import Bound, Count, Natural, NotNegative, OneOf, Positive, Settings, Share

# The lists. A matcher or a loss is a function of that name in `modeling/matching.py` or `modeling/losses.py`; a test
# compares those with these.
MATCHERS = {
    "kcot": "KCOT (RAM)",
    "ot": "Optimal transport",
    "bipartite": "Bipartite",
    "average": "Average",
    "reweight": "Re-weighting",
}
# The systems RAM is compared with, by the name of their module in `methods/`, with whose they are.
METHODS = {
    "ram": "Recover and Match (Tan et al., CVPR 2025)",
    "clip": "zero-shot CLIP: the global feature alone (Radford et al., ICML 2021)",
    "coop": "CoOp: a learned context before each label (Zhou et al., IJCV 2022)",
    "dualcoop": "DualCoOp: positive and negative contexts, matched with each region (Sun et al., NeurIPS 2022)",
    "dualcoop-pp": "DualCoOp++: an evidential context besides, and winner-take-all (Hu et al., TPAMI 2023)",
    "comc": "after the abstract of CoMC: a classifier that learns from sentences (Liu et al., ICML 2024)",
    "mkt": "MKT: a distilled student with a global and a top-k head (He et al., AAAI 2023)",
    "ml-decoder": "ML-Decoder: labels as queries over patches (Ridnik et al., WACV 2023)",
    "biam": "BiAM: regions in the light of each other and the scene (Narayan et al., ICCV 2021)",
    "lesa": "LESA: attentions that all labels share (Huynh and Elhamifar, CVPR 2020)",
    "sdl": "SDL: several vectors for each image (Ben-Cohen et al., ICCV 2021)",
    "deep0tag": "Deep0Tag: a bag of instances (Rahman et al., TMM 2019)",
    "tagclip": "TagCLIP: patches, refined by attention, and their crops (Lin et al., AAAI 2024)",
    "sparc": "SPARC: standardized scores and compound prompts (Miller et al., CVPR 2025)",
    "piaa": "PIAA: a classifier from unlabelled patches (Wang et al., ICML 2026)",
}
LOSSES = ("mmc", "mmc-image", "asl", "ranking", "sigmoid", "sigmoid-smooth")
SCORES = ("softmax", "cosine", "joint", "partial")
PROMPTS = ("none", "deep", "coop", "dualcoop", "dualcoop++")
STOPS = ("marginal", "scaling")
RESIZES = ("bicubic", "bilinear")
PRECISIONS = ("fp32", "bf16", "fp16")
WEIGHTS = ("fp32", "fp16", "int8")  # on disk
RUNTIMES = ("auto", "torch", "openvino", "openvino-int8", "onnx")  # of the image part, on a CPU
ENGINES = ("local", "ray")  # what runs a model on many images
MAPS = ("similarity", "plan", "both", "fine")
PARTS = ("all", "val", "test")  # of images with masks: settings are chosen on val, figures are of test
PROTOCOLS = ("zsl", "gzsl")
# what the mark of a label says whose probability is not to be trusted (the page says the same)
GUESS = "take the number as a guess: ramatch hardly knows the word, or captions often leave it out"

# Settings that a trained model may be tested with in another way: they touch matching and scores, not what was learned.
TEST_SETTINGS = (
    *("matcher", "cost", "relax", "lambda1", "lpd", "tau_u", "max_iter", "stop", "tol"),
    *("plan_scale", "max_weight", "score", "region_share", "best_share", "partial_share"),
)


@dataclass(frozen=True)
class RAMConfig(Settings):
    """All settings of the model. Defaults are ours (`PRESETS["ramatch"]`)."""

    # Recover (Section 4.2)
    adapted_layers: Natural = 3  # last layers with TSS and visual prompts (l_s = 10 of 12)
    saa_layers: Annotated[int, Bound(-1)] = 3  # last layers whose SAA feeds the local stream; -1: all; 0: no stream
    tss: bool = True
    tss_input: Annotated[str, OneOf(("before", "after"))] = "before"  # the layer: whose features TSS reads
    tss_labels: Annotated[str, OneOf(("unit", "raw"))] = "unit"  # label features: scaled to 1, or as the tower has them
    tss_init: Annotated[str, OneOf(("default", "zero"))] = "default"  # zero: training starts from the frozen regions
    combine: Annotated[str, OneOf(("mean", "sum"))] = "mean"  # of SAA and TSS
    tss_share: Share = 1.0  # of what TSS learned, outside training: less keeps closer to the frozen model
    mask_conv: Annotated[str, OneOf(("depthwise", "full"))] = "depthwise"
    mask_kernel: Count = 3
    visual_prompts: Natural = 8
    pooled: Annotated[str, OneOf(("frozen", "adapted"))] = "frozen"  # regions in a pooling backbone's global feature
    pixels: Annotated[str, OneOf(("backbone", "half"))] = "backbone"  # normalized as there, or mean = std = 0.5
    resize: Annotated[str, OneOf(RESIZES)] = "bicubic"
    # Label set (Section 4.1)
    templates: tuple[str, ...] = ("A photo of a {}.",)
    prompts: Annotated[str, OneOf(PROMPTS)] = "deep"
    prompt_tokens: Natural = 4
    prompt_layers: Natural = 3
    # Match (Section 4.3)
    matcher: Annotated[str, OneOf(tuple(MATCHERS))] = "kcot"
    cost: Annotated[str, OneOf(("softmax", "cosine"))] = "softmax"  # 1 − softmax over labels; 1 − cosine, × logit scale
    relax: Positive | None = None  # KL weight of the regions' marginal, which then need not hold; None: it holds
    lambda1: Positive = 0.1
    lambda2: NotNegative = 0.05
    lpd: bool = True
    tkt: bool = True
    tau_u: Positive | None = None  # LPD temperature; None: CLIP's own, 1 / logit_scale
    teacher: Annotated[str, OneOf(("labels", "regions"))] = "labels"  # softmax over labels; or that ×20, over regions
    teacher_floor: Annotated[str, OneOf(("image", "batch"))] = "image"  # absent labels get the smallest entry of this
    max_iter: Count = 100
    stop: Annotated[str, OneOf(STOPS)] = "marginal"  # L1 error of the marginal; or the mean change of each row scaling
    tol: Positive = 1e-4
    # Score (Section 4.4)
    plan_scale: Annotated[str, OneOf(("labels", "one"))] = "labels"  # plan × N: s_R does not depend on N; or as it is
    score: Annotated[str, OneOf(SCORES)] = "cosine"  # softmax: mean of two softmaxes over labels; joint: one softmax;
    # cosine: mean of s_G and s_R; partial: that mean less a part of its log-sum-exp over labels
    region_share: Share = 0.5  # of s_R in those means (cosine, partial), beside s_G
    best_share: Share = 0.0  # of each label's best region in that s_R, beyond `max_weight`: for ranking only
    partial_share: Share = 0.5  # of the log-sum-exp that `partial` takes off
    max_weight: Share = 0.0  # share of the best region's cosine in s_R beside the plan (0: the paper's)
    tau_global: Positive | None = None  # start of the learnable temperature; None: 1 / logit_scale
    tau_region: Positive | None = 0.01  # likewise

    def check(self) -> None:
        if self.mask_kernel % 2 == 0:
            raise RamatchError(f"setting 'mask_kernel' must be odd, got {self.mask_kernel}")
        if self.stop == "scaling" and (self.relax is not None or self.cost != "softmax"):
            raise RamatchError("stop 'scaling' is the authors' rule for cost 'softmax' and marginals that hold")
        if self.best_share and self.plan_scale == "one":
            raise RamatchError("best_share needs plan_scale 'labels': a plan as it is and a cosine are not of one size")
        if not self.templates:
            raise RamatchError("setting 'templates' is empty; give at least one, such as 'A photo of a {}.'")
        for template in self.templates:
            if template.count("{}") != 1:
                raise RamatchError(f"template '{template}' must contain {{}} exactly once, where the label goes")

    def frozen(self, layers: int) -> RAMConfig:
        """The same without any learned part, for a tower of so many layers."""
        counts = {name: min(getattr(self, name), layers) for name in ("adapted_layers", "saa_layers")}
        return self.replace(tss=False, visual_prompts=0, prompts="none", **counts)


_OURS = RAMConfig(tss_init="zero", tss_input="after", tss_share=0.7, max_weight=0.75, region_share=0.6, best_share=0.5)
_PAPER = RAMConfig(tss_labels="raw", plan_scale="one", score="softmax", tau_region=2e-3)
# for encoders of `ramatch align`: DINOv2's final patches are local already, and more tokens upset its attention
_ALIGNED = _OURS.replace(
    region_share=0.7,
    templates=("{}", "{}s"),
    saa_layers=0,
    visual_prompts=0,
    prompts="none",
    pooled="adapted",
    tau_region=None,
)
PRESETS: dict[str, RAMConfig] = {
    "ramatch": _OURS,
    # the plan alone, nothing borrowed from the best region: `ramatch study kcot` says what each change is worth
    "aligned": _ALIGNED.replace(
        cost="cosine",
        relax=1.0,
        lambda1=1.0,
        lambda2=0.3,
        tau_u=0.1,
        max_weight=0.0,
        best_share=0.0,
        region_share=0.6,
    ),
    "aligned-best": _ALIGNED,  # the recipes' and ramatch-mini's
    "paper": _PAPER,
    "reference": _PAPER.replace(
        saa_layers=-1,
        combine="sum",
        tss_input="after",
        mask_conv="full",
        tau_u=0.1,
        teacher="regions",
        teacher_floor="batch",
        stop="scaling",
        tol=1e-3,
        pixels="half",
        resize="bilinear",
    ),
}


def preset(name: str, **changes: Any) -> RAMConfig:
    """The named preset, with changes."""
    if name not in PRESETS:
        raise RamatchError(f"unknown preset '{name}'; known: {', '.join(PRESETS)}")
    return PRESETS[name].replace(**changes)
