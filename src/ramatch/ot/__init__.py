"""Entropic optimal transport for many small problems at once (the "Match" of Recover and Match)."""

from __future__ import annotations

from ramatch.ot._loops import has_kernels
from ramatch.ot.fused import MatchScores, bounded, match_scores
from ramatch.ot.solver import OTResult, solve_batch

__all__ = ["MatchScores", "OTResult", "bounded", "has_kernels", "match_scores", "solve_batch"]
