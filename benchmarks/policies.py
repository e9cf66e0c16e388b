"""What policies cost in quality, on the shipped models: benchmarks/results/policies.json, docs/eviction*.png, and the
part of docs/eviction.md below its mark.

    python benchmarks/policies.py [--windows 4] [--out DIR]      # resumable; a quarter of an hour a window on a core

1. KL against budget, every policy, and an oracle that keeps what the scored queries will attend to most.
2. Sinks at a fixed window, in both position modes, within and beyond the trained length.
3. Recipes: formats and policies together, bytes, KL.
4. Retrieval: questions inside and outside of the compressed context, several a context.
5. The tutorials' tables about eviction, claimed beside measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import policies_plot
import tables
import torch
from transformers import PreTrainedModel, logging
from tutorial_tables import Comparison, run_table

import kvcompress
from kvcompress import KVCache, KVzip, policies
from kvcompress.tools.evaluation import evaluate, measure, tasks
from kvcompress.tools.evaluation.caches import attention_for, held_bytes, open_cache
from kvcompress.tools.evaluation.data import as_batch, bos_of, encoder, load_ids
from kvcompress.tools.evaluation.store import Store
from kvcompress.tools.evaluation.suite import load_model
from kvcompress.tools.strategy import Strategy

ROOT = Path(__file__).parents[1]
MODELS = ("books-tiny", "books-tiny-bias")
BUDGETS = (5, 10, 20, 30, 50, 75, 100)
SHARES = (
    "h2o", "h2o_sum", "score", "ada_h2o", "critical_h2o", "tova", "snapkv", "critical_snapkv", "rkv", "knorm",
    "keydiff", "expected", "random",
)  # fmt: skip
CONTEXT, SCORED = 1024, 256
SINKS, WINDOW, LENGTHS = (0, 1, 2, 4, 8, 16, 32), 512, {"within": 3072, "beyond": 6144}
RECIPES = (
    "raw", "int8", "int4", "int8+h2o:50%", "int8+h2o:25%", "int4_token+h2o:25%", "int4+h2o:25%",
    "int4/int2+snapkv:25%", "raw+window:252+sinks:4", "int8+window:252+sinks:4",
    "int8+h2o:128+sinks:4+residual_length:124",
)  # fmt: skip
TASKS, ASKED_MODEL = ("needles", "recall", "passkey"), "books-tiny"
ASKED = ("dynamic", *(f"raw+{name}:50%" for name in SHARES), f"raw+window:{CONTEXT // 2 - 4}")
TUTORIALS = ("h2o-budget", "sinks", "combined")
NAMES = {
    "h2o": "H2O", "h2o_sum": "H2O, sums", "score": "ScoreOnly", "ada_h2o": "AdaKV(H2O)",
    "critical_h2o": "CriticalKV(H2O)", "tova": "TOVA", "snapkv": "SnapKV", "critical_snapkv": "CriticalKV(SnapKV)",
    "rkv": "RKV", "knorm": "KNorm", "keydiff": "KeyDiff", "expected": "ExpectedAttention", "random": "random",
    "window": "window, 4 sinks", "oracle": "*oracle*", "kvzip 0.5": "KVzip", "kvzip 0.25": "KVzip, a quarter",
    "dynamic": "none",
}  # fmt: skip
MARK = "<!-- made by benchmarks/policies.py from here on -->\n"


def window_of(budget: int) -> str:
    return f"raw+window:{CONTEXT * budget // 100 - 4}"


def kl_of(want: torch.Tensor, got: torch.Tensor) -> float:
    want, got = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((want.exp() * (want - got)).sum(-1).mean())


@torch.no_grad()
def oracle(model: PreTrainedModel, ids: torch.Tensor, reference: torch.Tensor) -> dict[int, float]:
    """KL by budget if each head keeps the tokens that the scored queries attend to most, including 4 sinks."""
    context, scored = ids[:, :-SCORED], ids[:, -SCORED:]
    watcher = KVCache(model.config, "raw", policy=policies.H2O(1 << 30, score="sum"))
    model(context, past_key_values=watcher, logits_to_keep=1)
    layers = range(len(watcher.layers))
    before = [watcher.kept(i).scores[0] for i in layers]
    model(scored, past_key_values=watcher, logits_to_keep=1)
    after = [watcher.kept(i).scores[0] for i in layers]
    found = {}
    for budget in BUDGETS:
        cache = KVCache(model.config, "raw")
        model(context, past_key_values=cache, logits_to_keep=1)
        for i in layers:
            paid = torch.stack([a[: len(b)] - b for a, b in zip(after[i], before[i], strict=True)])
            paid[:, :4] = math.inf
            best = paid.topk(math.ceil(CONTEXT * budget / 100), 1).indices
            keep = torch.zeros_like(paid, dtype=torch.bool).scatter_(1, best, True)
            cache.layers[i]._change("evict", keep[None])
        found[budget] = kl_of(reference, model(scored, past_key_values=cache).logits[0])
    return found


def budgets(model: Any, tokenizer: Any, text: Path, windows: int, out: Path) -> list[dict[str, Any]]:
    """KL of every policy at every budget."""
    wanted = {(n, b): f"raw+{n}:{b}%" for n in SHARES for b in BUDGETS}
    wanted |= {("window", b): window_of(b) for b in BUDGETS}
    found = evaluate(
        model, text, [*wanted.values()], tokenizer=tokenizer, context=CONTEXT, scored=SCORED, windows=windows,
        cost=False, out=out,
    )  # fmt: skip
    rows = {row["strategy"]: row for row in found.rows}
    result = []
    for (name, budget), spec in wanted.items():
        row = rows[str(Strategy(spec))]
        keys = ("kl", "kl_low", "kl_high", "ppl", "ppl_reference")
        result.append({"policy": name, "budget": budget, **{k: row[k] for k in keys}})
    ids, bos = load_ids(text, tokenizer, 4096), bos_of(model, tokenizer)
    best: dict[int, list[float]] = {b: [] for b in BUDGETS}
    with attention_for(model, Strategy("raw")):
        for i in range(windows):
            start = (i + 1) * (len(ids) - CONTEXT - SCORED) // (windows + 1)
            batch = as_batch(bos + ids[start : start + CONTEXT + SCORED - len(bos)], model.device)
            reference = measure.reference_logits(model, batch, SCORED)
            kvcompress.enable(model, verbose=False)
            for budget, kl in oracle(model, batch, reference).items():
                best[budget].append(kl)
    return result + [{"policy": "oracle", "budget": b, "kl": sum(x) / len(x)} for b, x in best.items()]


@torch.no_grad()
def streamed(model: Any, policy: Any, ids: torch.Tensor, scored: int = 512, chunk: int = 512) -> float:
    """Perplexity of the last `scored` tokens of ids [1, T + 1], read through the cache in chunks."""
    cache, losses = KVCache(model.config, "raw", policy=policy), []
    T = ids.shape[1] - 1
    for at in range(0, T, chunk):
        keep = chunk if at + chunk > T - scored else 1
        logits = model(ids[:, at : at + chunk], past_key_values=cache, logits_to_keep=keep).logits[0]
        if keep > 1:
            target = ids[0, at + 1 : at + chunk + 1]
            losses.append(torch.nn.functional.cross_entropy(logits[-len(target) :].float(), target, reduction="none"))
    return math.exp(float(torch.cat(losses)[-scored:].mean()))


def sinks(model: Any, tokenizer: Any, text: Path, windows: int, out: Path) -> list[dict[str, Any]]:
    ids, bos, rows = load_ids(text, tokenizer, 4096), bos_of(model, tokenizer), []
    kvcompress.enable(model, verbose=False)
    known = Store(out / "cells.jsonl")
    for where, length in LENGTHS.items():
        starts = [i * (len(ids) - length - 1) // max(1, windows - 1) for i in range(windows)]
        parts = [as_batch(bos + ids[s : s + length + 1 - len(bos)], model.device) for s in starts]

        wanted = [
            (None, "no policy"),
            *((n, mode) for n in SINKS for mode in ("original", "cache") if n or mode != "cache"),
        ]
        for n, mode in wanted:
            cell = {"where": where, "length": length, "sinks": n, "positions": mode}
            policy = None if n is None else policies.StreamingLLM(n, WINDOW - n, positions=mode)
            losses = []
            for start, part in zip(starts, parts, strict=True):
                what = {**cell, "window": WINDOW, "start": start}
                if what not in known:
                    known.put(what, math.log(streamed(model, policy, part)))
                losses.append(known.get(what))
            rows.append({**cell, "ppl": math.exp(sum(losses) / len(losses))})
    known.close()
    return rows


@torch.no_grad()
def recipes(model: Any, tokenizer: Any, text: Path, windows: int, out: Path) -> list[dict[str, Any]]:
    """KL in fp32; bytes for a bf16 model, whose raw pages are half as large."""
    found = evaluate(
        model, text, RECIPES, tokenizer=tokenizer, context=2048, scored=SCORED, windows=windows, cost=False, out=out
    )
    ids = as_batch(bos_of(model, tokenizer) + load_ids(text, tokenizer, 4096)[:2047], model.device)
    model.to(torch.bfloat16)
    for row in found.rows:
        with attention_for(model, Strategy(row["strategy"])):
            cache = open_cache(model, Strategy(row["strategy"]))
            model(ids, past_key_values=cache, logits_to_keep=1)
            row["bytes"] = held_bytes(cache)
    model.float()
    keys = ("strategy", "bytes", "kl", "kl_low", "kl_high")
    return [{k: row[k] for k in keys} for row in found.rows]


@torch.no_grad()
def zipped(model: Any, sample: tasks.Sample, prompt: list[int], budget: float) -> list[int]:
    """Questions outside of a context compressed by KVzip."""
    with attention_for(model, Strategy("raw")):
        cache, ids = KVCache(model.config, "raw"), torch.tensor([sample.context])
        measure._prefill(model, ids, cache, 0)
        KVzip(budget, prompt).compress(model, cache, ids)
        return [measure._correct(model, copy.deepcopy(cache), q, a, model.device) for q, a in sample.questions]


def retrieval(model: Any, tokenizer: Any, text: Path, samples: int, out: Path) -> list[dict[str, Any]]:
    found = evaluate(
        model, text, ASKED, tokenizer=tokenizer, context=CONTEXT, scored=16, windows=1, cost=False, tasks=TASKS,
        samples=samples, out=out,
    )  # fmt: skip
    rows = []
    for row in found.rows:
        policy = next((n for n in ("window", *SHARES) if Strategy(row["strategy"]).options.get(n)), "dynamic")
        both = {t: [row["tasks"][t][k] for k in ("outside", "inside")] for t in TASKS}
        rows.append({"policy": policy, **both})
    ids, encode = load_ids(text, tokenizer, 4096), encoder(tokenizer)
    for budget in (0.5, 0.25):
        own: dict[str, Any] = {}
        for task in TASKS:
            right = []
            for i in range(samples):
                sample = tasks.make(task, encode, ids, CONTEXT, i, bos=bos_of(model, tokenizer))
                right += zipped(model, sample, encode("\nRepeat the previous context:"), budget)
            own[task] = [sum(right) / len(right), None]
        rows.append({"policy": f"kvzip {budget}", **own})
    return rows


# ---------------------------------------------------------------------- the page


def tutorials(model: Any, tokenizer: Any, windows: int, out: Path) -> list[dict[str, Any]]:
    """The tutorials' tables, on WikiText-2."""
    text = ROOT / "assets" / "text" / "wikitext2-test.txt"
    made = (run_table(name, model, text, tokenizer=tokenizer, windows=windows, out=out) for name in TUTORIALS)
    return [{**x.to_dict(), "about": {**x.about, "model": Path(x.about["model"]).name}} for x in made]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def small(x: float) -> str:
    return f"{x:.3f}" if x >= 0.0995 else f"{x:.4f}" if x >= 0.001 else f"{x:.0e}"


