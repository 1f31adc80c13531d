"""The verbs that fill the store on disk and look into it: warm, ls, inspect, stats. Knows no format of anything stored.

Store modules are loaded inside the verbs: `--help` answers at once, and what only reads the index needs no torch.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..bench.options import DeviceOption, Dtype
from ..errors import ConfigError, StoreError, StoreWarning
from ..terminal import bar, facts, listing, say_json, shown, size

if TYPE_CHECKING:
    from rich.table import Table

    from ..engine import Engine
    from ..store.disk.folder import Folder
    from ..store.disk.index import Index
    from ..store.tool_group import ToolGroup

# what `warm --json` says of a group
WARMED = ("name", "namespace", "prefix_tokens", "pages", "kv_bytes", "checkpoint_bytes", "computed_tokens", "warm_ms")


class Order(str, Enum):
    """Order in which tools are shown to the model."""

    given = "given"
    sorted = "sorted"


StoreOption = Annotated[Path | None, typer.Option("--store", metavar="DIR", help="The store's folder; by default AGENTCACHE_DIR, else the user's cache folder.")]  # fmt: skip # noqa: E501
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
PolicyOption = Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file of rules: what each namespace may ask for.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a tool group, or session:NAME; never a path.")]
NamespaceOption = Annotated[str | None, typer.Option(help="Only what is in this namespace.")]
AdapterOption = Annotated[str | None, typer.Option(metavar="DIGEST", help="Only of this adapter: first characters of its digest.")]
FingerprintOption = Annotated[str | None, typer.Option(help="First characters of the fingerprint, where several models have that group.")]


def named_adapter(said: str) -> tuple[str, str]:
    """Name and place of an adapter as the command line names it."""
    name, _, path = said.partition("=")
    if not name or not path:
        raise ConfigError(f"--adapter={said!r}: give NAME=PATH, a folder that PEFT saved or a Hub id")
    check_folder("--adapter", path)
    return name, path


def check_folder(option: str, path: str) -> None:
    """ConfigError for a path at which there is no folder; an id on the Hub is no path."""
    if not os.path.isdir(path) and (os.path.isabs(path) or path.startswith(".")):
        raise ConfigError(f"{option}: there is no folder {path!r}; give one, or an id on the Hugging Face Hub")


@contextmanager
def opened(place: Path | None, create: bool = False) -> Iterator[tuple[Folder, Index]]:
    """The store at `place`, by default where it lies on this machine."""
    from ..store.disk.folder import Folder
    from ..store.disk.index import Index

    folder = Folder.open(place, create=create)
    with Index(folder, unshared=True) as index:
        yield folder, index


def one(index: Index, name: str, namespace: str | None, fingerprint: str | None, adapter: str | None = None) -> ToolGroup:
    """The group of that name; ConfigError if there is none, or there are several."""
    from ..store.tool_group import SESSION

    found = [group for group in index.groups(namespace, name) if of(group, adapter, fingerprint)]
    if not found:
        asked = {" in namespace": namespace, " of fingerprint": fingerprint, " of adapter": adapter}
        where = "".join(f"{words} {value!r}" for words, value in asked.items() if value is not None)
        what = "session" if name.startswith(SESSION) else "tool group"
        raise ConfigError(f"no {what} {name.removeprefix(SESSION)!r}{where}: `agentcache ls` shows which there are")
    if len(found) > 1:
        all_of_them = "; ".join(
            f"namespace {g.namespace!r}, model {g.model!r}, fingerprint {g.fingerprint[:12]}, adapter {g.adapter or 'none'}" for g in found
        )
        raise ConfigError(f"{len(found)} tool groups {name!r} ({all_of_them}): give --namespace, --fingerprint or --adapter")
    return found[0]


def named(index: Index, name: str, namespace: str | None, fingerprint: str | None, adapter: str | None) -> list[ToolGroup]:
    """All packs of texts that were learnt under that name, else the group of that name; ConfigError as of `one`."""
    packs = [group for group in index.groups(namespace) if group.documents == name and of(group, adapter, fingerprint)]
    if len({(group.namespace, group.fingerprint) for group in packs}) > 1:
        raise ConfigError(f"texts {name!r} of several namespaces or models: give --namespace, --fingerprint or --adapter")
    return packs or [one(index, name, namespace, fingerprint, adapter)]


def of(group: ToolGroup, adapter: str | None, fingerprint: str | None = None) -> bool:
    """Tell whether an adapter and a model whose digests start so computed the group; any did for None, the base for an empty adapter."""
    by_adapter = adapter is None or (group.adapter.startswith(adapter) if adapter else not group.adapter)
    return by_adapter and group.fingerprint.startswith(fingerprint or "")


def _about(index: Index, group: ToolGroup) -> dict[str, Any]:
    """Facts of a tool group and its pages."""
    from ..store.admin.check import pages_of

    rows = [row for row in pages_of(index, group) if row is not None]
    named = ("name", "namespace", "model", "fingerprint", "adapter", "regime", "prefix_tokens")
    return {
        **{name: getattr(group, name) for name in named},
        "tools": list(group.tools),
        "pages": group.pages,
        "pages_stored": len(rows),
        "complete": len(rows) == group.pages,
        "bytes": sum(row.bytes for row in rows),
        "precision": rows[0].precision if rows else None,
        "hits": max((row.hits for row in rows), default=0),
        "created": _time(group.created),
        "leased_until": _time(group.lease_end) if group.lease_end else None,
        "last_use": max((row.used for row in rows), default=0),
    }


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def count(number: int, what: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


# -- filling -------------------------------------------------------------------------------------------------------


def warm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hugging Face id of a model.")],
    tools: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON file with a list of tool schemas.")] = None,
    system: Annotated[str | None, typer.Option(metavar="FILE|TEXT", help="The system prompt, or a file that holds it.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the tool group; by default the start of its key.")] = None,
    namespace: Annotated[str, typer.Option(help="Who may use it.")] = "default",
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the weights; by default as they were saved.")] = None,
    device: DeviceOption = "cpu",
    tools_order: Annotated[Order, typer.Option(help="As in the file, or sorted by name.")] = Order.given,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a tool group once for all later processes. It is the prefix of a system prompt and tools, and lies on disk."""
    from ..store.disk.folder import Folder

    began = time.perf_counter()
    schemas, prompt = given_tools(tools), given_system(system)
    if not schemas and not prompt:
        raise ConfigError("nothing to warm: give --tools, --system or both")
    Folder.open(store)  # before a model is loaded
    from ..engine import Engine
    from ..types import StoreOptions

    warnings.filterwarnings("ignore", "pages are not written", StoreWarning)  # _flushed says so itself
    with Engine(model, device=device, dtype=dtype.value if dtype else None, store=StoreOptions(store)) as engine:
        with bar("warming", as_json) as tell:
            group = engine.warm(prompt, schemas, name=name, namespace=namespace, tools_order=tools_order.value, on_progress=tell)
        stored = _flushed(engine, group)
    seconds = time.perf_counter() - began
    found = group.prefix_tokens - group.computed_tokens
    if as_json:
        say_json({**{name: getattr(group, name) for name in WARMED}, "found_tokens": found, "stored_bytes": stored, "seconds": seconds})
        return
    typer.echo(
        f"{shown(group.name)}: {group.prefix_tokens:,} tokens ({group.computed_tokens:,} computed, {found:,} found) in "
        f"{count(group.pages, 'page')}, {size(stored)} on disk, {group.warm_ms / 1e3:.1f} s ({seconds:.1f} s with loading the model)"
    )


