"""The integrations as guests of this package: they import its public names only, and touch nothing private of it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

import pytest

import agentcache
from tests.checkout import ROOT

pytestmark = pytest.mark.usefixtures("no_garbage")
INTEGRATIONS = ROOT / "integrations"
PACKAGES = {
    "langchain": INTEGRATIONS / "langchain-agentcache" / "langchain_agentcache",
    "llama-index": INTEGRATIONS / "llama-index-llms-agentcache" / "llama_index" / "llms" / "agentcache",
}
# Private names of others that there is no public way to.
OTHERS = {
    "langchain": {
        "_name_or_path": "what transformers calls a loaded model",
        "_sanitize_parameters": "a transformers pipeline's settings",
        "_forward_params": "a transformers pipeline's settings",
        "_preprocess_params": "a transformers pipeline's settings",
        "_postprocess_params": "a transformers pipeline's settings",
        "_prepare_generate_kwargs": "a transformers pipeline's settings",
        "_get_set_generation_params": "a transformers pipeline's settings",
        "_getframe": "Python's frames",
    },
    "llama-index": {
        "_name_or_path": "what transformers calls a loaded model",
        "_extend_messages": "where LlamaIndex puts a model's own system prompt",
        "_metadata": "a LlamaIndex tool's description, in a copy of the tool",
    },
}


def _trees(name: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGES[name].rglob("*.py")):
        yield path.name, ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> Iterator[str]:
    """What a module imports of this package, by its whole name; type checkers' imports too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "agentcache")
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "agentcache":
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.Module) -> Iterator[str]:
    """Private names that a module defines: functions, fields, attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        yield each.id
                    elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                        yield each.attr


def _touched(tree: ast.Module) -> Iterator[str]:
    """Private names that a module looks for on anything but `self`, `cls` and `super()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            inherited = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
            if not own and not inherited:
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)):
                yield str(name.value)


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_only(name: str) -> None:
    public = {f"agentcache.{each}" for each in agentcache.__all__} | {f"agentcache.errors.{each}" for each in vars(agentcache.errors)}
    found = {f"{file}: {each}" for file, tree in _trees(name) for each in _imports(tree) if each not in public}
    assert not found
    assert sum(1 for _, tree in _trees(name) for _ in _imports(tree)) > 20, "the walk sees imports"


@pytest.mark.parametrize("name", PACKAGES)
def test_nothing_private_of_others(name: str) -> None:
    own = {each for _, tree in _trees(name) for each in _defined(tree)}
    touched = {each: file for file, tree in _trees(name) for each in _touched(tree) if each not in own}
    assert {each: file for each, file in touched.items() if each not in OTHERS[name]} == {}
    assert set(OTHERS[name]) <= set(touched), "a name in the list of exceptions is not used any more"


@pytest.mark.parametrize("name", PACKAGES)
def test_nothing_private_of_what_is_named_as_ours(name: str) -> None:
    """Also where an integration has a private name of its own that is spelled alike."""
    classes = {each.lower() for each in agentcache.__all__}
    for file, tree in _trees(name):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                owner = ast.unparse(node.value).rpartition(".")[2].strip("_()").replace("_", "").lower()
                assert owner not in classes, f"{file}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", PACKAGES)
def test_no_circle_of_files(name: str) -> None:
    """Type checkers' imports and those inside functions counted."""
    folder = PACKAGES[name]
    prefix = folder.relative_to(INTEGRATIONS).parts[1:]
    modules = {(*prefix, *path.relative_to(folder).with_suffix("").parts): path for path in folder.rglob("*.py")}
    after = {module: set(_inside(module, ast.parse(path.read_text(encoding="utf-8")), modules)) for module, path in modules.items()}
    assert sum(map(len, after.values())) > 20, "the walk sees imports"
    while leaves := {module for module, needed in after.items() if not needed & after.keys()}:
        after = {module: needed for module, needed in after.items() if module not in leaves}
    assert not after, f"in a circle, or on top of one: {sorted('.'.join(module) for module in after)}"


def _inside(module: tuple[str, ...], tree: ast.Module, modules: Collection[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The modules of its own package that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            start = module[: len(module) - node.level] if node.level else ()
            source = (*start, *(node.module or "").split(".")) if node.module else start
            named = [source, *((*source, each.name) for each in node.names)]
            others = [one for one in named if module[: len(one)] != one]  # `from . import x` is for x
            yield from (found for one in others for found in (one, (*one, "__init__")) if found in modules)
