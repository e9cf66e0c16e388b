"""For the site: `key, value: formats` is one line of a docstring and two arguments, each with a default of its own."""

import re

import griffe

_SEVERAL = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {8}.*)*)", re.MULTILINE)


class SplitArguments(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            head, args, rest = obj.docstring.value.partition("Args:\n")
            args, end, rest = rest.partition("\n\n") if args else ("", "", "")
            split = _SEVERAL.sub(lambda m: "\n".join(f"    {name}: {m[2]}" for name in m[1].split(", ")), args)
            obj.docstring.value = f"{head}Args:\n{split}{end}{rest}" if split else head
