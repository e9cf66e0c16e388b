"""Writes the generated parts of docs/."""

from pathlib import Path

from kvcompress import formats

HEAD = """# Formats
Made by `make docs` from `csrc/core/formats.def`. A format name means that format in every layer, with 4 raw sinks and a
raw open page; `key=` and `value=` choose apart. `raw` is the raw format of the model's dtype.

"""
TAIL = """

Effective bits count all metadata of a page of 64 tokens. Every format is read by the attention op at every kernel
level, and gives the same bytes on each of them.
"""

if __name__ == "__main__":
    (Path(__file__).parent / "formats.md").write_text(
        HEAD + formats.support_matrix().replace("kernels here", "kernels") + TAIL
    )
