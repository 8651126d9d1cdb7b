"""Losses (Section 4.4, appendix A.6). All take logits (B, N) and targets (B, N): 1 present, 0 absent, −1 not known
(the pair is left out of the loss)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Gather = Callable[[Tensor], tuple[Tensor, int]]  # all processes' tensors joined along the first axis, and how many


def mmc(logits: Tensor, targets: Tensor, *, gather: Gather | None = None) -> Tensor:
    """Multi-matching contrastive loss (Eq. 13, again as Eq. 22): every positive against all pairs of the batch, mean
    over the batch's positives; none give zero.

    With `gather` both span the batches of all processes, scaled so that gradients, averaged over processes as
    DistributedDataParallel does, equal those of one process with the whole batch.
    """
    logits, positive = logits.float(), targets > 0
    everything, count, world = _known(logits, targets), positive.sum().float()[None], 1
    if gather is not None:
        everything, world = gather(everything)
        count, _ = gather(count)
    losses = torch.where(positive, everything.flatten().logsumexp(0) - logits, 0.0)
    return losses.sum() * world / count.sum().clamp(min=1)


def mmc_image(logits: Tensor, targets: Tensor, *, gather: Gather | None = None) -> Tensor:
    """MMC without the batch (Eq. 21): every positive against the labels of its own image, mean over the image's
    positives, sum over images. (The paper's sum over i in P is implied: its 1/|P| is of a single image.)"""
    logits, positive = logits.float(), targets > 0
    losses = torch.where(positive, _known(logits, targets).logsumexp(-1, keepdim=True) - logits, 0.0)
    return (losses.sum(-1) / positive.sum(-1).clamp(min=1)).sum() * _processes(losses, gather)


def _known(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits of known labels; the others drop out of a log-sum-exp."""
    return logits.masked_fill(targets < 0, float("-inf"))


def _processes(like: Tensor, gather: Gather | None) -> int:
    """How many processes share a batch: factor of a sum over images, since DistributedDataParallel takes the mean."""
    return 1 if gather is None else gather(like.new_zeros(1))[1]


def asl(
    logits: Tensor, targets: Tensor, *, gamma_pos: float = 0.0, gamma_neg: float = 4.0, clip: float = 0.05
) -> Tensor:
    """Asymmetric loss (Eq. 19; Ridnik et al., 2021): focusing by gamma, negatives below `clip` ignored; pairs' mean."""
    logits = logits.float()
    p = logits.sigmoid()
    easy = (1 - p + clip).clamp(max=1)
    positive = F.logsigmoid(logits) * (1 - p) ** gamma_pos
    negative = easy.clamp(min=1e-8).log() * (1 - easy) ** gamma_neg
    losses = torch.where(targets > 0, positive, negative).masked_fill(targets < 0, 0.0)
    return -losses.sum() / (targets >= 0).sum().clamp(min=1)


def ranking(logits: Tensor, targets: Tensor, *, margin: float = 1.0, gather: Gather | None = None) -> Tensor:
    """Ranking loss (Eq. 20; Gong et al., 2013): hinge over every (positive, negative) pair of an image, summed over
    pairs and images: as large as the paper says it is."""
    costs, _ = _pair_costs(logits, targets, lambda gaps: (margin + gaps).clamp(min=0))
    return costs.sum() * _processes(costs, gather)


def pairwise(logits: Tensor, targets: Tensor, *, smooth: bool = False) -> Tensor:
    """Each image's own ranking loss, mean over its (positive, negative) pairs, (B,): hinge of margin 1, or `smooth`,
    log(1 + exp(s_negative − s_positive)) (RankNet; Burges et al., 2005). An image without a pair has none."""
    costs, pairs = _pair_costs(logits, targets, F.softplus if smooth else lambda gaps: (1 + gaps).clamp(min=0))
    return costs / pairs.clamp(min=1)


def _pair_costs(logits: Tensor, targets: Tensor, cost: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """`cost` of s_negative − s_positive, summed over each image's pairs, and how many pairs there are; both (B,)."""
    logits = logits.float()
    positive, negative = targets > 0, targets == 0
    costs = cost(logits[:, None, :] - logits[:, :, None])  # (B, positive i, negative j)
    costs = costs * (positive[:, :, None] & negative[:, None, :])
    return costs.sum((1, 2)), positive.sum(1) * negative.sum(1)


def sigmoid(logits: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Every pair on its own (Zhai et al., 2023), per positive: no competition of positives or of labels.

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
    "mmc-image": mmc_image,
    "asl": asl,
    "ranking": ranking,
    "sigmoid": sigmoid,
    "sigmoid-smooth": lambda logits, targets: sigmoid(logits, targets, smoothing=0.01),
}
GATHERED = ("mmc", "mmc-image", "ranking")  # losses that take `gather`
