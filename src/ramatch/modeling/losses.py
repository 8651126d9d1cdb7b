"""Losses (Section 4.4, appendix A.6). All take logits (B, N) and targets (B, N): 1 present, 0 absent, −1 not known
(the pair is left out of the loss)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Gather = Callable[[Tensor], tuple[Tensor, int]]  # all processes' tensors joined along the first axis, and how many


def mmc(logits: Tensor, targets: Tensor, *, batch: bool = True, gather: Gather | None = None) -> Tensor:
    """Multi-matching contrastive loss (Eq. 12): every positive against all pairs of the batch, or (`batch=False`)
    of its own image. `gather` gives logits and targets of all processes, so that the denominator spans the global batch.

    Scaled so that, averaged over processes as DistributedDataParallel does, gradients equal those of one process
    with the whole batch. A batch without positives gives zero.
    """
    logits = logits.float()
    positive = targets > 0
    count = positive.sum()
    known = logits.masked_fill(targets < 0, float("-inf"))
    if batch:
        everything, world = (known, 1) if gather is None else gather(known)
        denominator = everything.flatten().logsumexp(0)
    else:
        denominator, world = known.logsumexp(-1, keepdim=True), 1
    if gather is not None:
        total, world = gather(count.float()[None])
        count = total.sum()
    losses = torch.where(positive, denominator - logits, 0.0)
    return losses.sum() * world / count.clamp(min=1)


def asl(
    logits: Tensor, targets: Tensor, *, gamma_pos: float = 0.0, gamma_neg: float = 4.0, clip: float = 0.05
) -> Tensor:
    """Asymmetric loss (Ridnik et al., 2021): focusing by gamma, negatives below `clip` ignored; mean over pairs."""
    logits = logits.float()
    p = logits.sigmoid()
    easy = (1 - p + clip).clamp(max=1)
    positive = F.logsigmoid(logits) * (1 - p) ** gamma_pos
    negative = easy.clamp(min=1e-8).log() * (1 - easy) ** gamma_neg
    losses = torch.where(targets > 0, positive, negative).masked_fill(targets < 0, 0.0)
    return -losses.sum() / (targets >= 0).sum().clamp(min=1)


def ranking(logits: Tensor, targets: Tensor, *, margin: float = 1.0) -> Tensor:
    """Ranking loss (Gong et al., 2013): hinge over every (positive, negative) pair of an image; mean over the batch."""
    logits = logits.float()
    positive, negative = targets > 0, targets == 0
    gaps = (margin + logits[:, None, :] - logits[:, :, None]).clamp(min=0)  # (B, positive i, negative j)
    return (gaps * (positive[:, :, None] & negative[:, None, :])).sum() / max(len(logits), 1)


def sigmoid(logits: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Every pair on its own (Zhai et al., 2023), per positive: positives do not compete with each other, nor labels with labels.

    The bias that cross-entropy wants here is the one at which as many are expected as are there; it is found for each
    batch by bisection instead of being learned (no gradient flows through it: at that point its own is zero).
    `smoothing`: the probability with which an absent label is there after all, for annotations that miss some.
    """
    logits = logits.float()
    positive, known = targets > 0, targets >= 0
    with torch.no_grad():
        there = (positive + smoothing * (known & ~positive)).sum().clamp(min=0.5).float()
        low, high = (-logits.amax() - 30).double(), (-logits.amin() + 30).double()
        for _ in range(40):
            middle = (low + high) / 2
            more = torch.where(known, (logits + middle).sigmoid(), 0.0).sum() > there
            low, high = torch.where(more, low, middle), torch.where(more, middle, high)
        bias = ((low + high) / 2).float()
    shifted = logits + bias
    absent = F.softplus(shifted) if not smoothing else F.softplus(shifted) - smoothing * shifted
    losses = torch.where(positive, F.softplus(-shifted), absent).masked_fill(~known, 0.0)
    return losses.sum() / positive.sum().clamp(min=1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mmc": mmc,
    "mmc-image": lambda logits, targets, **options: mmc(logits, targets, batch=False, **options),
    "asl": asl,
    "ranking": ranking,
    "sigmoid": sigmoid,
    "sigmoid-smooth": lambda logits, targets: sigmoid(logits, targets, smoothing=0.01),
}