def windows_of(result: dict[str, Any]) -> str:
    counts = {x: found["windows"] for x, found in result["models"].items()}
    return ", ".join(f"{n} window{'s' * (n > 1)} of `{x}`" for x, n in counts.items())


def page(result: dict[str, Any]) -> str:
    parts = [
        f"""
Shipped models (5 M parameters, trained at up to 4,096 tokens), book text, fp32. One command measures all that follows,
draws the pictures and writes this part: `python benchmarks/policies.py` (a quarter of an hour a window on one core).

### Budgets
KL (nats) against the uncompressed model, {CONTEXT:,} tokens of context in one call, {SCORED} scored after it,
{windows_of(result)}. *Oracle*: each head keeps what the scored queries will attend to most.
"""
    ]
    for model, found in result["models"].items():
        by = {(r["policy"], r["budget"]): r["kl"] for r in found["budgets"]}
        rows = [[NAMES[n], *(small(by[n, b]) for b in BUDGETS)] for n in (*SHARES, "window", "oracle")]
        parts.append(table([f"`{model}`", *(f"{b}%" for b in BUDGETS)], rows))
    parts.append(
        "\n![KL against budget, and what is kept](eviction.png)\n"
        + verdict(result["models"])
        + """
### Sinks
"""
        + f"""Perplexity of the last 512 tokens, {WINDOW} kept (sinks and newest), after {LENGTHS["within"]:,} tokens
(within the trained length) and {LENGTHS["beyond"]:,} (beyond); positions as they were / inside the cache.
"""
    )
    for model, found in result["models"].items():
        by_mode = {(r["where"], r["sinks"], r["positions"]): r["ppl"] for r in found["sinks"]}
        rows = []
        for where in LENGTHS:
            cells = [f"{by_mode[where, None, 'no policy']:.1f}"]
            for n in SINKS:
                a, b = (by_mode.get((where, n, mode)) for mode in ("original", "cache"))
                cells.append(f"{a:.1f}" + (f" / {b:.1f}" if b else ""))
            rows.append([f"{where}", *cells])
        parts.append(table([f"`{model}`", "no policy", *(f"{n} sinks" for n in SINKS)], rows))
    parts.append("""
### Recipes
2,048 tokens of context, bf16; bytes of all that the cache holds, and how many such requests fit into 1 GiB.
On a model this small half-empty slabs of the pool count for much where little is kept.
""")
    for model, found in result["models"].items():
        rows = [
            [f"`{r['strategy']}`", f"{r['bytes'] / 1024:,.0f} KiB", f"{found['recipes'][0]['bytes'] / r['bytes']:.1f}x",
             f"{2**30 // r['bytes']:,}", small(r["kl"])] for r in found["recipes"]
        ]  # fmt: skip
        parts.append(table([f"`{model}`", "bytes", "smaller", "requests in 1 GiB", "KL"], rows))
    parts.append(f"""
### Retrieval
Share of right answers at half of {CONTEXT:,} tokens, `{ASKED_MODEL}`: question asked of the compressed context / part
of it when it was compressed. A window cannot find what it has dropped; policies that look at the last queries know a
question that is there, and only that one. (Two contexts a task: 2 passkeys, 16 needles, 64 pairs.)
""")
    rows = []
    for r in sorted(result["models"][ASKED_MODEL]["retrieval"], key=lambda r: -sum(r[t][0] for t in TASKS)):
        cells = [f"{r[t][0]:.2f}" + (f" / {r[t][1]:.2f}" if r[t][1] is not None else "") for t in TASKS]
        rows.append([NAMES[r["policy"]], *cells])
    parts.append(table(["policy", *TASKS], rows))
    parts.append("\n![Attention and what is kept of it; size over time; budgets of heads](eviction-heads.png)\n")
    have = [x["tutorials"] for x in result["models"].values() if "tutorials" in x]
    if not have:
        return "\n".join(parts)
    parts.append(f"""
### The tutorials' tables
What widespread tutorials claim, and the same here: WikiText-2 test, {windows_of(result)}, 2,048 tokens of
context, 256 scored. PPL (less that of the uncompressed model), KL. Other tables: [evaluation](evaluation-tables.md).
""")
    for found in zip(*have, strict=True):
        parts.append("##" + tables.section([Comparison(**x) for x in found]))
    return "\n".join(parts)


