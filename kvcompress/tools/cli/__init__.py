"""The command line: the parser and commands that load models (`program`), commands without a model or with only a
config (`commands`), information about the installation (`info`), a benchmark of this machine (`bench`)."""

from .program import main

__all__ = ["main"]
