"""Which transformers this works with."""

from __future__ import annotations

import warnings

OLDEST, NEWEST = (5, 19), (5, 24)
_RANGE = f"expected transformers {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def check(version: str) -> None:
    """Warns where `version` of transformers is newer than what the tests have run on; ImportError where it is older:
    caches had other layers then."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST:
        raise ImportError(f"kvcompress: {_RANGE}, got {version}; pip install 'transformers>={OLDEST[0]}.{OLDEST[1]}'")
    if numbers > NEWEST:
        warnings.warn(
            f"kvcompress: {_RANGE}, got {version}, which it was not tested on; compare a generation with "
            'KVCache(config, "raw") to one without a cache of ours',
            stacklevel=4,
        )
