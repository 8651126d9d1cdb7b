"""Speed of the solver and of the fused scores beside POT and the unfused path, in the same run.

    python -m benchmarks.ot [--device cuda] [--json FILE] [--tune]

POT is told how many iterations to run: as many as the slowest problem of the batch needs to get below the
tolerance, so the worst marginal errors (printed for both) are equal and POT spends no time finding out when to stop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measure import errors_in_words
from ramatch.ot import has_kernels, match_scores, solve_batch
from ramatch.ot._loops import Control

GPU_SIZES = ((512, 196, 17), (512, 196, 65), (512, 196, 1006), (32, 196, 1006))
CPU_SIZES = ((64, 196, 17), (64, 196, 65), (16, 196, 1006))
EPS, LOGIT_SCALE, TAU_U = 0.1, 100.0, 0.01


def similarities(batch: int, regions: int, labels: int, device: torch.device, dim: int = 512) -> Tensor:
    """(B, M, N) cosines spread about as CLIP's are: every region leans to its image's and to its own label."""
    g = torch.Generator().manual_seed(0)
    label_set = normalize(torch.randn(labels, dim, generator=g), dim=-1).to(device)
    scene = label_set[torch.randint(labels, (batch, 4), generator=g).to(device)]
    noise = normalize(torch.randn(batch, regions, dim, generator=g), dim=-1).to(device)
    pick = torch.randint(4, (batch, regions), generator=g).to(device)
    thing = scene.gather(1, pick.unsqueeze(2).expand(-1, -1, dim))
    mix = noise + 0.15 * thing + 0.1 * scene.mean(1, keepdim=True)
    return normalize(mix, dim=-1) @ label_set.T + 0.15


def transport_problem(sim: Tensor) -> tuple[Tensor, Tensor]:
    """Cost (B, M, N) and region weights (B, M) of the paper."""
    return 1 - torch.softmax(sim * LOGIT_SCALE, dim=2), torch.softmax(sim.amax(2) / TAU_U, dim=1)


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, after one that compiles and warms up; on a GPU between events, queue drained before."""
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def row_error(plan: Tensor, a: Tensor) -> float:
    """Worst L1 row-marginal error of a batch, measured on the plan in float64."""
    return float((plan.double().sum(2) - a.double()).abs().sum(1).max())


def _pot() -> ModuleType | None:
    for other in ("JAX", "TENSORFLOW", "CUPY"):  # POT opens each it finds, and JAX takes most of a GPU's memory at once
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{other}", "1")
    try:
        import ot
    except ImportError:
        return None
    return ot