def _flushed(engine: Engine, group: ToolGroup) -> int:
    """Bytes of the group's pages on disk; StoreError if they are not all there."""
    from ..store.admin.check import pages_of

    engine.flush()
    disk = engine.store.disk
    assert disk is not None and engine.fingerprint is not None
    kept = disk.index.group(group.namespace, group.name, engine.fingerprint.whole)
    rows = pages_of(disk.index, kept) if kept else [None]
    if kept is None or None in rows:
        why = disk.writer.failure or ("the store is read-only" if not disk.folder.writable else "no room within its budgets")
        raise StoreError(f"tool group {group.name!r} was computed, but is not on disk as a whole: {why}")
    return sum(row.bytes for row in rows if row is not None)


def given_tools(path: Path | None, option: str = "--tools") -> list[Any]:
    """Tool schemas of a JSON file."""
    if path is None:
        return []
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{option}={str(path)!r} cannot be read: {error}") from error
    found = found.get("tools") if isinstance(found, dict) else found
    if not isinstance(found, list):
        raise ConfigError(f"{option}={str(path)!r}: must hold a JSON list of function schemas")
    return found


def given_system(given: str | None) -> str | None:
    """A system prompt, or that of a file."""
    if given is None:
        return None
    if not os.path.isfile(given):
        if not any(map(str.isspace, given)) and (os.sep in given or Path(given).suffix):  # warmed as a prompt, it would never be hit
            raise ConfigError(f"--system={given!r}: there is no such file; give one that is there, or the prompt itself")
        return given
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--system={given!r} cannot be read: {error}") from error


# -- looking -------------------------------------------------------------------------------------------------------


