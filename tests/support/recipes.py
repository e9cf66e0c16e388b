"""The changes that tests/project/test_recipes.py applies for each recipe of CONTRIBUTING.md, by file, and for each
recipe a program that fails unless the change is complete and works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
Change = Callable[[str], str]


def after(mark: str, new: str) -> Change:
    def change(text: str) -> str:
        assert text.count(mark) == 1, f"{mark!r}: {text.count(mark)} times"
        return text.replace(mark, mark + new)

    return change


def both(*changes: Change) -> Change:
    def change(text: str) -> str:
        for one in changes:
            text = one(text)
        return text

    return change


SMALL = """
rooms = "tests/project/test_structure.py::test_rooms_do_not_grow"  # which `make check` runs
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", rooms]) == 0
"""
POLICY = '''"""Thirds: every third of the old tokens."""

from torch import Tensor

from .base import Policy, StoredTokens


class Thirds(Policy):
    """Keeps every third token first, then the newest (no paper)."""

    heads = "shared"

    def score(self, stored: StoredTokens) -> Tensor:
        return (stored.positions % 3 == 0) * 1e6 + stored.positions.float()
'''
REFERENCE = """def thirds(budget, sinks=4):
    def rule(row):
        score = torch.tensor([[i + (i % 3 == 0) * 1e6 for i in range(row.n)]] * row.H, dtype=torch.float64)
        return best(row, score, budget, sinks)

    return rule


"""
ADD_POLICY = {
    "kvcompress/policies/NAME.py": lambda _: POLICY,
    "kvcompress/policies/__init__.py": both(
        after("from .rkv import RKV\n", "from .thirds import Thirds\n"),
        after('    "StoredTokens",\n', '    "Thirds",\n'),
    ),
    "kvcompress/__init__.py": both(
        after("        StreamingLLM,\n", "        Thirds,\n"), after('"StreamingLLM", "TOVA", ', '"Thirds", ')
    ),
    "kvcompress/policies/registry.py": both(
        after("from .rkv import RKV\n", "from .thirds import Thirds\n"),
        after('    "knorm": KNorm,\n', '    "thirds": Thirds,\n'),
    ),
    "tests/support/evict_reference.py": lambda text: text.replace("def knorm(", REFERENCE + "def knorm("),
    "tests/eviction/test_policies.py": both(
        after("    StreamingLLM,\n", "    Thirds,\n"),
        after("CASES = {\n", '    "thirds": (Thirds(40), reference.thirds(40), 40),\n'),
    ),
    "docs/eviction.md": after("| each | 2406.11430 |\n", "| `Thirds(budget)` | every third token | each | |\n"),
    "docs/api/policies.md": lambda text: text + "::: kvcompress.policies.thirds\n",
}
POLICY_WORKS = (
    """
import pathlib, pytest, kvcompress
from kvcompress.policies.registry import make
policy = make("thirds", "25%", 4, 0)
assert type(policy) is kvcompress.Thirds
assert type(kvcompress.policies.from_dict(policy.to_dict())) is kvcompress.Thirds
assert "`Thirds(" in pathlib.Path("docs/eviction.md").read_text()
files = ["tests/eviction/test_policies.py", "-k", "as_the_paper_says and thirds"]
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files]) == 0
sources = ["tests/project/test_docs.py::test_policies_name_their_source"]
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *sources, "-k", "Thirds"]) == 0
pages = "tests/project/test_docs.py::test_every_public_name_is_in_the_api_pages"
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", pages]) == 0
"""
    + SMALL
)
COMMAND = '''def shout(args: argparse.Namespace) -> int:
    """The name of the library, loud."""
    _print(args, {"said": "KVCOMPRESS"}, "KVCOMPRESS")
    return 0


def add('''
ADD_COMMAND = {
    "kvcompress/tools/cli/commands.py": both(
        lambda text: text.replace("def add(", COMMAND),
        lambda text: (
            text + '\n    p = commands.add_parser("shout", parents=[common], help="its name")\n'
            "    p.set_defaults(run=shout)\n"
        ),
    ),
    "docs/cli.md": after("(`examples/demo.py`) | yes |\n", "| `shout` | | no |\n"),
    "tests/tools/test_commands.py": lambda text: (
        text + "\n\ndef test_shout(capsys):\n"
        '    assert printed(capsys, "shout") == (0, "KVCOMPRESS\\n")\n'
        '    assert json.loads(printed(capsys, "shout", "--json")[1]) == {"said": "KVCOMPRESS"}\n'
    ),
}
COMMAND_WORKS = (
    """
import pathlib, pytest
assert "| `shout`" in pathlib.Path("docs/cli.md").read_text()
files = ["tests/tools/test_commands.py", "-k", "shout"]
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files]) == 0
"""
    + SMALL
)
BUILD = """
import os, pathlib, subprocess, sys, numpy, pytest, torch
subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], check=True)
def passes(file, chosen):
    return pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", file, "-k", chosen]) == 0
