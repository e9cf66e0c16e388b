"""The command line: the parser and the commands that take models (`program`), those that take none or only a config
(`commands`), and what they print: this installation (`info`), a benchmark of this machine (`bench`)."""

from .program import main

__all__ = ["main"]
