"""`ramatch align`: one space for a vision tower and a text tower.

Losses, with equal weight: captions against images of the batch (InfoNCE) and concepts against each other, each on the
global feature and on the pooled regions; mosaics of four images have concepts only. A concept is a meaning: words that
captions say, joined with their synonyms and with what they are a kind of by a lexicon, and each step reads it in
another of its wordings. A smaller loss keeps all words of the lexicon as near to each other as the text tower had them.
Teachers, if there are any, add how likely they find all that captions leave open.
Only the last vision layers, the text layers and the two projections learn; what lies below in the vision tower is
cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..data.augment import mosaics
from ..data.decode import decode_all
from ..data.lexicon import Lexicon, all_words
from ..data.sampler import ResumableSampler
from ..errors import RamatchError
from ..evaluation.retrieval import retrieval
from ..files import new_folder, whole_folder, write_json, write_text
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.folder import save_backbone
from ..modeling.kernels.ops import smooth_max
from ..modeling.preprocess import Preprocess
from ..recognizer import pick_device
from ..settings import Bound, Count, Natural, NotNegative, OneOf, Positive, Share
from .assemble import join_towers, set_image_size
from .config import LoopConfig, OptimConfig
from .distributed import World
from .features import FeatureCache, Stem, Views, cache_features
from .optim import Limit, Roles
from .targets import ConceptConfig, Known, Sources, Told, known_concepts
from .task import Batch, Task
from .teachers import Answers, ask, look, plain_regions
from .texts import Captions, Phrases, Texts, plain
from .trainer import Trainer, seed_all

Log = Callable[[dict[str, Any]], None]
SHARPEST = 200.0  # largest 1 / temperature
MEANINGS, NEARNESS = 512, 10.0  # words compared with each other in a step, and how sharply


@dataclass(frozen=True)
class AlignConfig(ConceptConfig, LoopConfig):
    """Defaults are the ones `ramatch-mini` was aligned with, but for its teachers and `final_size=224`. The word
    embeddings stay frozen."""

    image_size: Count = 196
    final_size: Natural = 0  # of images once training is done, for finer regions than it had; 0: the same
    dim: Count = 384
    # one visual head for class token and patches; the global feature is their sum
    global_pool: Annotated[str, OneOf(("cls", "cls+mean"))] = "cls+mean"
    # last layers whose self-aware attention makes the regions; 0: the tower's final patches
    saa_layers: Annotated[int, Bound(-1)] = 0
    vision_layers: Natural = 3  # last vision layers that are tuned
    epochs: Count = 15
    batch_size: Annotated[int, Bound(2)] = 512
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=1e-3, temperature_lr=1e-2, weight_decay=0.05, betas=(0.9, 0.98), warmup=0.06, ema_decay=0.0
        )
    )
    beta: Positive = 20.0  # log-mean-exp pooling of regions
    caption_weight: NotNegative = 1.0
    tag_weight: NotNegative = 1.0
    tag_across: Share = 0.5  # share of the tag loss that compares images for one tag rather than tags for one image
    even_tags: bool = True  # there every tag counts alike, however many images have it
    # share of the negatives, the likeliest ones, left out after a quarter of training: captions omit much
    leave_out: Annotated[float, Bound(0, 0.5, below=True)] = 0.003
    max_tags: Count = 6000
    min_images: Count = 5
    name_share: Share = 0.6  # how often a concept is read by its plain name rather than in other words
    meaning_weight: NotNegative = 0.5  # of holding the words of the lexicon as near to each other as they were
    teachers: tuple[str, ...] = ()  # folders of backbones aligned before, to learn from as well
    teacher_weight: NotNegative = 1.0
    mosaics: NotNegative = 0.5  # pictures of four, with the tags of all four, for each image of a batch (0: none)
    views: Count = 4  # of each image: as it is, its mirror, random parts
    crop: Annotated[float, Bound(0, 1, above=True)] = 0.5  # smallest share of the image a part keeps


@dataclass
class AlignResult:
    """The aligned backbone, the concepts' names, the log, and seconds of training."""

    backbone: Backbone
    tags: tuple[str, ...]
    log: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class AlignTask(Task):
    """What learns: last vision layers, text layers, projections, and a temperature for each of the four losses.

    From uint8 images (n, 3, h, w) of any size, their captions and concepts; caches the frozen features and what
    teachers answer."""

    def __init__(
        self,
        backbone: Backbone,
        config: AlignConfig,
        images: Tensor,
        captions: Sequence[Sequence[str]],
        known: Known,
        *,
        lexicon: Lexicon | None = None,
        on_log: Log | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.config, self.on_log = backbone, config, on_log
        device, layers = backbone.device, len(backbone.vision.blocks)
        if config.vision_layers > layers:
            raise RamatchError(f"vision_layers is {config.vision_layers}, but the vision tower has {layers} layers")
        self.ladder = plain_regions(backbone, config.saa_layers, config.vision_layers)
        self.log_scales = nn.Parameter(torch.full((4,), math.log(20.0), device=device))
        for part in self.roles().values():
            for parameter in part:
                parameter.requires_grad_(True)
        self.sums = torch.zeros(6 if config.teachers else 5, device=device)
        self.log: list[dict[str, Any]] = []
        stem = Stem(partial(self.ladder.stem, backbone), backbone.preprocess, device, config.dtype(device))
        self.answers: Answers | None = None
        if config.teachers:
            sentences = [c for texts in captions for c in texts] or [""]
            asking: dict[str, Any] = {"device": device, "dtype": stem.dtype, "beta": config.beta}
            self.answers = ask(config.teachers, images, sentences, known.texts, **asking)
        self.cache = cache_features(stem, images, Views(config.views, config.crop, config.seed))
        self.mosaics: FeatureCache | None = None
        if config.mosaics:
            generator = torch.Generator().manual_seed(config.seed)
            shown, sources = mosaics(images, len(images), backbone.preprocess.size, generator, device)
            self.mosaics = cache_features(stem, shown, Views(min(2, config.views)))
            self.sources = sources.to(device)
        self.targets, self.captions = known.targets.to(device), Captions(backbone, captions)
        self.concepts = Phrases(backbone, known.texts, config.name_share)
        self.meanings: Phrases | None = None
        if config.meaning_weight and lexicon is not None:
            self.meanings = Phrases(backbone, all_words(lexicon, known.texts), config.name_share)
            self.before = plain(backbone, self.meanings.ids, self.meanings.lengths)
        self.sampler = ResumableSampler(len(images), config.seed, min(config.batch_size, len(images)))
        self.total = config.epochs * self.sampler.batches_per_epoch

    def roles(self) -> Roles:
        b = self.backbone
        assert b.text is not None
        assert b.text_projection is not None
        tuned = [b.vision.blocks[self.ladder.first :], b.vision.norm, *([b.vision.pool] if b.vision.pool else [])]
        return {
            "adapters": [*b.visual_projection.parameters(), *b.text_projection.parameters()],
            "text": list(b.text.blocks.parameters()),
            "vision": [p for part in tuned for p in part.parameters()],
            "temperatures": [self.log_scales],
        }

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}

    def limits(self, floor: float) -> list[Limit]:
        return [(self.log_scales, None, math.log(SHARPEST))]

    def read(self, texts: Texts, rows: Tensor) -> Tensor:
        """Unit text features (N, D). cuDNN's attention takes several times as long for thousands of short texts."""
        b = self.backbone
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            pooled = b.require_text("aligning")(*texts.tokens(rows))
            return F.normalize(b.project_text(pooled).float(), dim=-1)

    def masks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Positive and negative concepts (B, C) of these images (B,), or of pictures that show several each (B, 4)."""
        targets = self.targets[rows]
        if rows.ndim == 1:
            return targets == 1, targets == 0
        return (targets == 1).any(1), (targets == 0).all(1)

    def batches(self) -> Iterable[Batch]:
        """(views, rows, whether the likeliest negatives are left out yet)."""
        begun = self.sampler.epoch * self.sampler.batches_per_epoch + self.sampler.position // self.sampler.batch_size
        for i, (view, rows) in enumerate(self.cache.batches(self.sampler)):
            yield view, rows, torch.full((1,), 4 * (begun + i) >= self.total, device=rows.device)

    def forward(self, view: Tensor, rows: Tensor, late: Tensor) -> Tensor:
        config, dtype = self.config, self.cache.streams.x.dtype
        with torch.autocast(rows.device.type, dtype, enabled=dtype != torch.float32):
            losses = self._losses(view, rows, late)
        self.sums += losses.detach()
        parts = (config.caption_weight, config.caption_weight, config.tag_weight, config.tag_weight)
        weights = (*parts, config.meaning_weight, config.teacher_weight)[: len(losses)]
        return torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()

    def _losses(self, view: Tensor, rows: Tensor, late: Tensor) -> Tensor:
        """Caption loss on global and regions, concept loss on global and regions, loss of meanings, and where there are
        teachers, of what they say: (5,) or (6,)."""
        config, scales = self.config, self.log_scales.exp()
        seen = look(self.backbone, self.ladder, self.cache.pick(view, rows))
        which = self.captions.pick(rows)
        captions, tags = self.read(self.captions, which), self.read(self.concepts, self.concepts.pick())
        told, shown = self._logits(seen, captions, scales[:2]), self._logits(seen, tags, scales[2:])
        found = [caption_loss(logits, self.captions.counts[rows] > 0) for logits in told]
        found += self._tag_losses(shown, self.masks(rows), late)
        count = round(config.mosaics * len(rows))
        if self.mosaics is not None and count:
            some = torch.randint(len(self.sources), (count,), device=rows.device)
            view = torch.randint(self.mosaics.views, (count,), device=rows.device)
            fours = look(self.backbone, self.ladder, self.mosaics.pick(view, some))
            logits = self._logits(fours, tags, scales[2:])
            more = self._tag_losses(logits, self.masks(self.sources[some]), late)
            found[2:] = [a + config.mosaics * b for a, b in zip(found[2:], more, strict=True)]
        found.append(torch.zeros_like(found[0]) if self.meanings is None else self._meaning_loss(self.meanings))
        if self.answers is not None:
            wanted = (self.answers.of_captions(rows, which), self.answers.tags[rows].float())
            across = (0.5, config.tag_across)
            taught = map(self._teacher_loss, (told, shown), self.log_scales.view(2, 2), wanted, across)
            found.append(torch.stack(list(taught)).sum())
        return torch.stack(found)

    def _logits(self, seen: tuple[Tensor, Tensor], texts: Tensor, scales: Tensor) -> list[Tensor]:
        """Of texts (N, D) with global features (B, D) and, pooled, with regions (B, M, D); (B, N) each. Cosines of
        single regions are the largest tensor of the step, in bf16 under autocast."""
        image, regions = seen
        return [image @ texts.T * scales[0], smooth_max(regions @ texts.T, self.config.beta) * scales[1]]

    @staticmethod
    def _teacher_loss(found: list[Tensor], log_scales: Tensor, wanted: Tensor, across: float) -> Tensor:
        """Logits (B, N) of the global feature and of regions beside teachers' cosines (B, N), as sharp: each row should
        be as theirs is, and each column, of which `across` is the share."""
        losses = []
        for logits, scale in zip(found, log_scales.detach().exp(), strict=True):
            teacher = wanted * scale
            losses.append(torch.lerp(_divergence(logits, teacher), _divergence(logits.T, teacher.T), across))
        return torch.stack(losses).sum()

    def _meaning_loss(self, meanings: Phrases) -> Tensor:
        """Two wordings of each of some meanings: each should find the other, and otherwise what the text tower found
        near it before it was tuned."""
        rows = torch.randint(len(meanings.first), (MEANINGS,), device=meanings.first.device)
        one, other = meanings.pick(rows), meanings.pick(rows)
        wanted = (self.before[one] @ self.before[other].T).fill_diagonal_(1.0) * NEARNESS
        logits = self.read(meanings, one) @ self.read(meanings, other).T * (2 * NEARNESS)
        return _divergence(logits, wanted)

    def _tag_losses(self, found: list[Tensor], masks: tuple[Tensor, Tensor], late: Tensor) -> list[Tensor]:
        """Concept loss of each of some logits (B, C), where concepts are present and where they are absent (B, C)."""
        config, (positive, negative), losses = self.config, masks, []
        options: dict[str, Any] = {"leave_out": config.leave_out, "late": late}
        for logits in found:
            loss = contrast(logits, positive, negative, **options)  # which tags of this image
            if config.tag_across:  # which images of this tag: what ranks images for a label
                across = contrast(logits.T, positive.T, negative.T, even=config.even_tags, **options)
                loss = torch.lerp(loss, across, config.tag_across)
            losses.append(loss)
        return losses

    def end_epoch(self, step: int) -> None:
        epoch = self.sampler.epoch + (self.sampler.position > 0)
        losses = (self.sums / self.sampler.batches_per_epoch).tolist()
        entry = {"epoch": epoch, "step": step, "losses": losses, "scales": self.log_scales.detach().exp().tolist()}
        self.sums.zero_()
        self.log.append(entry)
        if self.on_log is not None:
            self.on_log(entry)


def caption_loss(logits: Tensor, captioned: Tensor) -> Tensor:
    """InfoNCE both ways of images with captions (B, B). Images without one (B,) are for captions to be told from."""
    same = torch.arange(len(logits), device=logits.device)
    one = F.cross_entropy(logits.masked_fill(~captioned, -1e4), same, reduction="none")
    other = F.cross_entropy(logits.T, same, reduction="none")
    return torch.where(captioned, one + other, 0.0).sum() / (2 * captioned.sum().clamp(min=1))


def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Kullback-Leibler divergence of rows' softmax from another's, on average: both (B, N) logits."""
    return F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True)


