"""Counts of the code base itself: lines, imports, parameters, circles, times to start. Loads the embedded model only.

python -m benchmarks.house
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WHEEL = ROOT / "agentcache"
PACKAGES = (ROOT, ROOT / "integrations" / "langchain-agentcache", ROOT / "integrations" / "llama-index-llms-agentcache")
FILES = ("agentcache_llm.py", "agentcache", "benchmarks", "examples", "langchain_agentcache", "llama_index")
EXTRAS = ("bitsandbytes", "cryptography", "datasketch", "llguidance", "llvmlite")
Graph = Mapping[str, frozenset[str]]

# What an exact request loads, where no extra is installed.
CLOSURE = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
import tempfile, agentcache
with tempfile.TemporaryDirectory() as folder, agentcache.Engine("embedded", store=%s) as engine:
    engine.generate([{{"role": "user", "content": "Hi"}}])
print(*(m.__file__ for n, m in sys.modules.items() if n.startswith("agentcache") and getattr(m, "__file__", None)), sep="\\n")
"""


def lines(paths: Iterator[Path] | list[Path]) -> int:
    """Number of lines of these files."""
    return sum(path.read_text().count("\n") for path in paths)


# -- imports -----------------------------------------------------------------------------------------------------------


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Names and files of all modules of a distribution."""
    for name in FILES:
        found = [package / name] if name.endswith(".py") else (package / name).rglob("*.py")
        for path in (path for path in found if path.exists()):
            parts = path.relative_to(package).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(name: str, path: Path, known: Mapping[str, Path]) -> frozenset[str]:
    """The modules among `known` that a file names in its import statements, wherever they stand."""
    inside = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found.update(child if (child := f"{source}.{alias.name}") in known else source for alias in node.names)
    return frozenset(found & known.keys()) - {name}


@cache
def graph() -> Graph:
    """The imports of every module of the three distributions, the lab and the examples, by name."""
    known = dict(pair for package in PACKAGES for pair in modules(package))
    return {name: imported(name, path, known) for name, path in known.items()}


def circle(among: Graph) -> list[str]:
    """One circle of files; empty if there is none."""
    try:
        TopologicalSorter(among).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def fresh(source: str) -> str:
    """Run a program in a process of its own; what it printed."""
    return subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def closure(store: str, run: Callable[[str], str] = fresh) -> list[Path]:
    """Files of the wheel that an exact request loads, with this store: an expression of Python."""
    return sorted({path for path in map(Path, run(CLOSURE % store).split()) if path.is_relative_to(WHEEL)})


# -- counts ------------------------------------------------------------------------------------------------------------


def parameters(path: Path) -> Iterator[tuple[int, str]]:
    """(number of parameters without self, name) of each function of a file; a GPU's kernel has no other way to be told sizes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and "triton" not in "".join(map(ast.unparse, node.decorator_list)):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield sum(one.arg not in ("self", "cls") for one in named), f"{path.relative_to(WHEEL)}:{node.name}"


def fields(path: Path, name: str) -> int:
    """Number of fields of a class of values."""
    [found] = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name]
    return sum(isinstance(node, ast.AnnAssign) for node in found.body)


def user_ms(*command: str, runs: int = 5) -> float:
    """User time of a process, the least of some runs, in ms."""
    timed = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True); "
    timed += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime * 1e3)"
    return min(float(subprocess.check_output([sys.executable, "-c", timed, *command], cwd=ROOT)) for _ in range(runs))


def read_counts() -> dict[str, Any]:
    """Counts that the files alone tell, by their names."""
    wheel = sorted(WHEEL.rglob("*.py"))
    folders = Counter[str]()
    for path in wheel:
        folders[path.relative_to(WHEEL).parts[0] if path.parent != WHEEL else "."] += lines([path])
    many = sorted((found for path in wheel for found in parameters(path) if found[0] > 8), reverse=True)
    commands = [found for found in many if re.search(r"\bcli(/|\.py:)", found[1])]
    wing = WHEEL / "approximate"
    near = [path for path in wheel if not path.is_relative_to(wing) and re.search(r"(?i)\bapproximat(?!e=)", path.read_text())]
    drawing = (ROOT / "docs" / "structure.md").read_text().partition("## The main path")[2].partition("## ")[0]
    steps = [re.sub(r"\(.*?\)", "", line) for line in drawing.splitlines() if line.startswith("    ")]
    drawn = {name for step in steps for name in re.findall(r"[\w/]+\.py", step)}
    return {
        "lines of the wheel": lines(wheel),
        "lines by folder": dict(folders.most_common()),
        "files over 400 lines": [str(path.relative_to(WHEEL)) for path in wheel if lines([path]) > 400],
        "a circle of files": circle(graph()),
        "functions over 8 parameters, without commands": [found for found in many if found not in commands],
        "functions over 8 parameters, commands": commands,
        "fields of Asked, of Running": (fields(WHEEL / "request.py", "Asked"), fields(WHEEL / "request.py", "Running")),
        "files outside the wing that mention approximate reuse": [str(path.relative_to(WHEEL)) for path in near],
        "files of the main path (docs/structure.md)": len(drawn),
    }


def run_counts() -> dict[str, Any]:
    """Counts of what runs: modules that a request loads, and times to start."""
    memory, disk = closure("None"), closure("folder")
    return {
        "lines and modules that an exact request loads": (lines(memory), len(memory)),
        "the same with a store on disk": (lines(disk), len(disk)),
        "user time of `import agentcache`, of Python alone, in ms": (
            user_ms(sys.executable, "-c", "import agentcache"),
            user_ms(sys.executable, "-c", ""),
        ),
        "user time of `agentcache --help` in ms": user_ms(sys.executable, "-m", "agentcache", "--help"),
    }


if __name__ == "__main__":
    for what, count in (read_counts() | run_counts()).items():
        print(f"{what}: {count}")
