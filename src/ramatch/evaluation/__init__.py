"""Metrics, ZSL/GZSL protocol, calibration, localization. Stands alone: knows arrays of scores, not models."""

from ramatch.evaluation.calibration import CalibrationSettings, Calibrator
from ramatch.evaluation.localization import Localization, Truth, localize, map_iou, mass_inside, pointing_game
from ramatch.evaluation.protocol import Report, evaluate_scores
from ramatch.evaluation.reliability import calibration_report, calibration_table

__all__ = [
    "CalibrationSettings",
    "Calibrator",
    "Localization",
    "Report",
    "Truth",
    "calibration_report",
    "calibration_table",
    "evaluate_scores",
    "localize",
    "map_iou",
    "mass_inside",
    "pointing_game",
]
