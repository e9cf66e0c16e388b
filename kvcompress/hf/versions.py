"""Supported versions of transformers."""

from __future__ import annotations

import warnings

OLDEST, NEWEST = (5, 19), (5, 24)
_RANGE = f"expected transformers {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def check(version: str) -> None:
    """Warns if `version` of transformers is newer than those tested; raises ImportError if it is older than supported,
    when caches had other layers."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST:
        raise ImportError(f"kvcompress: {_RANGE}, got {version}; pip install 'transformers>={OLDEST[0]}.{OLDEST[1]}'")
    if numbers > NEWEST:
        warnings.warn(
            f"kvcompress: {_RANGE}, got {version}, which is not tested; compare a generation with "
            'KVCache(config, "raw") to one without a KVCache',
            stacklevel=4,
        )
