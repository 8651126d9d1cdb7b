"""Region scores of KCOT at test time straight from similarities, without a plan of all images in memory.

sim (B, M, N) cosines of regions and labels; p = softmax over labels of sim * logit_scale; cost = 1 - p
(Eq. 7); u = softmax over regions of max_labels sim / tau_u (LPD, Eq. 8); v = 1/N; plan = Sinkhorn
(Eq. 12 without a teacher); s_i = sum_k plan[k,i] sim[k,i] (Eq. 14), times N, so that scores do not shrink with the
vocabulary.

Beyond `DENSE_LABELS` labels almost every p is nearly zero, so almost every column of K = exp((p - 1) / eps) is the
same. The few labels that some region cares about keep their columns, all others share one (cost: their mean, which
the softmax's unit sum gives for free), and the row scalings of that small problem start a test of the whole
plan: its columns are exact, its row marginal is measured, and images that miss the tolerance iterate over all
columns. So what comes out is as good as the plain solver's answer; merging only saves time.

With cost "cosine", (1 - sim) * logit_scale, nothing is merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ramatch.errors import RamatchError
from ramatch.ot._loops import CPU_BLOCK_BYTES, TINY, column_sums, has_kernels, row_sums
from ramatch.ot.solver import EXP_LIMIT, OTResult, solve_batch

BACKENDS = ("auto", "torch", "triton")
DENSE_LABELS = 2048  # up to here every label keeps its own column
KEPT_COLUMNS = 1023  # beyond, so many do, and one more stands for the rest
WHOLE_TOL = 1e-5  # finest test of a whole plan then: float32 row sums of 20,000 columns are only good to a few 1e-6


@dataclass(frozen=True)
class _Settings:
    scale: Tensor  # (1,) float32 on the device
    tau_u: float | None
    eps: float
    max_iter: int
    tol: float
    cost: str = "softmax"
    relax: float | None = None

    @property
    def whole_tol(self) -> float:
        return max(self.tol, WHOLE_TOL)

    def marginal(self, top: Tensor) -> Tensor:
        """Region weights (B, M) from each region's largest similarity (Eq. 8)."""
        if self.tau_u is None:
            return torch.full_like(top, 1.0 / top.shape[1])
        return torch.softmax(top / self.tau_u, dim=1)


@dataclass(frozen=True)
class MatchScores:
    """Region scores of B images."""

    scores: Tensor  # (B, N) float32, N times the sum over regions of plan * sim
    marginal: Tensor  # (B, M) region weights u
    n_iter: Tensor  # (B,) int64 Sinkhorn iterations
    error: Tensor  # (B,) L1 distance between the plan's row sums and `marginal`
    converged: Tensor  # (B,) bool, error below the tolerance


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
    cost: str = "softmax",
    relax: float | None = None,
    workspace_mb: int = 1024,
    backend: str = "auto",
) -> MatchScores:
    """Scores of every label for every image (see the module's first lines), for recognizing, not training.

    Args:
        sim: (B, M, N) cosines, any float type; or give the two sets:
        regions, labels: (B, M, D) and (N, D) unit-length features. bfloat16 ones are multiplied as float16, which
            holds cosines eight times more finely.
        logit_scale: inverse temperature of the softmax over labels, positive; a tensor is not read by the host.
        tau_u: LPD's temperature; None for uniform region weights.
        eps: entropic weight. Below 0.02 the exp domain would lose digits and the log-domain solver is used.
        max_iter, tol: Sinkhorn stops an image at this L1 row-marginal error or after so many iterations. A column holds
            1/N of the mass, so large vocabularies want a small `tol` (no finer than 1e-5 where labels are merged):
            with the default, scores of 1,000 labels are within a few 1e-4 of the limit.
        cost: "softmax" (1 - p) or "cosine" ((1 - sim) * logit_scale). relax: see `solve_batch`.
        workspace_mb: images are taken in groups such that similarities and temporaries stay below this.
        backend: "triton" (a GPU, or TRITON_INTERPRET=1; never synchronizes with the host), "torch" (anywhere), or
            "auto" (triton on a GPU that has it), where labels are merged; otherwise `solve_batch` decides.
    """
    if backend not in BACKENDS:
        raise RamatchError(f"match_scores: unknown backend '{backend}', choose from {', '.join(BACKENDS)}")
    if not eps > 0 or (tau_u is not None and not tau_u > 0) or max_iter < 1:
        raise RamatchError("match_scores: eps and tau_u must be positive and max_iter at least 1")
    rows, labels = _read(sim, regions, labels)
    device, columns = rows.device, rows.shape[2] if labels is None else len(labels)
    plain = cost == "softmax" and relax is None
    exp_domain = plain and eps * EXP_LIMIT[torch.float32] >= 1.0
    wanted = exp_domain and (backend == "triton" or (backend == "auto" and device.type == "cuda"))
    triton = wanted and has_kernels(device)
    if wanted and not triton and backend == "triton":
        raise RamatchError("match_scores: backend 'triton' needs Triton and a GPU; use backend='auto'")
    merge = exp_domain and columns > DENSE_LABELS
    triton = triton and merge
    run = _dense if not merge or len(rows) == 0 else _triton_merged if triton else _torch_merged
    with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.cuda.device_of(rows):
        if isinstance(logit_scale, Tensor):
            scale = logit_scale.detach().to(device=device, dtype=torch.float32).reshape(1)
        else:
            scale = torch.full((1,), float(logit_scale), device=device)
        settings = _Settings(scale, tau_u, eps, max_iter, tol, cost, relax)
        parts = [run(block, settings) for block in _blocks(rows, labels, workspace_mb, triton)]
        scores, marginal, n_iter, error = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return MatchScores(scores, marginal, n_iter, error, error < (settings.whole_tol if merge else tol))


