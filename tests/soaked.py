"""What long runs did, for the last lines of pytest's report."""

from collections import Counter

steps: Counter[str] = Counter()
