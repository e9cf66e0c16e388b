"""Honest measurements of what a cache costs in quality, bytes and time: `evaluate`, `inspect`, tasks, tables."""

from .inspection import Inspection, inspect
from .outliers import inject_outliers
from .report import Evaluation
from .suite import Settings, evaluate
from .tables import TABLES, Comparison, run_table

__all__ = ["TABLES", "Comparison", "Evaluation", "Inspection", "Settings", "evaluate", "inject_outliers", "inspect",
           "run_table"]  # fmt: skip
