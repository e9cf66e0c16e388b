"""The grammar of strategies: everything that can be written can be parsed again."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress import formats, policies
from kvcompress.tools import strategy
from kvcompress.tools.plan import measure as search
from kvcompress.tools.strategy import Strategy

names = st.sampled_from([*formats.NAMES, *formats.CALIBRATED])
heads = st.one_of(
    names,
    st.tuples(names, names).map("/".join),
    st.sampled_from(["dynamic", "hf-fp8", "quanto:4", "hqq:3"]),
    st.tuples(st.sampled_from(strategy.SCHEMES), st.sampled_from(strategy.GRANULARITIES)).map(
        lambda x: f"fake:{x[0]}@{x[1]}"
    ),
    st.sampled_from(strategy.PUBLISHED).map("fake:{}".format),
)


pairs = st.one_of(names, st.tuples(names, names).filter(lambda x: x[0] != x[1]).map("/".join))


@st.composite
def spans(draw):
    """Text of spans: ascending ends, in tokens or as fractions, the last one open or not."""
    n = draw(st.integers(1, 4))
    ends = sorted(draw(st.lists(st.integers(1, 99), min_size=n, max_size=n, unique=True)))
    if draw(st.booleans()):
        ends = [end / 100 for end in ends]
    parts = [f"{draw(pairs)}@{end}" for end in ends]
    return ",".join([*parts[:-1], draw(pairs) if draw(st.booleans()) else parts[-1]])


layers = st.dictionaries(st.integers(-5, 5), pairs, min_size=1, max_size=4).map(
    lambda x: ",".join(f"{i}={p}" for i, p in sorted(x.items()))
)
texts = {
    "spans": spans(),
    "per_layer": layers,
    "pyramid": st.floats(1, 9).map("{:.2f}".format),
    "chain": st.sampled_from(["window@99", "keydiff@50%,window@1024"]),
    "protect": st.lists(st.integers(0, 99), min_size=1, max_size=3).map(lambda x: ",".join(f"{a}-{a + 9}" for a in x)),
    "demote": st.sampled_from(["int8,int4", "raw/int8@0.5,int4@2", "int2"]),
    "watch": st.integers(1, 99).map(str),
    "calibration": st.sampled_from(["model.kvcal", "results/a-1/b.kvcal"]),
}
budgets = st.one_of(st.integers(1, 999).map(str), st.integers(1, 100).map("{}%".format))


@given(heads, st.data())
def test_round_trips(head, data):
    known = strategy._OPTIONS[strategy._kind(head)]
    chosen = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []
    policies = [n for n in chosen if n in strategy.POLICIES]
    around = [] if policies else strategy.AROUND
    chosen = [n for n in chosen if n not in (*policies[1:], *around)]
    texts.update(dict.fromkeys(policies, budgets) | {"window": st.integers(1, 999).map(str)})
    values = {n: data.draw(texts.get(n, st.integers(-1 if n in strategy._AXES else 0, 999))) for n in chosen}
    terms = [n if n in strategy._FLAGS else f"{n}:{values[n]}" for n in chosen]
    s = Strategy("+".join([head, *terms]))
    assert Strategy(str(s)) == s
    assert all(s.options[n] == x for n, x in values.items() if n not in strategy._FLAGS)
    assert eval(repr(s), {"Strategy": Strategy}) == s
    assert Strategy(s.to_dict()) == s and hash(Strategy(s)) == hash(s)


def test_order_and_defaults_do_not_matter():
    assert str(Strategy("int4 + residual_length:128 + sinks:4")) == "int4+residual_length:128"
    assert Strategy("int8/int8") == Strategy("int8")
    assert Strategy({"key": "int8", "value": "int4", "sinks": 8}) == Strategy("int8/int4+sinks:8")
    spans = Strategy({"key": "int4", "spans": [(0, 0.2, "int8"), (0.2, 1, "int4/int2")], "per_layer": {0: "int8"}})
    assert str(spans) == "int4+spans:int8@0.2,int4/int2@1+per_layer:0=int8"
    assert spans.arguments()["spans"] == [(0, 0.2, "int8"), (0.2, 1, "int4/int2")]
    assert Strategy("int4") != Strategy("int4+sinks:0") and Strategy("int4") != "int4"


@pytest.mark.parametrize("path", ["a b+c/m.kvcal", " {x,y}/50%/%2B\u00a0\u03b1.kvcal "])
def test_any_path_of_a_calibration(path):
    s = Strategy({"key": "int3", "calibration": path})
    assert Strategy(str(s)) == s and Strategy(str(s)).options["calibration"] == path
    assert Strategy(s.to_dict()) == s and strategy.expand(str(s)) == [str(s)]
    text, options = search._strategy([0, 1, 2], ["int8", "int4", "int8"], path, "50%")
    assert Strategy(text).options["calibration"] == options["calibration"] == path
    assert Strategy("cal2 + calibration: a b.kvcal + sinks:8").options["calibration"] == "a b.kvcal"
    with pytest.raises(ValueError, match=r"got 'c/m\.kvcal'; write a \+ in a path as %2B"):
        Strategy("int3+calibration:a b+c/m.kvcal")


def test_what_goes_around_a_policy():
    text = "int8+h2o:60+pyramid:3+chain:keydiff@50%,window@99+protect:0-16,40-44+demote:int8@2,int4+watch:8"
    policy = Strategy(text).arguments()["policy"]
    assert str(Strategy(text)) == text
    for made in (policy, policies.from_dict(json.loads(json.dumps(policy.to_dict())))):
        assert isinstance(made, policies.Watch) and made.clusters == 8
        assert made.ladder == (("int8", "int8"), ("int4", "int4")) and tuple(made.shares) == (2, 1)
        assert made.policy.policy.spans == [(0, 16), (40, 44)]
        chain = made.policy.policy.policy
        assert [type(x).__name__ for x in chain.policies] == ["KeyDiff", "StreamingLLM", "PyramidBudget"]
        assert (
            chain.policies[2].ratio == 3 and made.limit(1000, 0, 2) == 90 and made.limit(1000, 1, 2) == 35
        )  # sinks, residual_length, 1


def test_braces_make_a_grid():
    assert strategy.expand("int4") == ["int4"]
    assert strategy.expand("{int8,int4}+sinks:{0,4}") == [
        "int8+sinks:0",
        "int8+sinks:4",
        "int4+sinks:0",
        "int4+sinks:4",
    ]
    assert strategy.expand("int8/{int4,raw}") == ["int8/int4", "int8/raw"]
    with pytest.raises(ValueError, match="at most 10,000, got more"):
        strategy.expand("+".join(["{a,b}"] * 20_000))


@pytest.mark.parametrize(
    "bad, hint",
    [
        ("int5", "expected a format"),
        ("", "expected a format"),
        ("int8/int4/int2", "expected a format"),
        ("quanto:8", "expected a format"),
        ("fake:int4@page", "expected a format"),
        ("fake:kivi8", "one of kivi2, kivi3"),
        ("int8+windows:1", "expected options out of"),
        ("int8+window:5%", "window: expected tokens, got '5%'"),
        ("int8+h2o:0", "h2o: expected tokens or a share"),
        ("int8+h2o:9+random:9", "at most one policy"),
        ("int8+watch:16", "expected a policy for pyramid"),
        ("int8+h2o:9+kvzip:30%", "second pass over a prefix"),
        ("int8+h2o:9+pyramid:0.5", "pyramid: expected a ratio of at least 1"),
        ("int8+h2o:9+chain:best@9", "chain: expected NAME@BUDGET"),
        ("int8+h2o:9+protect:9", "protect: expected BEGIN-END"),
        ("int8+h2o:9+demote:int4,int8", "formats, largest first"),
        ("int8+h2o:9+watch:0", "watch: expected at least 1 cluster"),
        ("dynamic+sinks:4", "expected options out of"),
        ("int8+sinks", "NAME:INTEGER"),
        ("int8+sinks:-1", "NAME:INTEGER"),
        ("int8+sinks:4+sinks:5", "twice"),
        ({"key": "int8", "sinks": -1}, "at least 0"),
        ({"key": "int8", "sinks": "4"}, "at least 0"),
        ({}, "expected a format"),
        ("int8+spans:int4@x", "FORMAT@END"),
        ("int8+spans:int4@0.5,int8@0.2", "expected a span from 0.5 to a larger end"),
        ("int8+spans:int5@0.5", "expected formats out of"),
        ("int8+per_layer:x=int4", "LAYER=FORMAT"),
        ("int8+per_layer:0=int4,0=int8", "LAYER=FORMAT"),
    ],
)
def test_bad_specs(bad, hint):
    with pytest.raises(ValueError, match=hint):
        Strategy(bad)


def test_bad_types_and_no_change():
    with pytest.raises(TypeError, match="str, a dict or a Strategy"):
        Strategy(4)
    with pytest.raises(AttributeError):
        Strategy("int8").head = "int4"
