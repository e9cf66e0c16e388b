"""Reading and formatting bytes and tokens. GB is always 10^9 bytes, GiB 2^30."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip

DEVICES: dict[str, tuple[str, float, str]] = {
    "t4": ("16GB", 320, "https://www.nvidia.com/en-us/data-center/tesla-t4/"),
    "l4": ("24GB", 300, "https://www.nvidia.com/en-us/data-center/l4/"),
    "a10": ("24GB", 600, "https://www.nvidia.com/en-us/data-center/products/a10-gpu/"),
    "rtx3090": ("24GB", 936, "https://www.nvidia.com/en-us/geforce/graphics-cards/30-series/rtx-3090-3090ti/"),
    "rtx4090": ("24GB", 1008, "https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090/"),
    "l40s": ("48GB", 864, "https://www.nvidia.com/en-us/data-center/l40s/"),
    "a100-40gb": ("40GB", 1555, "https://www.nvidia.com/en-us/data-center/a100/"),
    "a100": ("80GB", 2039, "https://www.nvidia.com/en-us/data-center/a100/"),
    "h100": ("80GB", 3350, "https://www.nvidia.com/en-us/data-center/h100/"),
    "h200": ("141GB", 4800, "https://www.nvidia.com/en-us/data-center/h200/"),
    "mi300x": ("192GB", 5300, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
}
"""{name: (memory as stated by the vendor, bandwidth in GB/s, source)}. GB is read as 10^9 bytes, the smaller of both
interpretations; drivers report about 2 to 7% more."""


def read_bytes(text: str | int, what: str = "memory") -> int:
    """Bytes of "80GB" (80 * 10^9), "80GiB" (80 * 2^30), "512 MiB", 1000. Raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(found[2].lower()) if found else None
    if not found or unit is None or not float(found[1]):
        raise ValueError(f"{what}: expected bytes such as 80GB (10^9 each) or 80GiB (2^30 each), got {text!r}")
    return round(float(found[1]) * unit)


def read_device(text: str | int) -> tuple[int, float | None]:
    """(bytes, GB/s or None) for a device name in `DEVICES`, or an amount of memory of at least 1 MB. Raises
    ValueError."""
    known = DEVICES.get(str(text).lower().removeprefix("nvidia-"))
    if known:
        return read_bytes(known[0]), known[1]
    try:
        found = read_bytes(text)
        if found < 10**6:  # such as 80, meaning GB
            raise ValueError(f"gpu: {found} bytes")
        return found, None
    except ValueError:
        raise ValueError(
            f"gpu: expected an amount with its unit, such as 80GB or 80GiB, or one of {', '.join(DEVICES)}, "
            f"got {text!r}"
        ) from None


def read_tokens(text: str | int, what: str = "context") -> int:
    """Tokens of the text "32k" (32 * 1024), "1m" (1024^2) or 4096. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", str(text))
    tokens = round(float(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]) if found else 0
    if isinstance(text, bool) or tokens < 1:
        raise ValueError(f"{what}: expected tokens such as 4096 or 32k (32 x 1024), got {text!r}")
    return tokens


def show_bytes(n: float) -> str:
    """ "10.74 GB (10.00 GiB)", "4.2 MB", "812 B": always with the decimal unit first."""
    if abs(n) >= 10**9:
        return f"{n / 1e9:.2f} GB ({n / 2**30:.2f} GiB)"
    if abs(n) >= 10**6:
        return f"{n / 1e6:.2f} MB ({n / 2**20:.2f} MiB)"
    return f"{n:,.0f} B"


def show_gb(n: float) -> str:
    """ "10.74 GB" or, below a tenth of one, "42.1 MB"."""
    return f"{n / 1e9:,.2f} GB" if abs(n) >= 10**8 else f"{n / 1e6:,.2f} MB"