"""
FORMAT_WORKS = """
assert "`{name}`" in pathlib.Path("docs/{page}.md").read_text()
from kvcompress import PagedKV
make, golden = "tests/golden/make.py", "tests/golden/codec.npz"
old = dict(numpy.load(golden))
subprocess.run([sys.executable, make], check=True)
new = numpy.load(golden)
assert any("page_{name}_" in name for name in new) and all((new[name] == x).all() for name, x in old.items())
kv, x = PagedKV(2, 64, key="{name}", page_size=16), torch.randn(1, 2, 90, 64)
kv.append(x, x.flip(3))
kv.append(x[:, :, :1], x[:, :, :1])
q, (k, v) = torch.randn(1, 4, 1, 64), kv.dense()
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
assert (kv.attend(q)[0] - want).abs().max() < 0.02
assert passes("tests/core/test_codec.py", "golden or same_bytes or meant")
assert passes("tests/core/test_codec.py", "{test} and {name}")
"""


def in_spec(row: str) -> Change:
    """Adds a format to the reference."""
    return lambda text: text.replace("}\nQUANTIZED", f"    {row},\n}}\nQUANTIZED", 1)


def golden_page(row: str) -> Change:
    return lambda text: text.replace(")\n\n\ndef uniform", f"    ({row}),\n)\n\n\ndef uniform", 1)


ADD_FORMAT = {
    "csrc/core/formats.def": lambda text: (
        text + 'KVC_FORMAT(INT4_G64, "int4_g64", 4, UINT, F16, 64, TOKEN, 0, 64, "scale and zero point per 64 dims")\n'
    ),
    "tests/support/codec_reference.py": in_spec('"int4_g64": (4, "uint", 64, "token")'),
    "tests/golden/make.py": golden_page('"int4_g64", "int4_g64", 128, 32'),
    "docs/formats.md": lambda text: text + "\n| `int4_g64` |\n",
}
FRONT = """\
    if (key == KVC_INT8_FRONT) {
        l.k_meta = 0;
        l.v_meta = kvc_align(kvc_meta_bytes(key, 1, key_dim, page_size));
        l.k = l.v_meta + kvc_align(kvc_meta_bytes(value, 0, value_dim, page_size));
        l.v = l.k + kvc_align(tiles * kvc_tile_bytes(key, key_dim));
        l.bytes = l.v + kvc_align(tiles * kvc_tile_bytes(value, value_dim));
        return l;
    }
"""
FRONT_REFERENCE = """\
    if key == "int8_front":
        sides = zip((key, value), (True, False), dims)
        n = sum(-(-meta_bytes(*side, size) // 64) * 64 for side in sides)
        page = np.concatenate((page[n:], page[:n]))
"""
ADD_LAYOUT = {  # metadata comes first
    "csrc/core/formats.def": lambda text: (
        text + 'KVC_FORMAT(INT8_FRONT, "int8_front", 8, INT, F16, 0, TOKEN, 0, 16, "int8 behind its scales")\n'
    ),
    "csrc/core/page.h": after("    int64_t tiles = page_size / KVC_TILE;\n", FRONT),
    "tests/support/codec_reference.py": both(
        in_spec('"int8_front": (8, "int", 0, "token")'),
        after('metadata bytes, by page.h."""\n', FRONT_REFERENCE),
    ),
    "tests/core/test_codec.py": after("PAIRS = (\n", '    ("int8_front", "int4"),\n'),
    "tests/golden/make.py": golden_page('"int8_front", "int4", 64, 32'),
    "docs/concepts.md": lambda text: text + "\nPages of `int8_front` begin with their metadata.\n",
}
LARGEST = """
kvc_status kvc_op_largest(kvc_frame *f)
{
    const kvc_tensor *x = &f->tensor[0];
    void *out;
    KVC_TRY(kvc_op_on_cpu(f));
    KVC_TRY(kvc_op_expect_contiguous(f, 0, "x", 1u << KVC_T_F32, 2));
    KVC_TRY(kvc_op_output(f, KVC_T_F32, 1, x->size, &out));
    float *most = memset(out, 0, (size_t)x->size[0] * sizeof *most);
    for (int64_t i = 0; i < x->numel; i++) {
        float a = ((const float *)x->data)[i], *to = most + i / x->size[1];
        *to = a > *to ? a : -a > *to ? -a : *to;
    }
    return KVC_OK;
}
"""
LARGEST_WRAPPED = '''
largest = _wrap(_ops.largest.default, """largest(x [n, D]) -> [n]: the largest magnitude of each row.""")


@torch.library.register_fake("kvcompress::largest")
def _(x):
    return x.new_empty(x.shape[:1])
'''
ADD_OP = {
    "csrc/torch/ops.c": lambda text: text.replace(
        "    X(quantize, ", '    X(largest, "T", "(Tensor x) -> Tensor") \\\n    X(quantize, ', 1
    ),
    "csrc/torch/ops.h": after("kvc_status kvc_op_quantize(kvc_frame *), ", "kvc_op_largest(kvc_frame *), "),
    "csrc/torch/ops_codec.c": lambda text: text + LARGEST,
    "kvcompress/ops.py": lambda text: text + LARGEST_WRAPPED,
    "docs/ops.md": after("| op | schema |\n|---|---|\n", "| `largest` | `(Tensor x) -> Tensor` |\n"),
    "tests/core/test_ops.py": after("CALLS = {\n", '    "largest": lambda: (torch.randn(3, 32),),\n'),
}
OP_WORKS = (
    """
assert "`largest`" in pathlib.Path("docs/ops.md").read_text()
from kvcompress import ops
x = torch.randn(5, 48)
assert torch.equal(ops.largest(x), x.abs().amax(1))
assert passes("tests/core/test_ops.py", "opcheck and largest")
"""
    + SMALL
)


