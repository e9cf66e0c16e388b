"""What long runs did, for the last lines of pytest's report."""

from collections import Counter

KINDS = 4  # that `make soak` counts
steps: Counter[str] = Counter()
