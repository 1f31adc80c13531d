"""The verbs that tend the store on disk: verify, prune, export, import; and what doctor says of it. Knows no format of anything stored."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, StoreError
from ..terminal import bar, bytes_of, say_json, seconds_of, shown, size
from .store import AdapterOption, FingerprintOption, JsonOption, NameArgument, NamespaceOption, StoreOption, count, named, one, opened

if TYPE_CHECKING:
    from ..store.disk.folder import Folder
    from ..store.disk.index import Index
    from ..store.tool_group import ToolGroup


def verify(
    fix: Annotated[bool, typer.Option("--fix", help="Mend what is wrong: rebuild the index, delete what cannot be used.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the index and every byte of every page. Exit code 1 if something is wrong and not mended."""
    from ..store.admin import check
    from ..store.disk.folder import Folder

    folder = Folder.open(store, create=False)
    with bar("verifying", as_json) as tell:
        report = check.verify(folder, fix=fix, progress=tell)
    if as_json:
        say_json({"store": str(folder.path), "sound": report.sound, **asdict(report)})
    else:
        for problem in report.problems:
            name = "" if problem.name in problem.why else f" {problem.name}"
            typer.echo(f"{'mended' if problem.mended else 'wrong'}: {problem.kind}{name}: {shown(problem.why)}")
        left = sum(not problem.mended for problem in report.problems)
        verdict = f"{left} wrong" + ("" if fix else ": --fix mends that") if left else "all sound" + (" now" if report.problems else "")
        rebuilt = f", index made anew with {count(report.rebuilt, 'row')}" if report.rebuilt is not None else ""
        typer.echo(f"{count(report.pages, 'page')}, {size(report.bytes)} checked{rebuilt}: {verdict}")
    if not report.sound:
        raise typer.Exit(1)


