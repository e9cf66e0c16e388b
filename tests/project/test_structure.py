"""The structure of kvcompress/: rooms (subfolders) import only lower rooms, private names are used in their own file
only, and counts that may only decrease: private attributes used in other files, import cycles, non-standard words, long
functions. `python tests/project/test_structure.py` prints them, with the size of each room."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PACKAGE = next(p for p in Path(__file__).resolve().parents if (p / "kvcompress").is_dir()) / "kvcompress"
PYTHON = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in PYTHON.items()}

# Folders and files of kvcompress/: each imports only from those before it, and from itself.
ROOMS = (
    "_C", "checks", "files", "formats", "schemes", "merge_states", "sdpa", "ops", "quantization", "vllm",
    "store", "policies", "eviction", "offload", "layer_store", "layer", "cuda_graph", "parallel",  # without a model
    "hf", "serving", "tools", "__main__",
)  # fmt: skip
UPWARD = {  # imports within functions
    "store/display_mixin.py": {"tools"},  # draws itself
    "policies/critical.py": {"hf"},  # finds the output projections of a given model
}
HF = ("hf", "serving", "tools")  # may import transformers

# Limits that may only decrease: a change that lowers a count lowers the limit too.
PRIVATE = 0  # attributes `x._y` in a file that does not define `_y`, where another file does; imports of `_y`
CIRCLES = 0  # modules in import cycles, including imports for type checkers and in functions
FOR_TYPES = 0  # imports of higher rooms for type checkers alone
LONG = 0  # functions of more than 60 lines
WORDS: dict[str, int] = {
    "away": 0, "beside": 0, "fade": 0, "following": 0, "foreign": 0, "gone": 0, "keeping": 0, "lane": 0,
    "lanes": 0, "mass": 0, "mover": 0, "nbits": 1, "observed": 0, "paid": 0, "parcel": 0, "parked": 0,
    "pays": 0, "regret": 0, "ring": 1, "settle": 0, "undo": 0, "wanted": 0,
}  # fmt: skip
# Words of WORDS that C does not use either.
C_WORDS = ("away", "fade", "mass", "mover", "nbits", "observed", "paid", "parcel", "parked", "pays", "regret")


# Maximum number of statements (of Python's ast, including docstrings) of each room. A feature may raise the limit of
# its room, with a reason in this list; deleting or merging code lowers it. Files that the recipes of CONTRIBUTING.md
# add to are not counted: a new policy or command must not raise a limit. What raised them ("files": those outside of
# rooms):
# - calibration (maps, their file, measuring, command): quantization 70, hf 100, tools 14, store 24; its maps for
#   formats of one width, several texts, a C op: quantization 33, ops 3, store 1, tools 1; weighted by the cost of
#   noise: hf 28
# - published methods, for comparison: tools 122, hf 5
# - CUDA graphs, one copy for all layers: cuda_graph 21; the library of another package: files 7
# - latents in inspect and plan: tools 27; latents absorbed in graphs: hf 41
# - models with an indexer (layer, masks, report): hf 55, tools 4
# - removing queries in a crop: eviction 5
# - `plan --measure` with pairs and calibrated formats: tools 11
# - formats by layer and KV transfer in vLLM: vllm 47 (which had lost 22); blocks shared by layers of different sizes:
#   19
# - error feedback between codes: quantization 22, store 5
# - checks of one call per tensor: files 9, hf 7 (offload and parallel lost 28)
# - long calls by torch's attention: files 80, store 14
# - a step without torch's dispatcher: files 13, store 2, hf 16 (LazyKV created for several layers), serving 1; before
#   the checks of its query: files 8, store 7, hf 2, serving 1
# - states of a suspended cache are not returned: hf 7
# - tensors of torch.func, models that make their own masks, files without states: files 11, hf 34, tools 8
# - prefix tuning, cross-attention, PaliGemma 2: hf 16; K and V of cross-attention rejected before they are stored: hf
#   10
# - models measured in eval mode and restored: hf 11; arguments of commands and `evaluate`: tools 10
# - attention of vision towers kept; rejected arguments: tools 4; weights of blocks, contents of calibrations: tools 7
# - ops reject tensors on the meta device among others: files 13
# - one error for pickling, weights checked by bind(), lists: files 12, hf 18, offload 2, quantization 2, serving 2;
#   interrupted passes stay in their cache: hf 7
# - errors that name paths, numbers of tokens and the class: files 23, hf 1 (quantization lost 2)
# - transfers that a crop has outdated, observers of several models, options hashed once: offload 2, hf 2, serving 2
# - files of a process that forks, and copies under way at a fork: offload 20
# - tokens of equal sequences sliced and checked once: serving 2
# - caches saved between a draft and its crop: eviction 2, hf 8; while another thread uses them: hf 10; calibrations of
#   patched models: hf 1; models of one name, tokens that `calibrate` reads: tools 4
# - Ctrl-C while pages move (suspended, offloaded), one job for all runs of a layer: offload 25, store 8
# - padding by runs: store 2; extents freed by the garbage collector while they are spilled: offload 4
# - JSON without NaN: files 9, tools 4; any path of a calibration in strategies, PEFT models, tokenizers by name: tools
#   16
EXTENDED = ("policies/", "tools/cli/commands.py", "ops.py")
STATEMENTS = {
    "": 1102, "vllm": 443, "quantization": 543, "store": 934, "eviction": 694, "offload": 518,
    "parallel": 222, "hf": 2708, "serving": 640, "tools": 2829,
}  # fmt: skip


def imported(name):
    """(module, kind) of all that kvcompress/`name` imports, as absolute names; kind: "now" with the module, "late" in a
    function, "types" for type checkers. From a package everything is one name more: `from ..store import device` is
    kvcompress.store.device_memory."""
    here, found = ["kvcompress", *name.split("/")[:-1]], []

    def walk(node, kind):
        for child in ast.iter_child_nodes(node):
            inner = kind
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = "types"
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = "late"
            elif isinstance(child, ast.Import):
                found.extend((x.name, kind) for x in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = here[: len(here) - child.level + 1] if child.level else []
                base = ".".join([*base, *([child.module] if child.module else [])])
                found.extend((f"{base}.{x.name}", kind) for x in child.names)
            walk(child, inner)

    walk(TREES[name], "now")
    return found


def room_of(name):
    return name.split("/")[0].removesuffix(".py")


def test_every_room_is_in_the_order():
    rooms = {room_of(name) for name in PYTHON} - {"__init__"}
    assert rooms | {"_C"} == set(ROOMS), "a new file or folder of kvcompress/: say in ROOMS what it may import"
    folders = {p for p in PACKAGE.rglob("*") if p.is_dir() and list(p.glob("*.py"))}
    assert all((p / "__init__.py").is_file() for p in folders), "a folder without it is in no wheel"


def upward():
    """(file, module, kind) of what is imported from a higher room."""
    for name in PYTHON:
        if name == "__init__.py":  # whose names are lazy
            continue
        lower = ROOMS[: ROOMS.index(room_of(name)) + 1]
        for module, kind in imported(name):
            package, _, rest = module.partition(".")
            if package == "kvcompress" and rest.split(".")[0] not in lower:
                yield name, rest, kind


def test_a_room_imports_only_lower_ones():
    found = [
        (name, module)
        for name, module, kind in upward()
        if kind == "now" or (kind == "late" and module.split(".")[0] not in UPWARD.get(name, ()))
    ]
    assert not found, f"of a higher room in ROOMS: {found}"


@pytest.mark.parametrize("name", PYTHON)
def test_transformers_is_for_its_rooms(name):
    if room_of(name) not in (*HF, "__init__"):
        assert not [m for m, _ in imported(name) if m.partition(".")[0] == "transformers"], f"transformers is for {HF}"


def needs(kinds):
    """What each file imports from the others, by the kinds of `imported`."""
    known = {"kvcompress." + re.sub(r"(/__init__)?\.py$", "", name).replace("/", "."): name for name in PYTHON}
    return {
        name: {
            known[m]
            for module, kind in imported(name)
            if kind in kinds and (m := module if module in known else module.rpartition(".")[0]) in known
        }
        - {name}
        for name in PYTHON
        if name != "__init__.py"
    }


def circles(graph):
    """Files in import cycles."""
    found = []
    for start in graph:
        seen, stack = set(), list(graph[start])
        while stack:
            if (name := stack.pop()) not in seen:
                seen.add(name)
                stack.extend(graph.get(name, ()))
        if start in seen:
            found.append(start)
    return found


def test_modules_import_one_another_one_way():
    """Within rooms, too: whether a cycle works depends on the order of imports."""
    assert not circles(needs(("now",)))


def private(name):
    return name.startswith("_") and not name.startswith("__") and name not in ("_C", "_")


def definitions(tree):
    """Private names that a file defines: methods, attributes of self, of classes and of the module."""
    found, said = set(), set()  # an annotation alone refers to a definition in another file
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in said:
            found.add(node.id)
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            said.add(node.target)
    return {name for name in found if private(name)}


def touches():
    """(file, line, name) of private names of other files."""
    own = {name: definitions(tree) for name, tree in TREES.items()}
    ours = set().union(*own.values())
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [x.name for x in node.names]
            for x in names:
                if private(x) and x in ours - own[name]:
                    yield name, node.lineno, x


def test_private_names_stay_in_their_file():
    found = list(touches())
    assert len(found) <= PRIVATE, found


def test_circles_of_imports_for_type_checkers():
    found = circles(needs(("now", "late", "types")))
    assert len(found) <= CIRCLES, found
    found = [x for x in upward() if x[2] == "types"]
    assert len(found) <= FOR_TYPES, found


def count_words(files, words):
    """How often each word occurs in {name: path}, file names included: alone, or as a part of a name."""
    text = "\n".join(re.sub(r"([a-z])([A-Z])", r"\1_\2", path.read_text()).lower() for path in files.values())
    text += "\n".join(name.removesuffix(".py") for name in files)
    return {word: len(re.findall(rf"(?<![a-z]){word}(?![a-z])", text)) for word in words}


def spoken():
    return count_words(PYTHON, WORDS)


def test_words_are_those_of_the_field():
    """docs/glossary.md has the standard terms."""
    more = {word: n for word, n in spoken().items() if n > WORDS[word]}
    assert not more, f"said more often than { ({word: WORDS[word] for word in more}) }: {more}"
    files = {path.name: path for path in (PACKAGE.parent / "csrc").rglob("*") if path.is_file()}
    found = {word: n for word, n in count_words(files, C_WORDS).items() if n}
    assert not found, f"csrc says {found}"


def long_functions():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                yield name, node.name, node.end_lineno - node.lineno + 1


def test_functions_are_short():
    found = list(long_functions())
    assert len(found) <= LONG, found


def statements(left_out=()):
    """Statements of each room; "" for files outside of rooms."""
    count = Counter()
    for name, tree in TREES.items():
        if name.startswith(left_out):
            continue
        room = name.split("/")[0] if "/" in name else ""
        count[room] += sum(isinstance(x, ast.stmt) for x in ast.walk(tree))
    return count


def test_rooms_do_not_grow():
    found = statements(EXTENDED)
    assert found.keys() == STATEMENTS.keys()
    more = {room: n for room, n in found.items() if n > STATEMENTS[room]}
    most = {room: STATEMENTS[room] for room in more}
    assert not more, f"expected at most {most} statements, got {more}: raise STATEMENTS here, and say what for"


def test_the_architecture_page_names_what_is_there():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    methods = defaultdict(set)
    for node in (x for tree in TREES.values() for x in ast.walk(tree) if isinstance(x, ast.ClassDef)):
        methods[node.name].update(x.name for x in node.body if isinstance(x, ast.FunctionDef))
    named = re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)", text)
    assert len(named) > 10 and not [(c, x) for c, x in named if x not in methods[c]]
    assert not [x for x in re.findall(r"`(\w+/\w+\.py)`", text) if x not in PYTHON]


def test_counters_find_violations():
    """The counters find what they count."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert definitions(ast.parse("class A:\n    _x: int\n    def _f(self): self._y = _z = 1")) == {"_f", "_y", "_z"}


def main():
    lines, found = Counter(), statements()
    for name, path in PYTHON.items():
        lines[name.split("/")[0] if "/" in name else ""] += len(path.read_text().splitlines())
    for room in sorted(lines):
        print(f"{room or '(files)':14} {found[room]:6} statements {lines[room]:6} lines")
    print(f"{'in all':14} {sum(found.values()):6} statements {sum(lines.values()):6} lines")
    by_name = defaultdict(list)
    for name, line, x in touches():
        by_name[x].append(f"{name}:{line}")
    for x, where in sorted(by_name.items(), key=lambda item: -len(item[1])):
        print(f"{x}: {len(where)}: {' '.join(where)}")
    print("PRIVATE", sum(map(len, by_name.values())))
    print("CIRCLES", len(circles(needs(("now", "late", "types")))))
    print("FOR_TYPES", sum(kind == "types" for _, _, kind in upward()))
    print("LONG", len(list(long_functions())), *long_functions())
    print("WORDS", spoken())


if __name__ == "__main__":
    main()
