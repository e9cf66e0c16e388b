"""Measurements of what a cache costs in quality, bytes and time: `evaluate`, `inspect`, tasks."""

from .inspection import Inspection, inspect
from .outliers import inject_outliers
from .report import Evaluation
from .suite import Settings, evaluate

__all__ = ["Evaluation", "Inspection", "Settings", "evaluate", "inject_outliers", "inspect"]
