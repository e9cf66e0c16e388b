"""evaluate(): measures strategies on a model and a text, in resumable cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ... import _C, checks
from ...hf.backend import base_model, evaluating
from ...hf.hub import from_hub
from ...quantization.calibration import Calibration
from ..strategy import Strategy, expand
from . import data, measure, tasks
from .caches import open_cache
from .report import Evaluation
from .store import Store


@dataclass(frozen=True)
class Settings:
    """Settings of `evaluate`. Lengths are in tokens.

    context: length of the compressed context; scored: tokens scored after it, per window; chunk: tokens per call while
    scoring; prefill: tokens per call for the context, 0: one call; windows: number of windows of the text; tasks: names
    of `tasks.TASKS`; samples: contexts per task; cost: also measure memory and speed; steps: timed decode steps; seed:
    for windows and tasks.
    """

    context: int = 2048
    scored: int = 256
    chunk: int = 32
    prefill: int = 0
    windows: int = 4
    tasks: tuple[str, ...] = ()
    samples: int = 4
    cost: bool = True
    steps: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"context": 1, "scored": 1, "chunk": 1, "prefill": 0, "windows": 1, "samples": 1, "steps": 16}
        for name, at_least in least.items():
            checks.integer(f"evaluate: {name}", getattr(self, name), at_least)
        unknown = sorted(set(self.tasks) - set(tasks.TASKS))
        if unknown:
            raise ValueError(f"evaluate: tasks: expected names out of {', '.join(tasks.TASKS)}, got {unknown}")


def _calibration_digest(strategy: Strategy) -> dict[str, str]:
    """{"calibration": its digest} of a strategy with a calibration, else {}: its path may get another content."""
    file = strategy.options.get("calibration")
    return {} if file is None else {"calibration": Calibration.of(file).digest()}


class _Run:
    """A model, a text, and the cells of its evaluation. A cell is a dict of everything that determines its result."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, ids: list[int], settings: Settings) -> None:
        self.model, self.tokenizer, self.ids, self.settings = model, tokenizer, ids, settings
        self.bos = data.bos_of(model, tokenizer)
        self.size = settings.context + settings.scored + 1 - len(self.bos)  # tokens of the text per window
        self.same = {"model": data.fingerprint(model), "text": data.ids_hash(ids), "library": _C.__version__}
        self._shared: tuple[Any, Any] = (None, None)

    def cells(self, strategies: list[Strategy]) -> list[dict[str, Any]]:
        """All cells, ordered so that cells of one window or sample are adjacent."""
        s = self.settings
        how = {"context": s.context, "prefill": s.prefill}
        shared: list[dict[str, Any]] = []
        for start in data.window_starts(len(self.ids), self.size, s.windows, s.seed):
            shared.append({"kind": "quality", "start": start, "scored": s.scored, "chunk": s.chunk, **how})
        for task in s.tasks:
            for i in range(s.samples):
                shared.append({"kind": "task", "task": task, "sample": s.seed * 1000 + i, **how})
        if s.cost:
            shared.append({"kind": "cost", "context": s.context, "steps": s.steps, "threads": torch.get_num_threads()})
        own = [{"strategy": str(x), **_calibration_digest(x)} for x in strategies]
        return [{**what, **x, **self.same} for what in shared for x in own]

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Computes data shared by adjacent cells once, and keeps it until the next key."""
        if self._shared[0] != key:
            self._shared = (None, None)
            self._shared = (key, make())
        return self._shared[1]

    def compute(self, what: dict[str, Any]) -> dict[str, Any]:
        """The result of a cell."""
        s, strategy = self.settings, Strategy(what["strategy"])
        return getattr(self, f"_{what['kind']}")(what, strategy, s)

    def _quality(self, what: dict[str, Any], strategy: Strategy, s: Settings) -> dict[str, Any]:
        start = what["start"]
        ids = data.as_batch(self.bos + self.ids[start : start + self.size], self.model.device)
        reference = self._once(start, lambda: measure.reference_logits(self.model, ids[:, :-1], s.scored))
        return measure.quality(self.model, strategy, ids, s.scored, reference, chunk=s.chunk, prefill=s.prefill)

    def _task(self, what: dict[str, Any], strategy: Strategy, s: Settings) -> dict[str, Any]:
        if self.tokenizer is None:
            raise ValueError("evaluate: tasks: expected a tokenizer (tokenizer=...), got None")
        encode, key = data.encoder(self.tokenizer), (what["task"], what["sample"])
        sample = self._once(key, lambda: tasks.make(key[0], encode, self.ids, s.context, key[1], bos=self.bos))
        return measure.retrieval(self.model, strategy, sample, prefill=s.prefill)

    def _cost(self, what: dict[str, Any], strategy: Strategy, s: Settings) -> dict[str, Any]:
        need = s.context + s.steps
        ids = data.as_batch((self.bos + self.ids * (need // len(self.ids) + 1))[:need], self.model.device)
        return {
            **measure.memory(self.model, strategy, ids[:, : s.context]),
            **measure.speed(self.model, strategy, ids, steps=s.steps),
        }


def load_model(
    model: PreTrainedModel | str | Path, tokenizer: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    if isinstance(model, (str, Path)):
        tokenizer = model if tokenizer is None else tokenizer
        model = from_hub(AutoModelForCausalLM, model, dtype="auto" if torch.cuda.is_available() else torch.float32)
    inner = base_model("evaluate", model)
    if inner is not model and model.active_peft_config.is_prompt_learning:  # type: ignore[union-attr]
        kind = model.active_peft_config.peft_type.value  # type: ignore[union-attr]
        raise ValueError(
            f"evaluate: model: expected an adapter inside of the model (LoRA, ...), got PEFT's {kind}, whose prompt is "
            "outside of it; evaluate model.get_base_model()"
        )
    return inner, data.load_tokenizer(tokenizer)


def usable(
    model: PreTrainedModel, strategies: str | dict | Strategy | Iterable[str | dict | Strategy], skip: bool
) -> tuple[list[Strategy], dict[str, str]]:
    """(strategies without duplicates, the uncompressed cache first; with `skip`, {unavailable strategy: reason})."""
    chosen, skipped = [Strategy("dynamic")], {}
    strategies = [strategies] if isinstance(strategies, (str, dict, Strategy)) else strategies
    for spec in (x for given in strategies for x in (expand(given) if isinstance(given, str) else [given])):
        try:
            strategy = Strategy(spec)
            open_cache(model, strategy)
        except (ValueError, ImportError) as error:
            if not skip:
                raise
            skipped[str(spec)] = str(error).strip().splitlines()[0]
            continue
        if strategy not in chosen:
            chosen.append(strategy)
    return chosen, skipped


def _settings(given: dict[str, Any], tokens: int | None) -> Settings:
    """The Settings. tokens: cover this many tokens with windows, end to end. Raises ValueError for unknown settings."""
    names = given.get("tasks", ())
    chosen = tasks.TASKS if names == "all" else (names,) if isinstance(names, str) else tuple(names)
    if unknown := sorted(given.keys() - asdict(Settings()).keys()):
        raise ValueError(f"evaluate: expected settings out of {', '.join(asdict(Settings()))}, got {unknown}")
    found = Settings(**{**given, "tasks": chosen})
    if tokens is None:
        return found
    return replace(found, windows=max(1, tokens // (found.context + found.scored + 1)))


def evaluate(
    model: PreTrainedModel | str | Path,
    text: data.Text,
    strategies: str | dict | Strategy | Iterable[str | dict | Strategy] = ("int8", "fp8_e4m3", "int4"),
    *,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    full: bool = False,
    out: str | Path | None = None,
    skip_unavailable: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Evaluation:
    """Measures quality, size and speed of strategies, with any causal LM of transformers and any text.

    All measurements go through the cache (see `evaluation.measure`). The uncompressed cache is always included.

    Args:
        model: a causal LM, also with an adapter of PEFT, its folder, or its name on the hub (loaded in fp32 on the
            CPU).
        text: a text, a path (.txt, or token ids in .npy), or token ids.
        strategies: one or several strategies, see `kvcompress.tools.strategy`; braces expand to a grid.
        tokenizer: the model's tokenizer, needed for a text and for tasks. Default: loaded if `model` is a name.
        full: cover all of the text with windows, end to end, instead of `windows` of them.
        out: folder for cells.jsonl (run again to resume), results.json, results.csv and results.png. None: write
            nothing.
        skip_unavailable: skip strategies that are unavailable (missing backend, unsupported head dim) and list them in
            the result, instead of raising.
        progress: show a progress bar.
        settings: fields of `Settings`: context, scored, chunk, prefill, windows, tasks ("all" for all), samples, cost,
            steps, seed.

    Returns an `Evaluation`.

    Raises:
        ValueError: unknown strategy, setting or task; text too short.
        TypeError: not a model.
        ImportError: a backend is not installed.
        RuntimeError: another process writes to `out`.

    Sources: KL divergence and top-1 agreement as in llama.cpp's `llama-perplexity --kl-divergence`; tasks after RULER
    (arXiv 2404.06654); acceptance after speculative sampling (arXiv 2211.17192).
    """
    model, tokenizer = load_model(model, tokenizer)
    ids = data.load_ids(text, tokenizer, data.vocabulary(model))
    chosen = _settings(settings, len(ids) if full else None)
    known, skipped = usable(model, strategies, skip_unavailable)
    run = _Run(model, tokenizer, ids, chosen)
    folder = None if out is None else Path(out)
    with Store(None if folder is None else folder / "cells.jsonl") as store:
        cells = run.cells(known)
        todo = [what for what in cells if what not in store]
        with evaluating(model):
            for what in tqdm(todo, desc="evaluate", unit="cell", disable=not progress):
                store.put(what, run.compute(what))
        results = [(what, store.get(what)) for what in cells]
    about = {"model": model.config.name_or_path or type(model).__name__, "tokens": len(ids), **asdict(chosen)}
    evaluation = Evaluation.from_cells(about, [str(s) for s in known], results, skipped)
    if folder is not None:
        evaluation.save(folder)
    return evaluation
