"""Metrics, ZSL/GZSL protocol, calibration, localization. Stands alone: knows arrays of scores, not models."""

from ramatch.evaluation.calibration import Calibrator
from ramatch.evaluation.localization import Localization, localize
from ramatch.evaluation.protocol import Report, evaluate_scores

__all__ = ["Calibrator", "Localization", "Report", "evaluate_scores", "localize"]
