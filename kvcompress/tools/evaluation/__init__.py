"""Evaluation of caches: quality, size and speed (`evaluate`), statistics of K and V (`inspect`), tasks."""

from .inspection import Inspection, inspect
from .outliers import inject_outliers
from .report import Evaluation
from .suite import Settings, evaluate

__all__ = ["Evaluation", "Inspection", "Settings", "evaluate", "inject_outliers", "inspect"]