def _blocks(rows: Tensor, labels: Tensor | None, workspace_mb: int, triton: bool) -> Iterator[Tensor]:
    """Similarities (b, M, N) of as many images at a time as the workspace holds; one empty block if B is 0."""
    batch, regions, columns = len(rows), rows.shape[1], rows.shape[2] if labels is None else len(labels)
    # Bytes of a region: similarities, softmax, cost, K and plan; with the kernels only similarities of all columns.
    own = columns * rows.element_size() + 20 * (KEPT_COLUMNS + 1) if triton else 20 * columns
    size = max(1, (workspace_mb << 20) // (regions * own))
    if not triton and rows.device.type == "cpu":  # every iteration passes over them: what the cache holds
        size = min(size, max(1, CPU_BLOCK_BYTES // (4 * regions * columns)))
    size = -(-batch // max(1, -(-batch // size)))  # groups of like size: a program per image keeps the chip busy
    for part in rows.split(max(size, 1)):
        yield part if labels is None else part @ labels.T


def _read(sim: Tensor | None, regions: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Similarities (B, M, N); or regions (B, M, D) and labels (N, D) of one type, found to fit together."""
    if sim is not None and regions is None and labels is None:
        shape, rows = sim.shape, sim
    elif sim is None and regions is not None and labels is not None:
        if regions.dim() != 3 or labels.dim() != 2 or regions.shape[2] != labels.shape[1]:
            raise RamatchError(
                f"match_scores: regions {tuple(regions.shape)} and labels {tuple(labels.shape)} do not fit; "
                "expected (B, M, D) and (N, D)"
            )
        if regions.device != labels.device:
            raise RamatchError(f"match_scores: regions are on {regions.device}, labels on {labels.device}")
        common = torch.promote_types(regions.dtype, labels.dtype)
        if common in (torch.bfloat16, torch.float16):
            common = torch.float16 if regions.device.type == "cuda" else torch.float32
        rows, labels = regions.detach().to(common), labels.detach().to(common)
        shape = torch.Size((*regions.shape[:2], len(labels)))
    else:
        raise RamatchError("match_scores: give either sim, or regions and labels")
    if len(shape) != 3 or 0 in shape[1:] or not rows.is_floating_point():
        raise RamatchError(f"match_scores: expected floats of shape (B, M, N) with M, N > 0, got {tuple(shape)}")
    return rows, labels


_Part = tuple[Tensor, Tensor, Tensor, Tensor]  # scores, marginal, n_iter, error


def _solve(p: Tensor, a: Tensor, b: Tensor | None, settings: _Settings) -> OTResult:
    """Plain solution for cost 1 - p; p is overwritten."""
    cost = p.neg_().add_(1)
    return solve_batch(cost, settings.eps, a, b, max_iter=settings.max_iter, tol=settings.tol, cost_range=1.0)


def bounded(cost: Tensor, eps: float, relaxed: bool) -> tuple[Tensor, float]:
    """Costs of unknown range (B, M, N) within one that the exp domain is good for, and that range: what lies more than
    50 eps above the smallest of its row (of its problem, where rows are relaxed) weighs nothing in float32."""
    reach = EXP_LIMIT[torch.float32] * eps
    return torch.minimum(cost, cost.amin((1, 2) if relaxed else 2, keepdim=True) + reach), reach


def _dense(sim: Tensor, settings: _Settings) -> _Part:
    """The definition, in plain steps; any eps."""
    sim = sim.float()
    marginal = settings.marginal(sim.amax(2))
    if settings.cost == "cosine":
        cost, reach = bounded((1 - sim) * settings.scale, settings.eps, settings.relax is not None)
    else:
        cost, reach = torch.softmax(sim * settings.scale, dim=2).neg_().add_(1), 1.0
    rule = {"max_iter": settings.max_iter, "tol": settings.tol, "relax": settings.relax}
    res = solve_batch(cost, settings.eps, marginal, cost_range=reach, **rule)  # type: ignore[arg-type]
    return (res.plan * sim).sum(1) * sim.shape[2], marginal, res.n_iter, res.error


def _kept(peaks: Tensor, like: Tensor) -> Tensor:
    """Places (B, M, kept) of the labels that keep their columns, by each one's largest softmax (B, N)."""
    return peaks.topk(KEPT_COLUMNS, dim=1, sorted=False).indices.unsqueeze(1).expand(-1, like.shape[1], -1)


def _merged_rows(p: Tensor, columns: int, marginal: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Row scalings and iterations of the small problem: softmax p of the kept labels, one stand-in for all others."""
    rest = (1 - p.sum(2, keepdim=True)).clamp_min_(0) / (columns - KEPT_COLUMNS)  # a softmax sums to one
    weights = p.new_full((len(p), KEPT_COLUMNS + 1), 1 / columns)
    weights[:, -1] = (columns - KEPT_COLUMNS) / columns
    res = _solve(torch.cat([p, rest], dim=2), marginal, weights, settings)
    u = res.potentials[0]
    return (u - u.amax(1, keepdim=True)).exp(), res.n_iter.clone()  # the common factor goes into the columns


def _torch_merged(sim: Tensor, settings: _Settings) -> _Part:
    sim = sim.float()
    columns = sim.shape[2]
    marginal = settings.marginal(sim.amax(2))
    p = torch.softmax(sim * settings.scale, dim=2)
    r, n_iter = _merged_rows(p.gather(2, _kept(p.amax(1), p)), columns, marginal, settings)
    K = p.sub_(1).div_(settings.eps).exp_()
    tiny = TINY[K.dtype]
    while True:
        c = (1 / columns) / column_sums(K, r).clamp_min_(tiny)
        sums = row_sums(K, c).clamp_min_(tiny)
        error = (r * sums - marginal).abs().sum(1)
        again = (error >= settings.whole_tol) & (n_iter < settings.max_iter)
        if not bool(again.any()):
            break
        r = torch.where(again.unsqueeze(1), marginal / sums, r)
        n_iter += again
    return column_sums(K.mul_(sim), r) * c * columns, marginal, n_iter, error


def _triton_merged(sim: Tensor, settings: _Settings) -> _Part:
    """Four reads of sim (rows, peaks, columns, test of the whole plan) and the small problem between."""
    from ramatch.ot._triton import column_scores, peaks, polish, read_rows

    sim = sim.contiguous()
    rows, top = read_rows(sim, settings.scale, settings.eps)
    marginal = settings.marginal(top)
    p = sim.gather(2, _kept(peaks(rows), sim)).float().mul_(settings.scale).sub_(rows.lse.unsqueeze(2)).exp_()
    r, n_iter = _merged_rows(p, sim.shape[2], marginal, settings)
    scores, c = column_scores(rows, r)
    error = polish(rows, marginal, (r, c, scores, n_iter), tol=settings.whole_tol, max_iter=settings.max_iter)
    return scores, marginal, n_iter, error
