"""Region scores of KCOT at test time straight from similarities, without a plan in memory.

sim (B, M, N) cosines of regions and labels; p = softmax over labels of sim * logit_scale; cost = 1 - p
(Eq. 7); u = softmax over regions of max_labels sim / tau_u (LPD, Eq. 8); v = 1/N; plan = Sinkhorn
(Eq. 12 without a teacher); s_i = sum_k plan[k,i] sim[k,i].

Beyond `DENSE_LABELS` labels almost every p is nearly zero, so almost every column of K = exp((p - 1) / eps) is the
same. The few labels that some region cares about keep their columns, all others share one (cost: their mean, which
the softmax's unit sum gives for free), and the row scalings of that small problem start a test of the whole
plan: its columns are exact, its row marginal is measured, and images that miss the tolerance iterate over all
columns. So what comes out is as good as the plain solver's answer; merging only saves time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ramatch.errors import RamatchError
from ramatch.ot._backend import has_kernels as kernels
from ramatch.ot._loops import CPU_BLOCK_BYTES, TINY, column_sums, row_sums
from ramatch.ot.result import OTResult
from ramatch.ot.solver import EXP_LIMIT, solve_batch

BACKENDS = ("auto", "torch", "triton")
DENSE_LABELS = 2048  # up to here every label keeps its own column
KEPT_COLUMNS = 1023  # beyond, so many do, and one more stands for the rest
WHOLE_TOL = 1e-5  # finest test of a whole plan then: float32 row sums of 20,000 columns are only good to a few 1e-6


@dataclass(frozen=True)
class MatchScores:
    """Region scores of B images. Nothing here carries a gradient."""

    scores: Tensor
    """(B, N) float32, sum over regions of plan * sim (times N unless `scale_plan=False`)."""
    marginal: Tensor
    """(B, M) region weights u."""
    n_iter: Tensor
    """(B,) int64 Sinkhorn iterations."""
    error: Tensor
    """(B,) L1 distance between the plan's row sums and `marginal`."""
    converged: Tensor
    """(B,) bool, error below the tolerance."""


@dataclass(frozen=True)
class _Settings:
    scale: Tensor  # (1,) float32 on the device
    tau_u: float | None
    eps: float
    max_iter: int
    tol: float
    gain: bool

    @property
    def whole_tol(self) -> float:
        return max(self.tol, WHOLE_TOL)

    def marginal(self, top: Tensor) -> Tensor:
        """Region weights (B, M) from each region's largest similarity (Eq. 8)."""
        if self.tau_u is None:
            return torch.full_like(top, 1.0 / top.shape[1])
        return torch.softmax(top / self.tau_u, dim=1)


def match_scores(
    sim: Tensor | None = None,
    *,
    regions: Tensor | None = None,
    labels: Tensor | None = None,
    logit_scale: float | Tensor = 100.0,
    tau_u: float | None = 0.01,
    eps: float = 0.1,
    max_iter: int = 100,
    tol: float = 3e-6,
    scale_plan: bool = True,
    workspace_mb: int = 1024,
    backend: str = "auto",
) -> MatchScores:
    """Scores of every label for every image (see the module's first lines), for recognising, not training.

    Args:
        sim: (B, M, N) cosines, any float type; or give the two sets:
        regions: (B, M, D) unit-length region features, and
        labels: (N, D) unit-length label features. bfloat16 features are multiplied as float16, which holds cosines
            eight times more finely.
        logit_scale: inverse temperature of the softmax over labels, positive; a tensor is not read by the host.
        tau_u: LPD's temperature; None for uniform region weights.
        eps: entropic weight.
        max_iter, tol: Sinkhorn stops an image at this L1 row-marginal error or after so many iterations. A column
            holds 1/N of the mass, so scores of large vocabularies want a small `tol`: with the default they are
            within a few 1e-4 of the limit for 1,000 labels. (Merged vocabularies: no finer than 1e-5 in the test
            of the whole plan.)
        scale_plan: multiply the plan by N, so that scores do not shrink with the vocabulary.
        workspace_mb: images are taken in groups such that similarities and temporaries stay below this.
        backend: "triton" (a GPU, or TRITON_INTERPRET=1), "torch" (anywhere), or "auto" (triton on a GPU that has it).

    On a GPU with Triton nothing synchronises with the host. With eps < 0.02 the exp domain would lose digits
    and the plain log-domain solver is used.
    """
    if backend not in BACKENDS:
        raise RamatchError(f"match_scores: unknown backend '{backend}', choose from {', '.join(BACKENDS)}")
    if not eps > 0 or (tau_u is not None and not tau_u > 0) or max_iter < 1:
        raise RamatchError("match_scores: eps and tau_u must be positive and max_iter at least 1")
    given, columns = _check_shapes(sim, regions, labels)
    device, exp_domain = given.device, eps * EXP_LIMIT[torch.float32] >= 1.0
    module = None
    if exp_domain and (backend == "triton" or (backend == "auto" and device.type == "cuda")):
        module = kernels(device)
        if module is None and backend == "triton":
            raise RamatchError("match_scores: backend 'triton' needs Triton and a GPU; use backend='auto'")
    with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.cuda.device_of(given):
        if isinstance(logit_scale, Tensor):
            scale = logit_scale.detach().to(device=device, dtype=torch.float32).reshape(1)
        else:
            scale = torch.full((1,), float(logit_scale), device=device)
        settings = _Settings(scale, tau_u, eps, max_iter, tol, scale_plan)
        parts = []
        reduce = exp_domain and columns > DENSE_LABELS
        for block in _blocks(sim, regions, labels, workspace_mb, module):
            if block.shape[0] == 0:
                parts.append(_nothing(block))
                continue
            if module is not None:
                run = _triton_reduced if reduce else _triton_dense
                parts.append(run(module, block.contiguous(), settings))
            else:
                parts.append(_torch_reduced(block, settings) if reduce else _torch_dense(block, settings))
        joined = parts[0] if len(parts) == 1 else tuple(torch.cat(t) for t in zip(*parts, strict=True))
    scores, marginal, n_iter, error = joined
    return MatchScores(scores, marginal, n_iter, error, error < (settings.whole_tol if reduce else tol))


