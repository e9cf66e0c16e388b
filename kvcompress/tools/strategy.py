"""Strategy: the options of a cache as a short string, for tables, files and command lines.

    strategy := head ("+" option)*
    head     := FORMAT | FORMAT "/" FORMAT       pages of kvcompress; K format / V format
              | "dynamic"                        transformers' DynamicCache, without compression
              | "quanto:" BITS | "hqq:" BITS | "hf-fp8"      transformers' QuantizedCache
              | "fake:" SCHEME "@" GRANULARITY   analysis only: values are rounded, but not packed
              | "fake:" METHOD BITS              rounding of a published method, one of PUBLISHED
    option   := NAME ":" INTEGER | NAME          named as the arguments of the cache
              | "spans:" FORMATS ["@" END] ","..         formats by position, up to END (tokens, or fractions)
              | "per_layer:" LAYER "=" FORMATS ","..
              | POLICY ":" BUDGET                eviction: window, h2o, h2o_sum, ada_h2o, score, tova, snapkv, rkv,
                                                 knorm, keydiff, random, expected, critical_h2o, critical_snapkv;
                                                 budget in tokens, or as a share: "h2o:10%"
              | "pyramid:" RATIO | "chain:" POLICY "@" BUDGET "," ..
              | "protect:" BEGIN "-" END "," .. | "demote:" FORMATS ["@" SHARE] "," .. | "watch:" CLUSTERS
                                                 wrappers of the policy: see `kvcompress.policies.registry`
              | "calibration:" PATH              with "+", braces and "%" as in URLs: %2B, %7B, %7D, %25

Braces expand to a grid: "{int8,int4}+sinks:{0,4,16}" (see `expand`).

Examples: "int4", "int8/int4+sinks:8+residual_length:128", "int4+per_layer:0=int8,-1=int8",
"int4+spans:int8@0.2,int4", "quanto:4+residual_length:64", "fake:int8@tensor".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any
from urllib.parse import quote, unquote

from .. import formats
from ..policies.registry import AROUND, around, check, make
from ..policies.registry import NAMES as POLICIES
from ..quantization.mixed_precision import Spans, pair, read_layers, read_spans, write_layers, write_spans

_FORMATS = (*formats.NAMES, *formats.CALIBRATED)
SCHEMES = ("int8", "int4", "int3", "int2", "int4_asym", "int2_asym", "fp8_e4m3", "fp8_e5m2")
GRANULARITIES = ("tensor", "head", "token", "channel", "group32", "static")
PUBLISHED = tuple(x + bits for x in ("kivi", "quarot", "turboquant", "kvarn", "kvquant", "oscar") for bits in "234")
HF_BITS = {"quanto": ("2", "4"), "hqq": ("1", "2", "3", "4", "8")}
Option = int | str | None
_OPTIONS: dict[str, dict[str, Option]] = {
    "kvcompress": {
        "sinks": 4,
        "residual_length": None,
        "page_size": 64,
        "guard": 0,
        "strict": 0,
        "spans": None,
        "span_tokens": None,
        "per_layer": None,
        "calibration": None,
        **dict.fromkeys((*POLICIES, *AROUND), None),
    },
    "dynamic": {},
    "hf": {"residual_length": 128, "q_group_size": 64, "axis_key": None, "axis_value": None},
    "hf-fp8": {},
    "fake": {"sinks": 4, "page_size": 64, "calibration": None},
}
_FLAGS = ("guard", "strict")
_GRID = 10_000  # maximum number of strategies of a grid
_AXES = ("axis_key", "axis_value")  # 0: quanto's groups along a row; -1, and 1 of hqq, as their documentation says
_TEXTS: dict[str, tuple[Callable, Callable]] = {
    "spans": (read_spans, write_spans),
    "per_layer": (read_layers, write_layers),
}


def _kind(head: str) -> str:
    """The family of caches of `head`. Raises ValueError if it is unknown."""
    name, _, rest = head.partition(":")
    if head in ("dynamic", "hf-fp8"):
        return head
    if name in HF_BITS and rest in HF_BITS[name]:
        return "hf"
    scheme, _, granularity = rest.partition("@")
    if name == "fake" and (rest in PUBLISHED or (scheme in SCHEMES and granularity in GRANULARITIES)):
        return "fake"
    if head.count("/") <= 1 and all(part in _FORMATS for part in head.split("/")):
        return "kvcompress"
    raise ValueError(
        f"strategy: expected a format ({', '.join(_FORMATS)}) or K/V formats, dynamic, quanto:BITS, hqq:BITS, "
        f"hf-fp8, or fake:SCHEME@GRANULARITY ({', '.join(SCHEMES)}; {', '.join(GRANULARITIES)}) or fake: and one of "
        f"{', '.join(PUBLISHED)}, got {head!r}"
    )


def expand(text: str) -> list[str]:
    """All combinations of the alternatives in braces: "{int8,int4}+sinks:{0,4}" has four. Raises ValueError for more
    than 10,000."""
    parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(re.split(r"\{([^{}]*)\}", text))]
    if math.prod(map(len, parts)) > _GRID:
        raise ValueError(f"strategies: expected a grid of at most {_GRID:,}, got more; remove some alternatives")
    return ["".join(choice) for choice in product(*parts)]


def _integer(head: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or value < (-1 if name in _AXES else 0):
        raise ValueError(f"strategy {head!r}: {name}: expected an integer of at least 0, got {value!r}")
    return int(value)


def _text(name: str, value: Any) -> str:
    """The canonical text of a _TEXTS option."""
    read, write = _TEXTS[name]
    plain = read(value) if isinstance(value, str) else value
    text = write(plain)
    read(text)
    names = Spans(plain).formats() if name == "spans" else [pair(x, name) for x in plain.values()]
    for unknown in {x for both in names for x in both} - set(_FORMATS):
        raise ValueError(f"strategy: {name}: expected formats out of {', '.join(_FORMATS)}, got {unknown!r}")
    return text


class Strategy:
    """The options of a cache. Immutable; `Strategy(str(s)) == s`, and `repr` is valid Python.

    Args:
        spec: a string of the grammar above; a dict with "key" and "value" (formats of kvcompress; "value" defaults to
            "key") or "head", and options; or a Strategy.

    Raises ValueError for an unknown head or option, or an option given twice; TypeError for another type.
    """

    __slots__ = ("head", "kind", "options")
    head: str
    kind: str
    options: dict[str, Option]

    def __init__(self, spec: str | dict[str, Any] | Strategy) -> None:
        head: str
        given: dict[str, Any]
        if isinstance(spec, Strategy):
            head, given = spec.head, dict(spec.options)
        elif isinstance(spec, dict):
            given = dict(spec)
            head = given.pop("head", None) or given.pop("key", None) or ""
            if "value" in given:
                head = f"{head}/{given.pop('value')}"
        elif isinstance(spec, str):
            head, given = self._read(spec)
        else:
            raise TypeError(f"strategy: expected a str, a dict or a Strategy, got {type(spec).__name__}")
        if head.count("/") == 1 and len(set(head.split("/"))) == 1:
            head = head.split("/")[0]
        kind = _kind(head)
        usual = _OPTIONS[kind]
        for name, value in given.items():
            if name == "kvzip":
                raise ValueError(
                    f"strategy {head!r}: expected an eviction policy, got kvzip, which needs a second pass over a "
                    "prefix: use kvcompress.KVzip(0.3).compress(model, cache, ids)"
                )
            if name not in usual:
                raise ValueError(f"strategy {head!r}: expected options out of {sorted(usual)}, got {name!r}")
            if value is None and usual[name] is None:
                continue
            if name in (*POLICIES, *AROUND):
                given[name] = check(name, value)
            elif name == "calibration":
                given[name] = str(value)
            else:
                given[name] = _text(name, value) if name in _TEXTS else _integer(head, name, value)
        options = {**usual, **given}
        if len([name for name in POLICIES if options.get(name)]) > 1:
            raise ValueError(f"strategy {head!r}: expected at most one policy, got more; combine them with chain:")
        if any(options.get(name) for name in AROUND) and not any(options.get(name) for name in POLICIES):
            raise ValueError(f"strategy {head!r}: expected a policy for {', '.join(AROUND)}, got none")
        for field, content in (("head", head), ("kind", kind), ("options", options)):
            object.__setattr__(self, field, content)

    @staticmethod
    def _read(text: str) -> tuple[str, dict[str, Option]]:
        head, *terms = text.split("+")
        given: dict[str, Option] = {}
        for term in terms:
            name, colon, number = term.partition(":")
            name, path, number = name.replace(" ", ""), unquote(number.strip()), number.replace(" ", "")
            if name in given:
                raise ValueError(f"strategy {text!r}: expected every option once, got {name!r} twice")
            if not colon and name in _FLAGS:
                given[name] = 1
            elif name == "calibration" and path:
                given[name] = path
            elif (name in _TEXTS and number) or (name in (*POLICIES, *AROUND, "kvzip") and colon):
                given[name] = number
            elif number.isdecimal() or (name in _AXES and number == "-1"):
                given[name] = int(number)
            else:
                hint = "; write a + in a path as %2B" if "calibration" in given else ""
                raise ValueError(f"strategy {text!r}: expected an option NAME:INTEGER, got {term!r}{hint}")
        return head.replace(" ", ""), given

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("Strategy is immutable; create a new one")

    def arguments(self) -> dict[str, Any]:
        """The options as arguments of the cache."""
        read = {name: _TEXTS[name][0](text) for name in _TEXTS if isinstance(text := self.options.get(name), str)}
        flags = {name: bool(self.options[name]) for name in _FLAGS if name in self.options}
        plain = {name: x for name, x in self.options.items() if name not in (*POLICIES, *AROUND)}
        wrapped = {name: str(x) for name in AROUND if (x := self.options.get(name))}
        for name in POLICIES:
            if isinstance(budget := self.options.get(name), str):
                made = make(name, budget, int(plain["sinks"] or 0), int(plain["residual_length"] or 0))  # type: ignore
                plain["policy"] = around(made, wrapped)  # type: ignore[assignment]
        return {**plain, **flags, **read}

    def _changed(self) -> dict[str, Option]:
        return {name: x for name, x in self.options.items() if x != _OPTIONS[self.kind][name]}

    def to_dict(self) -> dict[str, Any]:
        """{"head": ..., option: value} of options that differ from the defaults; `Strategy(s.to_dict()) == s`."""
        return {"head": self.head, **self._changed()}

    def __str__(self) -> str:
        changed = self._changed()
        if "calibration" in changed:
            changed["calibration"] = re.sub(r"[+{}%\s]", lambda found: quote(found[0]), str(changed["calibration"]))
        terms = [name if name in _FLAGS else f"{name}:{x}" for name, x in changed.items()]
        return "+".join([self.head, *terms])

    def __repr__(self) -> str:
        return f"Strategy({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))
