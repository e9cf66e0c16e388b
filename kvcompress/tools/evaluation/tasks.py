"""Retrieval tasks: facts hidden in a long text, and questions about them. Token lists only, without a model or torch.

A context is filler (any text) with statements inserted at random positions. Each question can be asked separately after
the context, so one compressed cache serves several questions (RULER, arXiv 2404.06654, has several kinds of needles;
arXiv 2510.00231 shows why one question per context favours eviction). An answer is correct if each of its tokens is the
model's most likely token. `benchmarks/train` trains the shipped models on the same templates with other seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WORDS = """
    animal battle beast bell bird bitter blood board boat bottom bread bright brown cabin captain chair chamber
    chief church city coat cold corner cousin danger dark desert dinner doctor door dream dress drink earth east
    empty engine evil father fire flesh floor forest garden gentle glass gold grass green ground guest heaven
    high hill honest horse hotel island iron judge jungle kind king kitchen knight lady large letter light long
    loud luck middle minute money moon morning mother mountain music narrow night noble north office paper party
    peace picture plain pocket poet police pretty priest prince proud quick quiet rain red rich right river road
    rock room round sand savage school sharp ship short shoulder silent silver simple sister slow small snow
    soft song south spring star stone storm story street summer sweet sword table tall thick thin tower town
    train tree true twelve valley village voice wall warm water west white wide wild window wine winter wise
    woman wood yellow young"""
_NAMES = """
    Ann Anthony Arthur August Brown Carrie Charles Claude Dan Evans Frank George Henry Herbert Hugo Jack Jim Joe John
    Juan Lucy Marie Mary Montgomery Olens Phil Phoebe Ramona Rob Robin Roman Sheriff Starr Tara Tom Watson Wheeler
    Will"""
WORDS, NAMES = tuple(_WORDS.split()), tuple(_NAMES.split())


@dataclass(frozen=True)
class Sample:
    """A context and its questions, as token ids."""

    context: list[int]
    questions: list[tuple[list[int], list[int]]]  # (question, answer), asked separately, after the context


Facts = tuple[list[str], list[tuple[str, str]], bool]  # statements, (question, answer), in one place at the start?


def _recall(r: random.Random, count: int) -> Facts:
    keys = r.sample(WORDS, count)
    values = [r.choice(WORDS) for _ in keys]
    block = "".join(f" {k} {v};" for k, v in zip(keys, values, strict=True))
    return [block], [(f"; {k}", f" {v}") for k, v in zip(keys, values, strict=True)], False


def _induction(r: random.Random, count: int) -> Facts:
    words = [r.choice(WORDS) for _ in range(4 * count + 4)]
    questions = []
    for i in range(count):
        at = 4 * i
        questions.append(("; " + " ".join(words[at : at + 4]), " " + " ".join(words[at + 4 : at + 8])))
    return [" " + " ".join(words) + ";"], questions, False


def _passkey(r: random.Random, count: int) -> Facts:
    key = r.randint(10000, 99999)
    return [f" The pass key is {key}. Remember it."], [("\nThe pass key is", f" {key}")], False


def _needles(r: random.Random, count: int) -> Facts:
    names = r.sample(NAMES, count)
    words = r.sample(WORDS, count)
    facts = [f" The secret word of {n} is {w}." for n, w in zip(names, words, strict=True)]
    return facts, [(f"\nThe secret word of {n} is", f" {w}") for n, w in zip(names, words, strict=True)], False


def _tracking(r: random.Random, count: int) -> Facts:
    names = r.sample(NAMES, 2 * count)
    words = r.sample(WORDS, count)
    facts, questions = [], []
    for first, second, word in zip(names[::2], names[1::2], words, strict=True):
        facts += [f" The box of {first} holds {word}.", f" {second} took the box of {first}."]
        questions.append((f"\n{second} took the box that holds", f" {word}"))
    return facts, questions, False


def _instructions(r: random.Random, count: int) -> Facts:
    first, second = r.sample(WORDS, 2)
    one, two = " Rule one: begin with the word", " Rule two: end with the word"
    questions = [("\n" + one.strip(), f" {first}"), ("\n" + two.strip(), f" {second}")]
    return [f"{one} {first}.{two} {second}."], questions, True


_MAKERS: dict[str, tuple[Callable[[random.Random, int], Facts], int]] = {
    "recall": (_recall, 32),
    "induction": (_induction, 8),
    "passkey": (_passkey, 1),
    "needles": (_needles, 8),
    "tracking": (_tracking, 4),
    "instructions": (_instructions, 2),
}
TASKS: tuple[str, ...] = tuple(_MAKERS)
"""recall: one of a list of word pairs; induction: words that follow four given ones; passkey: five digits; needles: one
of several secret words; tracking: two facts to combine; instructions: one of two rules at the start."""


def make(
    task: str,
    encode: Callable[[str], list[int]],
    filler: Sequence[int],
    length: int | None,
    seed: int,
    *,
    count: int | None = None,
    bos: Sequence[int] = (),
) -> Sample:
    """A context of `length` tokens (`bos` first) that contains the facts of `task`, and its questions.

    encode: function from text to ids, without special tokens. filler: ids of a text, at least `length`. length: None:
    all of the filler. count: number of facts (questions); each task has a default.

    Raises ValueError for an unknown task, a filler that is too short, or a length too small for the facts.
    """
    if task not in _MAKERS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    maker, usual = _MAKERS[task]
    r = random.Random(f"{task} {seed}")
    facts, asked, at_start = maker(r, count or usual)
    statements = [encode(fact) for fact in facts]
    room = len(filler) if length is None else length - len(bos) - sum(map(len, statements))
    if room < 0:
        raise ValueError(f"task {task}: expected a length of at least {(length or 0) - room}, got {length}")
    if len(filler) < room:
        raise ValueError(
            f"task {task}: expected a text of at least {room} tokens for length {length}, got {len(filler)}"
        )
    start = r.randrange(len(filler) - room + 1)
    text = list(filler[start : start + room])
    cuts = [0] * len(statements) if at_start else sorted(r.randrange(room + 1) for _ in statements)
    context, last = list(bos), 0
    for cut, statement in zip(cuts, statements, strict=True):
        context += text[last:cut] + statement
        last = cut
    context += text[last:]
    return Sample(context, [(encode(q), encode(a)) for q, a in asked])
