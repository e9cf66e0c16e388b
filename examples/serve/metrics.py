"""What Prometheus reads at /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_TIMES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Meter:
    """Counts what an Engine does; numbers of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def make(kind: Any, name: str, text: str, **options: Any) -> Any:
            return kind(f"kvcompress_{name}", text, registry=self.registry, **options)

        self.tokens = make(Counter, "tokens", "tokens given")
        self.fed = make(Counter, "tokens_fed", "tokens that passes took, prompts included")
        self.preempted = make(Counter, "preemptions", "sequences sent to host memory")
        self.ended = make(Counter, "requests", "requests that ended", labelnames=["reason"])
        self.first = make(Histogram, "first_token_seconds", "from request to first token", buckets=_TIMES)
        self.seconds = make(Histogram, "pass_seconds", "of a forward pass", buckets=_TIMES)
        self.gauges = {
            name: make(Gauge, name, text)
            for name, text in {
                "running": "sequences in the batch",
                "waiting": "requests that wait, suspended ones included",
                "suspended": "sequences in host memory",
                "arena_bytes": "of pages that the pool may hold",
                "used_bytes": "of pages in use, prefixes included",
                "prefix_bytes": "of pages that prefixes hold",
                "prefix_saved_tokens": "tokens whose prefill a prefix saved",
            }.items()
        }

    def passed(self, seconds: float, tokens: int) -> None:
        self.seconds.observe(seconds)
        self.fed.inc(tokens)

    def look(self, engine: Any) -> None:
        """Reads the gauges."""
        prefix, waiting = engine.prefix.stats(), list(engine.waiting)
        for name, value in {
            "running": len(engine.running),
            "waiting": len(waiting),
            "suspended": sum(request.suspended for request in waiting),
            "arena_bytes": engine.arena,
            "used_bytes": engine.pool.stats()["used"],
            "prefix_bytes": prefix["bytes"],
            "prefix_saved_tokens": prefix["saved_tokens"],
        }.items():
            self.gauges[name].set(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)
