"""Statistics of long runs, for the last lines of pytest's report."""

from collections import Counter

KINDS = 4  # counted by `make soak`
steps: Counter[str] = Counter()