def prune(
    max_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Down to this size (5GB), what was used longest ago first.")] = None,
    older_than: Annotated[str | None, typer.Option(metavar="AGE", help="What was made longer ago than this (30d, 12h).")] = None,
    namespace: Annotated[str | None, typer.Option(help="What is in this namespace.")] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="This tool group, or all texts learnt under this name, and what continues it.")
    ] = None,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="This session, its branches and what continues it.")] = None,
    fingerprint: FingerprintOption = None,
    adapter: AdapterOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what running processes have pinned.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite files before they are deleted.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete by size, age, namespace, tool group or session, or all. What others have pinned stays, unless --force."""
    from ..store.admin.prune import Pruned
    from ..store.admin.prune import prune as pruned
    from ..store.tool_group import SESSION

    if group is not None and session is not None:
        raise ConfigError("--group and --session: give one of them")
    group = SESSION + session if session is not None else group
    if fingerprint is not None and group is None:
        raise ConfigError(f"--fingerprint={fingerprint!r} says which of several groups is meant: give it with --group, or say --older-than")
    _one_purpose(max_size, group, everything, older_than, namespace, adapter)
    most = None if max_size is None else bytes_of(max_size, "--max-size")
    age = None if older_than is None else seconds_of(older_than, "--older-than")
    with opened(store) as (folder, index):
        whole = None if adapter is None or group is not None else _adapter(index, adapter)
        about: Sequence[ToolGroup | str | None] = [whole] if group is None else named(index, group, namespace, fingerprint, adapter)
        space = None if about[0] else namespace
        folder = replace(folder, overwrite=overwrite)
        each = [
            pruned(folder, index, namespace=space, older_than=age, group=which, max_bytes=most, force=force, dry_run=dry_run)
            for which in about
        ]
        done = Pruned(**{part.name: reduce(add, (getattr(one, part.name) for one in each)) for part in fields(Pruned)})
        done.orphans, done.orphan_bytes = each[0].orphans, each[0].orphan_bytes  # one look at a folder counts
        left = index.total()
    if as_json:
        say_json({"store": str(folder.path), "dry_run": dry_run, **asdict(done), "left_pages": left[0], "left_bytes": left[1]})
        return
    gone = f", {count(len(done.groups), 'tool group')} ({', '.join(map(shown, done.groups))})" if done.groups else ""
    typer.echo(f"{'would delete' if dry_run else 'deleted'}: {count(done.pages, 'page')}, {size(done.bytes)}{gone}")
    if done.kept:
        typer.echo(f"kept: {count(done.kept, 'page')}, {size(done.kept_bytes)} that running processes have pinned (--force)")
    if done.orphans:
        typer.echo(f"left by dead processes: {count(done.orphans, 'file')}, {size(done.orphan_bytes)}")
    typer.echo(f"in the store: {count(left[0], 'page')}, {size(left[1])}")


def _adapter(index: Index, start: str) -> str:
    """The digest of the adapter that starts so; ConfigError if pages of none, or of several, are there."""
    from ..store.keys import Scope

    digests = {Scope(row.namespace, row.fingerprint).adapter for row in index.rows()} - {""}
    found = sorted(digest for digest in digests if digest.startswith(start))
    if len(found) != 1:
        raise ConfigError(f"--adapter={start!r}: pages of {len(found)} such adapters are there; those with pages are {sorted(digests)}")
    return found[0]


def _one_purpose(
    max_size: str | None, group: str | None, everything: bool, older_than: str | None, namespace: str | None, adapter: str | None
) -> None:
    adapter = adapter if group is None else None  # else it says which group is meant
    alone = {"--max-size": max_size is not None, "--group": group is not None, "--all": everything, "--adapter": adapter is not None}
    given = [name for name, is_given in alone.items() if is_given]
    together = {"--older-than": older_than is not None, "--namespace": namespace is not None and group is None and adapter is None}
    mixed = given + [name for name, is_given in together.items() if is_given]
    if not mixed:
        raise ConfigError("nothing to prune: give --max-size, --older-than, --namespace, --group, --session, --adapter or --all")
    if given and len(mixed) > 1:
        raise ConfigError(f"{' and '.join(mixed)}: {given[0]} goes alone; only --older-than and --namespace go together")


# -- carrying ------------------------------------------------------------------------------------------------------


def export(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write; it must not be there yet.")],
    namespace: NamespaceOption = None,
    fingerprint: FingerprintOption = None,
    adapter: AdapterOption = None,
    clear: Annotated[bool, typer.Option("--clear", help="Although the store is encrypted: an archive is not.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a tool group or session to one file. It holds the prompt in clear."""
    from ..store.admin.archive import export_group

    with opened(store) as (folder, index):
        group = one(index, name, namespace, fingerprint, adapter)
        with bar("exporting", as_json) as tell:
            written = export_group(folder, index, group, file, clear=clear, progress=tell)
    if as_json:
        told = {"name": group.name, "namespace": group.namespace, "adapter": group.adapter, "file": str(file), "pages": group.pages}
        say_json({**told, "prefix_tokens": group.prefix_tokens, "bytes": written})
        return
    tokens = f"{group.prefix_tokens:,} tokens in {count(group.pages, 'page')}"
    typer.echo(f"{shown(group.name)}: {tokens}, {size(written)} in {shown(str(file))}; its readers can read the prompt")


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive that `agentcache export` wrote. Only from people you trust.")],
    name: Annotated[str | None, typer.Option(help="Name of the tool group, session or texts here; by default the one they had.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Who may use it; by default the namespace it had.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a tool group or session from one file into the store. It works with the model it was made with."""
    from ..store.admin.archive import import_group

    with opened(store, create=True) as (folder, index), bar("importing", as_json) as tell:
        done = import_group(folder, index, file, name=name, namespace=namespace, progress=tell)
    group = done.group
    if as_json:
        told = {name: getattr(group, name) for name in ("name", "namespace", "model", "fingerprint", "adapter", "prefix_tokens")}
        say_json({**told, "written": done.written, "known": done.known, "bytes": done.bytes})
        return
    where = f"{shown(group.name)} in namespace {shown(group.namespace)}, of model {shown(group.model)}"
    typer.echo(f"{where}: {count(done.written, 'page')} written, {size(done.bytes)}; {done.known} were there")


# -- doctor --------------------------------------------------------------------------------------------------------


def examine(place: Path | None) -> dict[str, Any]:
    """The store, for `doctor`: nothing is made. `problem` stands where it cannot be used."""
    from ..private import default_path
    from ..store.disk.folder import Folder, check_room

    report: dict[str, Any] = {"folder": "none"}
    try:
        found = default_path() if place is None else place
        if found is None:
            return {"folder": "none: AGENTCACHE_DIR is set to nothing"}
        report["folder"] = str(found.absolute())
        if not os.path.lexists(found / "format"):
            report["state"] = "not made yet"
            check_room(found.absolute())
            return report
        folder = Folder.open(found, create=False)
        report |= {**_standing(found), "encrypted": folder.encrypted, "writable": folder.writable}
        report |= {"free_bytes": shutil.disk_usage(found).free, **_indexed(folder)}
    except StoreError as error:
        report["problem"] = str(error)
    return report


def _standing(place: Path) -> dict[str, str]:
    about = place.stat()
    owner = str(about.st_uid)
    if sys.platform != "win32":
        with suppress(KeyError):
            owner = place.owner()
    return {"owner": owner, "mode": f"{about.st_mode & 0o7777:o}"}


def _indexed(folder: Folder) -> dict[str, Any]:
    from ..store.admin.check import index_problems
    from ..store.disk.index import Index

    if problems := index_problems(folder):
        return {"index": problems, "problem": "the index is damaged: `agentcache verify --fix` makes it anew"}
    with Index(folder) as index:
        pages, size_bytes = index.total()
        return {"index": "ok", "pages": pages, "size_bytes": size_bytes, "groups": len(index.groups())}
