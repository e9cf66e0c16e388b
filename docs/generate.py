"""Writes the generated parts of docs/."""

from pathlib import Path

from kvcompress import formats

HEAD = """# Formats
Made by `make docs` from `csrc/core/formats.def`. A format name means that format in every layer, with 4 raw sinks and a
raw open page; `key=` and `value=` choose apart. `raw` is the raw format of the model's dtype.

"""
TAIL = """

Effective bits an element count all metadata of a page of 64 tokens at a head dim of 128. A token of a movable format
can leave its page as it is; where K's metadata is over the page (a centroid, channels) it cannot. The same table for
this machine: `python -m kvcompress formats` (`--json`). Every format is read by the attention op at every kernel level,
and gives the same bytes on each of them.
"""

if __name__ == "__main__":
    (Path(__file__).parent / "formats.md").write_text(
        HEAD + formats.support_matrix().replace("kernels here", "kernels") + TAIL
    )
