"""Information about this installation: versions, kernels, a self-test of all codecs. Does not import torch."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

import numpy as np

from ... import _C, files, formats

_PEERS = ("torch", "transformers", "numpy", "matplotlib", "tqdm", "safetensors")
_SNR = {8: 24.0, 4: 17.0, 3: 14.0, 2: 5.0}
"""Minimum SNR in dB on Gaussian rows by bits of a codec (measured values: docs/formats.md)."""


def versions() -> dict[str, str]:
    """{package: version} of related packages; "-" if not installed."""
    found = {}
    for name in _PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def self_test() -> dict[str, float]:
    """{format: SNR in dB} for 64 Gaussian rows of 128 dims, quantized and dequantized by this CPU's kernels."""
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    found = {}
    for row in formats.TABLE:
        if not row["name"].startswith("raw_"):
            codes, scales = _C.quantize(x, row["code"])
            error = _C.dequantize(codes, scales, row["code"]) - x
            found[row["name"]] = float(10 * np.log10((x**2).sum() / (error**2).sum()))
    return found


def memory() -> int:
    """Memory of the machine in bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def info() -> dict[str, Any]:
    """Versions, platform, kernel levels, devices, `self_test`, and "ok": whether all codecs reach their minimum SNR."""
    snr = self_test()
    least = {
        row["name"]: 4.0 if row["calibrated"] else _SNR[row["bits"]] for row in formats.TABLE if row["name"] in snr
    }
    return {
        "kvcompress": _C.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "memory": memory(),
        "versions": versions(),
        "isa": _C.isa(),
        "isa_available": list(_C.isa_available()),
        "cpu_features": _C.cpu_features(),
        "devices": ["cpu", "cuda"] if files.cuda_library() else ["cpu"],
        "snr_db": snr,
        "ok": all(snr[name] >= limit for name, limit in least.items()),
    }


def show(found: dict[str, Any]) -> str:
    """The result of `info` as text, for issues."""
    features = " ".join(name for name, there in found["cpu_features"].items() if there) or "-"
    lines = [
        f"kvcompress {found['kvcompress']}, Python {found['python']}, {found['platform']}",
        f"{found['cpus']} CPUs, {found['memory'] / 2**30:.1f} GiB; runs on: {', '.join(found['devices'])}",
        f"kernels: {found['isa']} of {', '.join(found['isa_available'])} (KVCOMPRESS_ISA chooses); CPU: {features}",
        ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "codecs, SNR in dB: " + ", ".join(f"{name} {x:.1f}" for name, x in found["snr_db"].items()),
        "self-test: passed" if found["ok"] else "self-test: FAILED: the error of a codec is too large",
    ]
    return "\n".join(lines)
