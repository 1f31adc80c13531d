"""The verb that says why prompts are not reused: lint. Knows options and files, finds nothing itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..bench.options import write
from ..errors import ConfigError
from ..terminal import bar, shown

if TYPE_CHECKING:
    from ..lint import Options, Report

Names = Annotated[
    str | None,
    typer.Argument(metavar="[FILE | - | MODULE:OBJECT]", help="Recorded requests: JSON lines or an array; MODULE:OBJECT runs your code."),
]


def lint(
    context: typer.Context,
    source: Names = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="ID|DIR", help="Compare tokens of its chat template, not characters.")] = None,
    chat_template: Annotated[Path | None, typer.Option(metavar="FILE", help="With --tokenizer: this template instead of its own.")] = None,
    template: Annotated[str | None, typer.Option(metavar="ID|DIR|FILE", help="Instead: examine a chat template.")] = None,
    across: Annotated[bool, typer.Option("--across", help="Also compare the first requests of conversations of one application.")] = False,
    tools_first: Annotated[bool | None, typer.Option("--tools-first/--system-first", help="What your provider puts first.")] = None,
    transcripts: Annotated[bool, typer.Option("--transcripts", help="Each list of messages is a whole conversation.")] = False,
    price: Annotated[
        tuple[float, float] | None,
        typer.Option("--price-per-million", metavar="IN CACHED", help="What a million prompt tokens cost, computed and cached."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write one page for a browser.")] = None,
    redact: Annotated[bool, typer.Option("--redact", help="Show no text of the requests, only kinds and lengths.")] = False,
    suggest: Annotated[Path | None, typer.Option("--suggest-layout", metavar="FILE", help="Write volatile spans to review.")] = None,
    fail_under: Annotated[float | None, typer.Option(min=0, max=1, metavar="SHARE", help="Exit 1 only below this reused share.")] = None,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="Exit 0 whatever is found.")] = False,
) -> None:
    """Say why prompts are not reused, and the fix. Where two requests part, the writer, the cost. Exit code 1 if there are findings."""
    if (source is None) == (template is None):
        raise ConfigError("give recorded requests (a file, -, or module:object), or --template: one of them")
    if template is not None:
        _only_a_template(context, template)
        bad = _template(template, as_json)
    else:
        from ..lint import Options
        from ..lint.templated import load

        if redact and suggest is not None:
            raise ConfigError("--redact and --suggest-layout: patterns show text of the requests; give one of them")
        if chat_template is not None and tokenizer is None:
            raise ConfigError(f"--chat-template={str(chat_template)!r}: needs --tokenizer")
        if price is not None and not 0 <= price[1] <= price[0]:
            raise ConfigError(f"--price-per-million={price!r}: give two prices, computed and cached, the second not above the first")
        loaded = load(tokenizer, chat_template) if tokenizer is not None else None
        report = _report(str(source), Options(tools_first, loaded, transcripts, across, redact, price), as_json)
        _write(report, html, suggest)
        _say(report, as_json)
        share = report.totals()["reused_share"]
        bad = bool(report.findings) if fail_under is None else share is not None and share < fail_under
    if bad and not exit_zero:
        raise typer.Exit(1)


def _only_a_template(context: typer.Context, template: str) -> None:
    """ConfigError if an option is given that is about requests."""
    about = [param for param in context.command.params if param.name not in ("template", "as_json", "exit_zero")]
    given = [param for param in about if context.params[param.name or ""] not in (param.default, None)]
    if given:
        named = ", ".join("/".join((*param.opts, *param.secondary_opts)) for param in given)
        raise ConfigError(f"--template={template!r}: examines a template, no requests; leave out {named}")


def _report(source: str, options: Options, hidden: bool) -> Report:
    from ..lint import lint as linted

    if ":" in source and not Path(source).exists():
        typer.echo(f"agentcache: {shown(source)} is imported and run", err=True)
    with bar("reading", hidden) as tell:
        report = linted(source, options, lambda done: tell(done, 0) if done % 100 == 0 else None)
    if not report.steps:
        why = "; ".join(f"line {problem.line}: {problem.message}" for problem in report.problems[:3]) or "it is empty"
        raise ConfigError(f"{source!r} has no request that can be read ({why})")
    return report


def _write(report: Report, html: Path | None, suggest: Path | None) -> None:
    from ..lint.show import page
    from ..lint.suggest import toml

    for path, text in ((html, page), (suggest, toml)):
        if path is not None:
            write(path, text(report))


def _say(report: Report, as_json: bool) -> None:
    from ..lint.show import shown as drawn

    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))  # ASCII: text of a trace may hold lone surrogates
    else:
        _print(drawn(report, _encoding(), coloured=Console().color_system is not None))


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _print(drawn: RenderableType) -> None:
    """On standard output, with a mark in place of what its encoding lacks: a trace may be written in any script."""
    console = Console()
    with console.capture() as captured:
        console.print(drawn)
    sys.stdout.write(captured.get().encode(_encoding(), "replace").decode(_encoding()))
    sys.stdout.flush()


def _template(name: str, as_json: bool) -> bool:
    """The table of a template's probes; whether one of them costs reuse."""
    from ..lint.templates import probe, template_of

    probes = probe(template_of(name))
    if as_json:
        found: list[dict[str, Any]] = [{"probe": one.name, "answer": one.answer, "good": one.good, "says": one.says} for one in probes]
        typer.echo(json.dumps({"template": name, "probes": found, "good": all(one.good is not False for one in probes)}, indent=1))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "", "what it means"):
            table.add_column(column, overflow="fold")
        for one in probes:
            answer = {True: "yes", False: "no"}.get(one.answer, one.answer) if isinstance(one.answer, bool) else one.answer
            said = f"{answer:.0%}" if isinstance(answer, float) else str(answer)
            colour = "green" if one.good else "red" if one.good is False else ""
            table.add_row(Text(one.name), Text(said, colour), Text(one.says))
        _print(table)
    return any(one.good is False for one in probes)
