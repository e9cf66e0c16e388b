"""The GPU as reported by nvidia-smi: name, driver, clocks. Needs neither torch nor the built package."""

from __future__ import annotations

import subprocess

FIELDS = ("name", "compute_cap", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem",
          "power.draw", "power.limit", "temperature.gpu")  # fmt: skip


def state() -> dict[str, str]:
    """{field: value} of the first GPU; {"missing": reason} without one. Nothing is changed, including clocks."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"missing": f"nvidia-smi: {error}"}
    return dict(zip(FIELDS, (x.strip() for x in done.stdout.splitlines()[0].split(",")), strict=True))