def contrast(
    scores: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    even: bool = False,
    leave_out: float = 0.0,
    late: Tensor | bool = True,
) -> Tensor:
    """Each positive of a row against the row's negatives only (other positives do not compete); mean over positives.

    scores (B, T), already divided by a temperature; positive, negative: bool (B, T). `even`: the mean of each row
    counts alike. `leave_out`: this share of each row's entries, the highest negatives, is not held against the
    positives, if it is `late`."""
    scores = scores.float()
    masked = scores.masked_fill(~negative, -1e4)
    if count := int(leave_out * scores.shape[1]):
        limit = masked.detach().topk(count, -1).values[:, -1:]
        masked = masked.masked_fill((masked.detach() >= limit) & late, -1e4)
    losses = torch.where(positive, F.softplus(masked.logsumexp(-1, keepdim=True) - scores), 0.0)
    if not even:
        return losses.sum() / positive.sum().clamp(min=1)
    counts = positive.sum(1)
    return (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def align(
    vision: str | Path,
    text: str | Path,
    images: Tensor,
    told: Told,
    config: AlignConfig | None = None,
    *,
    device: str | torch.device | None = None,
    on_log: Log | None = None,
    progress: bool = False,
) -> AlignResult:
    """Align two towers. images: uint8 (n, 3, H, W) of any size; told: what is said of each."""
    config = config or AlignConfig()
    _check(images, told)
    here = World(pick_device(device))
    seed_all(config)
    size, dim, pool = config.image_size, config.dim, config.global_pool
    joined = join_towers(vision, text, image_size=size, dim=dim, global_pool=pool).to(here.device)
    if config.final_size % (patch := joined.vision.config.patch):
        raise RamatchError(f"final_size {config.final_size} is not a multiple of the patch size {patch}")
    lexicon = Lexicon.named(config.lexicon)
    known = known_concepts(told, lexicon, config, lambda names: plain(joined, *joined.tokenize(names)), silent=False)
    if not known.texts and config.tag_weight:
        raise RamatchError(f"no tag occurs in {config.min_images} images; lower min_images or set tag_weight to 0")
    task = AlignTask(joined, config, images, told.captions, known, lexicon=lexicon, on_log=on_log)
    seconds = Trainer(task, config, here, progress=progress).fit()
    backbone = task.backbone.requires_grad_(False)
    if config.final_size:
        set_image_size(backbone, config.final_size)
    scales = task.log_scales.detach()[2:] if config.tag_weight else task.log_scales.detach()[:2]
    backbone.logit_scale = float(scales.mean().exp())
    return AlignResult(backbone.eval(), known.names, task.log, seconds)


def _check(images: Tensor, told: Told) -> None:
    if not len(images) == len(told.captions) == len(told.sentences) or len(images) < 2:
        raise RamatchError(
            f"{len(images)} images and {len(told.captions)} lists of captions: they must be as many, and at least 2"
        )
    bare = [i for i, texts in enumerate(told.sentences) if not texts]
    truth = told.labels.truth
    if bare and (truth is None or bool((truth[bare] < 0).any())):
        raise RamatchError("an image has no caption, no other sentence and no label; leave it out")


def align_folder(
    vision: str | Path,
    text: str | Path,
    data: Sources,
    out: str | Path,
    *,
    config: AlignConfig | None = None,
    device: str | None = None,
    on_log: Log | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Align two towers on a caption data set and write the backbone to `out`, with what was measured beside it."""
    out, config, found = new_folder(out), config or AlignConfig(), data.read()
    preprocess = Preprocess((config.image_size, config.image_size))
    pixels = decode_all(found.records, preprocess, progress=progress)
    result = align(vision, text, pixels, found.told, config, device=device, on_log=on_log, progress=progress)
    report: dict[str, Any] = {"data": found.accounts, "images": len(found.records), "tags": len(result.tags)}
    report |= {"seconds": round(result.seconds, 1), "settings": config.to_dict()}
    if found.held:
        texts = [r.captions for r in found.held]
        held = decode_all(found.held, result.backbone.preprocess)
        report["retrieval"] = retrieval(result.backbone, held, texts)
    with whole_folder(out) as folder:
        save_backbone(result.backbone, folder)
        write_text(folder / "tags.txt", "\n".join(result.tags) + "\n")
        write_json(folder / "alignment.json", report | {"log": result.log})
    return report
