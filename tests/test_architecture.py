"""The house rules that a program can check: import order, no torch where it is not needed, sizes of lines, functions
and package.

What breaks a rule today is listed in one constant each, and the lists may only shrink.
`python tests/test_architecture.py` writes them anew as the tree stands: look at the difference before you keep it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "ramatch"
TREES = ("src", "tests", "benchmarks", "scripts", "soak")
LINE_LENGTH, FUNCTION_LINES, PARAMETERS = 120, 60, 8
PACKAGE_LINES = 28_400  # more only for a feature that is worth it: say which in the commit

BACK_IMPORTS: set[str] = {
    "prediction.py → viz",
    "recognizer.py → evaluation",
}

LARGE_FUNCTIONS: dict[str, str] = {
    "ot/fused.py:match_scores": "the solver's settings beside the problem",
    "ot/solver.py:solve_batch": "POT's signature",
}

FORMATTER_SWITCHES: dict[str, int] = {}

LONG_LINES: dict[str, int] = {}


def sources(*trees: str) -> list[Path]:
    """Python files of some folders of the repository."""
    return sorted(file for tree in trees for file in (ROOT / tree).rglob("*.py"))


def name_of(file: Path, root: Path = ROOT) -> str:
    return file.relative_to(root).as_posix()


# ------------------------------------------------------------------------------------------------- import order


def rooms() -> list[str]:
    """Rooms in the order in which they may import: the first column of the table in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("\n| room |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in text.split("\n")[2:]]
    return [name.removesuffix("/").removesuffix(".py") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def type_checking_only(tree: ast.AST) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING:`, which no program runs."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imported(source: str, module: tuple[str, ...]) -> set[str]:
    """Rooms that a module of the package imports, inside functions too. `module` is its path: ("ot", "solver")."""
    tree = ast.parse(source)
    found: set[str] = set()
    skipped = type_checking_only(tree)
    for node in ast.walk(tree):
        targets: list[tuple[str, ...]] = []
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = ("ramatch", *module)[: len(module) + 1 - node.level] if node.level else ()
            base = (*home, *(node.module.split(".") if node.module else ()))
            targets = [(*base, alias.name) for alias in node.names]
        found |= {target[1] for target in targets if target[0] == "ramatch" and len(target) > 1}
    return found


def back_imports() -> set[str]:
    """`file → room` for every import that goes back in the order of rooms."""
    order = {room: place for place, room in enumerate(rooms())}
    found = set()
    for file in sources("src/ramatch"):
        module = file.relative_to(PACKAGE).with_suffix("").parts
        if module[0] not in order:  # the package's own __init__ and __main__ may import all
            continue
        for room in imported(file.read_text(encoding="utf-8"), module) & order.keys():
            if order[room] > order[module[0]]:
                found.add(f"{name_of(file, PACKAGE)} → {room}")
    return found


def test_every_room_has_a_place() -> None:
    on_disk = {p.parent.name for p in PACKAGE.glob("*/__init__.py")} | {p.stem for p in PACKAGE.glob("[a-z]*.py")}
    assert sorted(rooms()) == sorted(on_disk), "the table of rooms in docs/design.md and src/ramatch differ"


def test_a_room_imports_from_rooms_above_it() -> None:
    assert back_imports() == BACK_IMPORTS


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
from typing import TYPE_CHECKING
import ramatch.ot
from .. import files
from ..data.images import load_image
from .near import thing
if TYPE_CHECKING:
    from ..serve import app
def late():
    from ramatch import viz
"""
    assert imported(source, ("modeling", "ram")) == {"ot", "files", "data", "modeling", "viz"}
    assert imported("from .errors import X", ("config",)) == {"errors"}
    assert imported("from .near import X", ("ot", "__init__")) == {"ot"}


@pytest.mark.parametrize("module", ["ramatch", "ramatch.config", "ramatch.cli"])
def test_help_and_settings_do_not_wait_for_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    paths = [str(ROOT / "src"), *sys.path]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode() or f"{module} imports torch"


# ------------------------------------------------------------------------------------------------- lines and sizes


def counts(pattern: re.Pattern[str]) -> dict[str, int]:
    """How many lines of each Python file match."""
    found = {name_of(f): len(pattern.findall(f.read_text(encoding="utf-8"))) for f in sources(*TREES)}
    return {name: count for name, count in found.items() if count}


SWITCH = re.compile(r"# fmt: (?:skip|off)", flags=re.MULTILINE)
LONG = re.compile(rf"^.{{{LINE_LENGTH + 1},}}$", flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("pattern", "allowed"), [(SWITCH, FORMATTER_SWITCHES), (LONG, LONG_LINES)], ids=["fmt", "long"]
)
def test_no_formatter_switches_and_no_long_lines(pattern: re.Pattern[str], allowed: dict[str, int]) -> None:
    found = counts(pattern)
    grown = {name: count for name, count in found.items() if count > allowed.get(name, 0)}
    assert not grown, "more than the list allows"
    assert not allowed.keys() - found.keys(), "no longer needed in the list"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        inner = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from functions(node, f"{prefix}{node.name}." if inner else prefix)  # type: ignore[attr-defined]


def size(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """Lines and parameters. Triton kernels have none to count: each pointer, stride and tile is a parameter by
    necessity."""
    arguments = function.args
    names = [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    names += [a.arg for a in (arguments.vararg, arguments.kwarg) if a]
    kernel = any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)
    parameters = 0 if kernel else len(names) - (names[:1] in (["self"], ["cls"]))
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1, parameters


def large_functions() -> dict[str, tuple[int, int]]:
    found = {}
    for file in sources("src"):
        for name, function in functions(ast.parse(file.read_text(encoding="utf-8"))):
            lines, parameters = size(function)
            if lines > FUNCTION_LINES or parameters > PARAMETERS:
                found[f"{name_of(file, PACKAGE)}:{name}"] = (lines, parameters)
    return found


def test_functions_are_short_and_take_few_parameters() -> None:
    found = large_functions()
    assert {name: found[name] for name in found if name not in LARGE_FUNCTIONS} == {}, "(lines, parameters)"
    assert sorted(LARGE_FUNCTIONS.keys() - found.keys()) == [], "no longer needed in LARGE_FUNCTIONS"
    assert all(LARGE_FUNCTIONS.values()), "a reason each"


def test_sizes_are_counted() -> None:
    source = "class A:\n    def f(self, a, *b, c=1, **d):\n        def g(): pass\n        return 1\n"
    assert {name: size(f) for name, f in functions(ast.parse(source))} == {"A.f": (3, 4), "A.f.g": (1, 0)}
    kernel = ast.parse("@triton.jit\ndef k(a, b): pass")
    assert [size(f) for _, f in functions(kernel)] == [(1, 0)]


def test_the_package_stays_small() -> None:
    total = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in sources("src"))
    assert total <= PACKAGE_LINES


def constants() -> str:
    """The lists as the tree stands, with the reasons that are still needed."""
    reasons = {name: LARGE_FUNCTIONS.get(name, "to be split") for name in large_functions()}
    lists: dict[str, list[str]] = {
        "BACK_IMPORTS: set[str]": [f'"{entry}"' for entry in back_imports()],
        "LARGE_FUNCTIONS: dict[str, str]": [f'"{name}": "{reason}"' for name, reason in reasons.items()],
        "FORMATTER_SWITCHES: dict[str, int]": [f'"{name}": {count}' for name, count in counts(SWITCH).items()],
        "LONG_LINES: dict[str, int]": [f'"{name}": {count}' for name, count in counts(LONG).items()],
    }
    for name, entries in lists.items():
        empty = "set()" if "set" in name else "{}"
        lists[name] = ["{", *(f"    {entry}," for entry in sorted(entries)), "}"] if entries else [empty]
    return "\n\n".join(f"{name} = " + "\n".join(lines) for name, lines in lists.items()) + "\n"


if __name__ == "__main__":
    here = Path(__file__).read_text(encoding="utf-8")
    start, end = here.index("BACK_IMPORTS: "), here.index("\n\ndef sources(")
    Path(__file__).write_text(here[:start] + constants() + here[end:], encoding="utf-8")