def verdict(models: dict[str, Any]) -> str:
    """A sentence on H2O with the numbers of the first table."""
    lines = []
    for model, found in models.items():
        by = {(r["policy"], r["budget"]): r for r in found["budgets"]}
        below = [b for b in BUDGETS if b < 75]
        beats = [b for b in below if by["h2o", b]["kl"] < by["random", b]["kl"]]
        wins = {
            name: [b for b in below if by[name, b]["kl"] < by["window", b]["kl"]]
            for name in ("h2o", "expected", "oracle")
        }
        said = {name: f"{', '.join(map(str, x))} percent" if x else "no budget" for name, x in wins.items()}
        lines.append(
            f"`{model}`: H2O beats random at {', '.join(map(str, beats)) or 'no'} percent, and the window at "
            f"{said['h2o']};\nExpectedAttention beats the window at {said['expected']}, the oracle at {said['oracle']}."
        )
    lines.append(
        "What was attended to so far says little, on models this small, about what the next 256 tokens attend to:\n"
        "the oracle, with the same budget, is several times better than any policy, and what is near is as\n"
        "good a guess as H2O's. (95% intervals of H2O, window and random overlap: see the picture's bands.)"
    )
    return "\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "policies")
    parser.add_argument(
        "--model", choices=MODELS, action="append", help="this one alone; others stay as they were found"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    text = ROOT / "assets" / "text" / "book.txt"
    known = ROOT / "benchmarks" / "results" / "policies.json"
    for name in args.model or MODELS:
        model, tokenizer = load_model(ROOT / "assets" / name, None)
        out = args.out / name
        found = {
            "windows": args.windows,
            "budgets": budgets(model, tokenizer, text, args.windows, out / "budgets"),
            "sinks": sinks(model, tokenizer, text, args.windows, out / "sinks"),
            "recipes": recipes(model, tokenizer, text, args.windows, out / "recipes"),
            "tutorials": tutorials(model, tokenizer, args.windows, out / "tutorials"),
        }
        if name == ASKED_MODEL:
            found["retrieval"] = retrieval(model, tokenizer, text, 2, out / "retrieval")
        before = json.loads(known.read_text())["models"] if known.exists() else {}
        models = {x: found if x == name else before.get(x) for x in MODELS}
        result = {"models": {x: y for x, y in models.items() if y}}
        known.write_text(json.dumps(result, indent=1) + "\n")
    if len(result["models"]) < len(MODELS):
        return
    policies_plot.draw(result, ROOT, NAMES)
    doc = ROOT / "docs" / "eviction.md"
    doc.write_text(doc.read_text().split(MARK)[0] + MARK + page(result))


if __name__ == "__main__":
    main()
