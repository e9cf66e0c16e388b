"""Planning: size of a cache, what fits on a device, which format to use. Does not need torch (except `measure`)."""

from __future__ import annotations

from .choices import Choice, recommend
from .models import Layer, Model, names, read
from .report import Plan, plan
from .size import Recipe, Size, exact, formula, shared_prefix
from .units import read_bytes, read_device, read_tokens, show_bytes

__all__ = [
    "Choice",
    "Layer",
    "Model",
    "Plan",
    "Recipe",
    "Size",
    "exact",
    "formula",
    "names",
    "plan",
    "read",
    "read_bytes",
    "read_device",
    "read_tokens",
    "recommend",
    "shared_prefix",
    "show_bytes",
]
