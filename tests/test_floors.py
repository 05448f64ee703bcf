"""Who may import whom (design, section 3), read from the source: floors, heavy packages, import time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src/areal_hpc"

# A module imports from lower floors, from its own room, and (but for the third, whose rooms are apart) from its floor.
FLOORS = {
    "native": 0,
    "records": 1, "world": 1, "config": 1,
    "layout": 2,
    "reshard": 3,
    "stream": 4, "storage": 4, "tasks": 4, "observe": 4,
    "trainer": 5, "rollout": 5, "planning": 5, "report": 5,
    "cli": 6, "job": 6,
}  # fmt: skip
APART = 5
BASE = 1  # modules beside config.py and world.py that are not named here are their helpers

# Import names that belong to one room, inside functions too.
ROOM_OF = {"vllm": "rollout", "megatron": "trainer", "h5py": "storage"}
# Import names that must not be needed to import a module, but for these.
HEAVY = {"torch", "mpi4py"}
HEAVY_ALLOWED = ("trainer/", "rollout/", "reshard/exchange.py")
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The room (folder or top-level module) of a source file."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    return FLOORS.get(name, BASE)


@cache
def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(dotted name, line, whether it runs on import of the module) of each import in a file."""
    return list(walk(ast.parse(path.read_text()), True))


def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, int, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue  # names for type checkers cost nothing
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: a relative import; this project writes names in full"
            yield from ((f"{child.module}.{alias.name}", child.lineno, at_import) for alias in child.names)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, at_import and not inside)


def test_floors() -> None:
    wrong = []
    for path in MODULES:
        mine = room(path)
        for name, line, _ in imports(path):
            parts = name.split(".")
            if parts[0] != "areal_hpc" or mine == "__init__":
                continue
            other = {"_native": "native", "__version__": "__init__"}.get(parts[1], parts[1])
            if other == mine:
                continue
            allowed = floor(other) < floor(mine) or (floor(other) == floor(mine) != APART)
            if not allowed:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} ({mine}) imports {name} ({other})")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_stay_in_their_rooms() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}, which belongs to {ROOM_OF[name.split('.')[0]]}/"
        for path in MODULES
        for name, line, _ in imports(path)
        if ROOM_OF.get(name.split(".")[0], room(path)) != room(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_torch_or_mpi_at_module_level() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name} at module level; do it inside the function"
        for path in MODULES
        for name, line, at_import in imports(path)
        if at_import and name.split(".")[0] in HEAVY and not str(path.relative_to(PACKAGE)).startswith(HEAVY_ALLOWED)
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_light_modules_loads_no_heavy_package() -> None:
    """What the source seems to promise, in a fresh interpreter: through whatever they import."""
    light = [
        ".".join(("areal_hpc", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in MODULES
        if not str(path.relative_to(PACKAGE)).startswith(HEAVY_ALLOWED)
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        f"    bad = [m for m in {sorted(HEAVY | {'vllm', 'megatron'})!r} if m in sys.modules]\n"
        "    assert not bad, f'importing {name} imports {bad}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