def bench_solver(
    device: torch.device, size: tuple[int, int, int], *, tol: float = 1e-4, repeats: int = 5
) -> dict[str, Any]:
    """`solve_batch` against POT's, default method (log domain) and exp domain."""
    batch, regions, labels = size
    cost, a = transport_problem(similarities(*size, device))
    b = torch.full((batch, labels), 1 / labels, device=device)
    options: dict[str, Any] = {"max_iter": 1000, "tol": tol, "cost_range": 1.0}
    ours = solve_batch(cost, EPS, a, b, **options)
    iterations = int(solve_batch(cost, EPS, a, b, check_every=1, **options).n_iter.max())
    row: dict[str, Any] = {"bench": "solve_batch", "B": batch, "M": regions, "N": labels, "iterations": iterations}
    row["error"] = row_error(ours.plan, a)
    row["ms"] = milliseconds(lambda: solve_batch(cost, EPS, a, b, **options), device, repeats)
    del ours
    pot = _pot()
    if pot is None:
        return row | {"note": "POT is not installed: pip install 'ramatch[bench]'"}
    for name, method in (("pot", "auto"), ("pot_exp", "sinkhorn")):

        def theirs(method: str = method) -> Any:
            with device:  # POT makes its first scalings on the default device, wherever the costs are
                return pot.solve_batch(cost, EPS, a, b, max_iter=iterations, tol=0.0, method=method, grad="detach")

        try:
            row[f"{name}_error"] = row_error(theirs().plan, a)
            row[f"{name}_ms"] = milliseconds(theirs, device, max(2, repeats // 2))
            row[f"{name}_ratio"] = row[f"{name}_ms"] / row["ms"]
        except Exception as error:  # a method that does not run here is no reason to lose the other one
            row["note"] = f"POT, method {method}: {type(error).__name__}: {error}"
    return row


def bench_scores(device: torch.device, size: tuple[int, int, int], *, repeats: int = 5) -> dict[str, Any]:
    """`match_scores` (kernels where there are any) against softmax, solve_batch and a weighted sum."""
    sim = similarities(*size, device)
    if device.type == "cuda":
        sim = sim.half()  # as float16 features give it

    def plain() -> Tensor:
        values = sim.float()
        cost, a = transport_problem(values)
        return size[2] * (solve_batch(cost, EPS, a, tol=3e-6, cost_range=1.0).plan * values).sum(1)

    options: dict[str, Any] = {"eps": EPS, "tau_u": TAU_U, "logit_scale": LOGIT_SCALE, "tol": 3e-6}
    res = match_scores(sim, **options)
    ms = milliseconds(lambda: match_scores(sim, **options), device, repeats)
    plain_ms = milliseconds(plain, device, repeats)
    row: dict[str, Any] = {
        "bench": "match_scores",
        **dict(zip("BMN", size, strict=True)),
        "ms": ms,
        "plain_ms": plain_ms,
    }
    row |= {"plain_ratio": plain_ms / ms, "images_per_s": 1e3 * size[0] / ms, "iterations": int(res.n_iter.max())}
    return row | {"converged": bool(res.converged.all()), "difference": float((res.scores - plain()).abs().max())}


def check_kernels(device: torch.device) -> list[dict[str, Any]]:
    """Largest difference between kernels and torch on this GPU; `ok` wants 1e-3."""
    rows = []
    shapes = ((3, 196, 1), (3, 196, 17), (3, 196, 65), (3, 45, 200), (3, 196, 1006), (3, 196, 2048), (3, 196, 20_000))
    for size in shapes:
        for eps in (0.1, 0.04):
            sim = similarities(*size, device)
            if size[2] > 2048:
                fused = match_scores(sim, eps=eps, backend="triton")
                plain = match_scores(sim, eps=eps, backend="torch")
                gap = float((fused.scores - plain.scores).abs().max())
                rows.append(_check("match_scores", size, eps, gap, 1e-3))
            else:
                cost, a = transport_problem(sim)
                # as many iterations of both: small vocabularies need hundreds to converge, so that plans stopped by a
                # tolerance differ by more than rounding
                ours = solve_batch(cost, eps, a, tol=0.0, max_iter=50, cost_range=1.0).plan
                exact = solve_batch(cost.double(), eps, a.double(), tol=0.0, max_iter=50, method="log").plan
                gap = float((ours - exact).abs().max())
                rows.append(_check("solve_batch", size, eps, gap, 1e-4))
    return rows


def _check(what: str, size: tuple[int, int, int], eps: float, gap: float, bound: float) -> dict[str, Any]:
    shape = dict(zip("BMN", size, strict=True))
    return {"bench": "check " + what, **shape, "eps": eps, "difference": gap, "ok": gap < bound}


def tune_solver(device: torch.device, sizes: Sequence[tuple[int, int, int]] = GPU_SIZES[1:3]) -> list[dict[str, Any]]:
    """The three fastest ways of the solver's kernel for each size, beside its own choice: K in registers or not, tiles,
    when columns are summed."""
    if not has_kernels(device):
        return []
    from ramatch.ot import _sinkhorn_triton as module

    rows = []
    for size in sizes:
        cost, a = transport_problem(similarities(*size, device))
        b = torch.full((size[0], size[2]), 1 / size[2], device=device)
        default = module.default_tile(size[1], module.padded(size[2]))
        whole = {"BLOCK_M": 256, "BLOCK_N": default["BLOCK_N"]}
        ways: list[dict[str, Any]] = [whole | {"num_warps": warps} for warps in (4, 8, 16)]
        ways = ways if 256 * default["BLOCK_N"] <= 65536 and size[1] <= 256 else []
        for numbers, warps, late in itertools.product((4096, 8192, 16384), (4, 8, 16), (False, True)):
            block_m = max(1, min(numbers // default["BLOCK_N"], 256))
            ways.append(default | {"LATE": late, "BLOCK_M": block_m, "num_warps": warps})
        shape = {"bench": "solver's way", **dict(zip("BMN", size, strict=True))}
        shape["default_ms"] = _time_way(module, cost, a, b, None)
        found = [{"ms": _time_way(module, cost, a, b, way), **way} for way in ways]
        rows += [shape | entry for entry in sorted(found, key=lambda entry: entry["ms"])[:3]]
    return rows


def _time_way(module: ModuleType, cost: Tensor, a: Tensor, b: Tensor, way: dict[str, Any] | None) -> float:
    """Milliseconds of 40 iterations from costs to plans; infinite if the chip cannot hold the tile."""
    reg = torch.full(cost.shape[:1], EPS, device=cost.device)
    given = (cost, reg, a, b, torch.ones_like(b), Control(40, 0.0, fixed=True))
    try:
        return milliseconds(lambda: module.solve(*given, way=way), cost.device, 5)
    except Exception:  # Triton has its own errors for this, which differ between versions
        return float("inf")


def bench_ot(
    device: str | torch.device | None = None,
    sizes: Sequence[tuple[int, int, int]] | None = None,
    *,
    many_labels: int | None = 20_000,
    tol: float = 1e-4,
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """All rows: kernel checks (GPU), solver against POT, fused against unfused scores, many labels.

    sizes: (B, M, N) triples; by default the paper's with 512 images on a GPU, fewer images on a CPU.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = device.type == "cuda"
    sizes = sizes or (GPU_SIZES if gpu else CPU_SIZES)
    rows = check_kernels(device) if gpu and has_kernels(device) else []
    rows += [bench_solver(device, size, tol=tol, repeats=repeats) for size in sizes]
    rows += [bench_scores(device, size, repeats=repeats) for size in sizes]
    if many_labels:
        rows.append(bench_scores(device, (32 if gpu else 2, 196, many_labels), repeats=repeats))
    return rows


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """One line per row."""

    def show(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "\n".join("  ".join(f"{k}={show(v)}" if k != "bench" else f"{v:<20}" for k, v in r.items()) for r in rows)


def _size(text: str) -> tuple[int, int, int]:
    parts = [int(part) for part in text.split(",")]
    if len(parts) != 3 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not three numbers B,M,N, each at least 1")
    return parts[0], parts[1], parts[2]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--json", default=None, help="also write the rows to this file")
    parser.add_argument("--tune", action="store_true", help="time the kernels' tiles too, for a minute or two")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--size", action="append", type=_size, metavar="B,M,N", help="images, regions, labels; repeatable"
    )
    args = parser.parse_args(argv)
    rows = bench_ot(args.device, args.size, many_labels=None if args.size else 20_000, repeats=args.repeats)
    print(format_rows(rows), flush=True)
    if args.tune and torch.cuda.is_available():
        device = torch.device(args.device or "cuda")
        tiles = tune_solver(device)
        print(format_rows(tiles))
        rows += tiles
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    errors_in_words(main)
