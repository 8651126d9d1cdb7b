"""Metrics, ZSL/GZSL protocol, calibration, localisation. Stands alone: knows arrays of scores, not models."""

from ramatch.evaluation.calibration import CalibrationSettings, Calibrator
from ramatch.evaluation.calibration_report import calibration_report, calibration_table
from ramatch.evaluation.localization import Localisation, Truth, map_iou, mass_inside, pointing_game
from ramatch.evaluation.protocol import Report, compare, evaluate_scores

__all__ = [
    "CalibrationSettings",
    "Calibrator",
    "Localisation",
    "Report",
    "Truth",
    "calibration_report",
    "calibration_table",
    "compare",
    "evaluate_scores",
    "map_iou",
    "mass_inside",
    "pointing_game",
]