def plain(_: str) -> str:
    """The level: the scalar code under another name, with one kernel in a separate file."""
    text = (ROOT / "csrc/core/kernels/scalar_attend.c").read_text()
    text = text.replace("kvc_kernels_scalar", "kvc_kernels_plain").replace('"scalar"', '"plain"')
    text = text.replace(".factors = factors", ".factors = kvc_plain_factors")
    return text + "void kvc_plain_factors(float *m, const float *lse, int64_t n) { factors(m, lse, n); }\n"


ADD_LEVEL = {
    "csrc/core/kernels/<isa>.c": plain,
    "csrc/core/kernels/levels.h": after("extern const kvc_kernels kvc_kernels_scalar", ", kvc_kernels_plain"),
    "csrc/core/kernels/levels.c": after("    {&kvc_kernels_scalar, always},\n", "    {&kvc_kernels_plain, always},\n"),
    "csrc/core/kernels/attend_kernels.h": after(
        "#include <math.h>\n", "void kvc_plain_factors(float *m, const float *lse, int64_t n);\n"
    ),
    "tests/c/main.c": after('LEVELS[] = {"scalar", ', '"plain", '),
    "tests/core/test_module.py": after('LEVELS = ("scalar", ', '"plain", '),
    "docs/limits.md": lambda text: text + "\nThe level `plain` runs anywhere.\n",
}
LEVEL_WORKS = """
assert "`plain`" in pathlib.Path("docs/limits.md").read_text()
os.environ["KVCOMPRESS_ISA"] = "plain"
from kvcompress import _C
assert _C.isa() == "plain" and _C.isa_available()[:2] == ("scalar", "plain")
subprocess.run([sys.executable, "tests/golden/make.py", "--check"], check=True)
make = ["make", "-s", "-j2", "-f", "tests/c/Makefile", "OUT=build/harness", "CC=" + os.environ["CC"]]
subprocess.run(make, check=True)
done = subprocess.run(["build/harness/harness", "plain"], capture_output=True, text=True, check=True)
assert done.stderr == "levels: plain\\n", done.stderr
assert passes("tests/core/test_module.py", "levels or isa")
"""
FAMILY = """\
    "stablelm": lambda: hf.StableLmConfig(**some(head_dim=None, partial_rotary_factor=0.5)),
"""
ADD_FAMILY = {
    "tests/support/families.py": after("    **models.CONFIGS,\n", FAMILY),
    "docs/huggingface.md": after("gpt-oss, Phi, ", "StableLM, "),
}
FAMILY_WORKS = """
import pathlib, pytest
assert "StableLM" in pathlib.Path("docs/huggingface.md").read_text()
files = ["tests/hf/test_product.py", "-k", "test_pairs and stablelm"]
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files]) == 0
"""
RECIPES: dict[str, tuple[dict[str, Change], str, str]] = {  # changes, the program, the value of NAME or <isa> in paths
    "Adding a policy": (ADD_POLICY, POLICY_WORKS, "thirds"),
    "Adding a command": (ADD_COMMAND, COMMAND_WORKS, ""),
    "Adding a family of models": (ADD_FAMILY, FAMILY_WORKS, ""),
    "Adding a format": (
        ADD_FORMAT, BUILD + FORMAT_WORKS.format(name="int4_g64", page="formats", test="int4_g64"), ""
    ),
    "Changing the layout of a page": (
        ADD_LAYOUT, BUILD + FORMAT_WORKS.format(name="int8_front", page="concepts", test="laid_out"), ""
    ),
    "Adding an op": (ADD_OP, BUILD + OP_WORKS, ""),
    "Adding an instruction set": (ADD_LEVEL, BUILD + LEVEL_WORKS, "plain"),
}  # fmt: skip