def _check_shapes(sim: Tensor | None, regions: Tensor | None, labels: Tensor | None) -> tuple[Tensor, int]:
    """One of the inputs and the number of labels, after all were found to fit together."""
    if (sim is None) == (regions is None) or (regions is None) != (labels is None):
        raise RamatchError("match_scores: give either sim, or regions and labels")
    if sim is not None:
        shape, given = tuple(sim.shape), sim
    else:
        assert regions is not None
        assert labels is not None
        if regions.dim() != 3 or labels.dim() != 2 or regions.shape[2] != labels.shape[1]:
            raise RamatchError(
                f"match_scores: regions {tuple(regions.shape)} and labels {tuple(labels.shape)} do not fit; "
                "expected (B, M, D) and (N, D)"
            )
        if regions.device != labels.device:
            raise RamatchError(f"match_scores: regions are on {regions.device}, labels on {labels.device}")
        shape, given = (*regions.shape[:2], labels.shape[0]), regions
    if len(shape) != 3 or 0 in shape[1:] or not given.is_floating_point():
        raise RamatchError(f"match_scores: expected floats of shape (B, M, N) with M, N > 0, got {shape}")
    return given, shape[2]


def _blocks(
    sim: Tensor | None,
    regions: Tensor | None,
    labels: Tensor | None,
    workspace_mb: int,
    module: ModuleType | None,
) -> Iterator[Tensor]:
    """Similarities (b, M, N) of as many images at a time as the workspace holds; one empty block if B is 0."""
    if sim is None:
        assert regions is not None
        assert labels is not None
        common = torch.promote_types(regions.dtype, labels.dtype)
        if common in (torch.bfloat16, torch.float16):
            common = torch.float16 if regions.device.type == "cuda" else torch.float32
        regions, labels = regions.to(common), labels.to(common)
        batch, rows, columns = *regions.shape[:2], labels.shape[0]
    else:
        batch, rows, columns = sim.shape
    # Bytes of a region: with the kernels its similarities and K (of few columns if there are many); in torch also softmax, cost
    # and plan.
    number = (sim if sim is not None else regions).element_size()  # type: ignore[union-attr]
    own = 20 * columns if module is None else columns * number + 4 * min(columns + 16, DENSE_LABELS)
    size = max(1, (workspace_mb << 20) // (rows * own))
    if module is None and (sim if regions is None else regions).device.type == "cpu":  # type: ignore[union-attr]
        # Every iteration passes over them, so no more than the cache holds.
        size = min(size, max(1, CPU_BLOCK_BYTES // (4 * rows * columns)))
    size = -(-batch // max(1, -(-batch // size)))  # groups of like size: a program per image keeps the chip busy
    for start in range(0, max(batch, 1), max(size, 1)):
        part = slice(start, start + size)
        yield sim[part] if sim is not None else regions[part] @ labels.T  # type: ignore[index, union-attr]


_Part = tuple[Tensor, Tensor, Tensor, Tensor]  # scores, marginal, n_iter, error


def _nothing(sim: Tensor) -> _Part:
    """An empty batch."""
    empty = torch.empty(0, device=sim.device)
    return empty.new_empty(0, sim.shape[2]), empty.new_empty(0, sim.shape[1]), empty.long(), empty


def _solve(p: Tensor, a: Tensor, b: Tensor | None, settings: _Settings) -> OTResult:
    """Plain solution for cost 1 - p; p is overwritten."""
    cost = p.neg_().add_(1)
    return solve_batch(cost, settings.eps, a, b, max_iter=settings.max_iter, tol=settings.tol, cost_range=1.0)


def _torch_dense(sim: Tensor, settings: _Settings) -> _Part:
    """The definition, in plain steps; any eps."""
    sim = sim.float()
    marginal = settings.marginal(sim.amax(2))
    res = _solve(torch.softmax(sim * settings.scale, dim=2), marginal, None, settings)
    scores = (res.plan * sim).sum(1)
    return scores * sim.shape[2] if settings.gain else scores, marginal, res.n_iter, res.error


def _merge(p_kept: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The small problem: p of the kept labels and of their stand-in (B, M, k + 1), and its weights (B, k + 1)."""
    kept = p_kept.shape[2]
    others = columns - kept
    mean = (1 - p_kept.sum(2, keepdim=True)).clamp_min_(0) / others
    b = p_kept.new_full((p_kept.shape[0], kept + 1), 1 / columns)
    b[:, kept] = others / columns
    return torch.cat([p_kept, mean], dim=2), b


def _torch_reduced(sim: Tensor, settings: _Settings) -> _Part:
    sim = sim.float()
    columns = sim.shape[2]
    marginal = settings.marginal(sim.amax(2))
    p = torch.softmax(sim * settings.scale, dim=2)
    kept = p.amax(1).topk(KEPT_COLUMNS, dim=1, sorted=False).indices
    small, weights = _merge(p.gather(2, kept.unsqueeze(1).expand(-1, p.shape[1], -1)), columns)
    res = _solve(small, marginal, weights, settings)
    u = res.potential_a
    r = (u - u.amax(1, keepdim=True)).exp()  # the common factor goes into the columns
    K = p.sub_(1).div_(settings.eps).exp_()
    tiny, weight, n_iter = TINY[K.dtype], 1 / columns, res.n_iter.clone()
    while True:
        c = weight / column_sums(K, r).clamp_min_(tiny)
        sums = row_sums(K, c).clamp_min_(tiny)
        error = (r * sums - marginal).abs().sum(1)
        again = (error >= settings.whole_tol) & (n_iter < settings.max_iter)
        if not bool(again.any()):
            break
        r = torch.where(again.unsqueeze(1), marginal / sums, r)
        n_iter += again
    scores = column_sums(K.mul_(sim), r) * c
    return scores * columns if settings.gain else scores, marginal, n_iter, error


def _triton_dense(module: ModuleType, sim: Tensor, settings: _Settings) -> _Part:
    """Three kernels: K and marginals, Sinkhorn, scores. K is float16 where its range allows that."""
    batch, regions, columns = sim.shape
    eps, width = settings.eps, module.padded(columns)
    half = 1 / eps <= module.HALF_LIMIT
    K = torch.empty(batch, regions, width, device=sim.device, dtype=torch.float16 if half else torch.float32)
    # exp(shift) centres K's range on one; scalings absorb it.
    lse, top = module.rows(sim, settings.scale, eps=eps, K=K, shift=0.5 / eps if half else 0.0)
    marginal = settings.marginal(top)
    b = torch.zeros(batch, width, device=sim.device)
    b[:, :columns] = 1 / columns
    r, _, n_iter, error = module.sinkhorn(
        K, marginal, b, torch.ones_like(b), max_iter=settings.max_iter, tol=settings.tol
    )
    gain = columns if settings.gain else 1.0
    scores, _ = module.columns(sim, settings.scale, lse, r, eps=eps, gain=float(gain))
    return scores, marginal, n_iter, error


def _triton_reduced(module: ModuleType, sim: Tensor, settings: _Settings) -> _Part:
    """Reads of sim: rows, peaks, the kept columns, columns, and one to test the whole plan; a small Sinkhorn in between."""
    columns = sim.shape[2]
    scale, eps = settings.scale, settings.eps
    lse, top = module.rows(sim, scale)
    marginal = settings.marginal(top)
    kept = module.peaks(sim, scale, lse).topk(KEPT_COLUMNS, dim=1, sorted=False).indices
    K = module.gather(sim, scale, lse, kept, eps=eps)
    weights = lse.new_zeros(len(sim), K.shape[2])
    weights[:, :KEPT_COLUMNS] = 1 / columns
    weights[:, KEPT_COLUMNS] = (columns - KEPT_COLUMNS) / columns
    r, _, n_iter, _ = module.sinkhorn(
        K, marginal, weights, torch.ones_like(weights), max_iter=settings.max_iter, tol=settings.tol
    )
    gain = float(columns) if settings.gain else 1.0
    scores, c = module.columns(sim, scale, lse, r, eps=eps, gain=gain)
    error = module.polish(
        sim, scale, lse, marginal, r, c, scores, n_iter,
        eps=eps, gain=gain, tol=settings.whole_tol, max_iter=settings.max_iter,
    )  # fmt: skip
    return scores, marginal, n_iter, error