def ls(namespace: NamespaceOption = None, adapter: AdapterOption = None, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the tool groups and sessions in the store."""
    with opened(store) as (folder, index):
        groups = [_about(index, group) for group in index.groups(namespace) if of(group, adapter)]
        rows, total = index.total()
    if as_json:
        say_json({"store": str(folder.path), "groups": groups, "rows": rows, "bytes": total})
        return
    console = Console()
    for what in ("session", "tool group"):  # a server may have many sessions: what comes last stays in sight
        if some := [group for group in groups if bool(group["leased_until"]) == (what == "session")]:
            console.print(_table(some, what), "")
    if not groups:
        console.print("no tool groups")
    console.print(f"{count(rows, 'page')}, {size(total)} in {shown(str(folder.path))}", markup=False, highlight=False, soft_wrap=True)


def _table(groups: list[dict[str, Any]], what: str) -> Table:
    """Tool groups, or sessions, a line each."""
    left_out = {"session": ["model", "#tools", "#created"], "tool group": ["#leased until"]}[what]
    left_out += [] if any(g["adapter"] for g in groups) else ["adapter"]
    alike = Counter((g["name"], g["namespace"], g["model"], g["adapter"]) for g in groups)  # of a model that was exchanged or updated
    left_out += [] if max(alike.values()) > 1 else ["fingerprint"]
    rows = [
        {what: g["name"], "namespace": g["namespace"], "model": _short(g["model"]), "adapter": g["adapter"][:12],
         "fingerprint": g["fingerprint"][:12], "#tokens": g["prefix_tokens"], "#tools": len(g["tools"]),
         "#pages": f"{g['pages']}" if g["complete"] else f"{g['pages_stored']} of {g['pages']}", "#size": size(g["bytes"]),
         "#created": g["created"][:10], "#leased until": (g["leased_until"] or "")[:16]} for g in groups
    ]  # fmt: skip
    columns = [column for column in rows[0] if column not in left_out]
    return listing(columns, [[row[column] for column in columns] for row in rows])


def _short(model: str) -> str:
    """Name of a model; of one in a folder, the folder's."""
    return os.path.basename(model.rstrip(os.sep)) if os.path.isabs(model) else model


def inspect(
    name: NameArgument, namespace: NamespaceOption = None, fingerprint: FingerprintOption = None, adapter: AdapterOption = None,
    store: StoreOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show one tool group: its manifest, and which pages are stored."""
    from ..store.admin.check import pages_of

    with opened(store) as (_, index):
        group = one(index, name, namespace, fingerprint, adapter)
        about = _about(index, group)
        about["used_since"] = sum(row.used > about["last_use"] for row in index.rows())
        about["layers"] = len(group.layers)
        rows = pages_of(index, group)
    if checkpoints := sum(row.checkpoint_bytes for row in rows if row is not None):
        about["checkpoint_bytes"] = checkpoints
    chain: list[dict[str, Any]] = [
        {"key": key, "stored": row is not None, "tokens": row.tokens if row else None, "bytes": row.bytes if row else None}
        for key, row in zip(group.page_keys, rows, strict=True)
    ]
    if as_json:
        say_json({**about, "chain": chain})
        return
    console = Console()
    about["used_since"] = f"{count(about['used_since'], 'page')} used after it"
    told = {key: value for key, value in about.items() if value not in (None, "") and key != "last_use"}
    console.print(facts(told))
    console.print(listing(("page", "#tokens", "#size"), [
        (page["key"][:16], page["tokens"] or "-", size(page["bytes"]) if page["stored"] else "not stored any more") for page in chain
    ]))  # fmt: skip


def stats(
    store: StoreOption = None,
    url: Annotated[str | None, typer.Option(help="Instead the counts of a running `agentcache serve`, as Engine.stats() has them.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="AGENTCACHE_API_KEY", help="Key of that server.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Count stored pages by role, namespace and precision. Also shows the store's own counts and measurements."""
    if url is not None:
        from ..client import RemoteEngine

        with RemoteEngine(url, api_key) as engine:
            found: dict[str, Any] = engine.stats()
    else:
        with opened(store) as (folder, index):
            found = _counted(folder, index)
    if as_json:
        say_json(found)
    else:
        Console().print(facts(found))


def _counted(folder: Folder, index: Index) -> dict[str, Any]:
    import shutil

    from ..store.disk import process_identity
    from ..store.keys import Role

    found: dict[str, Any] = {"store": str(folder.path), **index.stats()}
    roles = {int(role): role.name.lower() for role in Role}
    found["by_role"] = {roles.get(role, str(role)): value for role, value in found["by_role"].items()}
    rates = {"read_bytes_per_ms": _measured(index, "read_rate")}
    for fingerprint, model in sorted({(group.fingerprint, group.model) for group in index.groups()}):
        rates[f"ms_per_token of {model} {fingerprint[:12]}"] = _measured(index, f"compute/{process_identity.machine()}/{fingerprint}")
    return {**found, "rates": rates, "free_bytes": shutil.disk_usage(folder.path).free}


def _measured(index: Index, key: str) -> float | None:
    """A rate as processes have left it, with or without the time of its measurement."""
    words = (index.get_meta(key) or "").split()
    try:
        return float(words[0]) or None
    except (IndexError, ValueError):
        return None
