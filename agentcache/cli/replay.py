"""The verb that holds reuse against no reuse on recorded requests: replay. Knows options and files, compares nothing itself."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..bench.options import DeviceOption
from ..terminal import bar, say_json, shown
from .store import JsonOption, PolicyOption, count, named_adapter


class Against(str, Enum):
    """References of a replay."""

    off = "off"
    recorded = "recorded"


def replay(
    source: Annotated[str, typer.Argument(metavar="FILE | - | MODULE:OBJECT", help="Recorded requests, in any form that lint reads.")],
    model: Annotated[str, typer.Option(help="Folder or Hugging Face id of a model.")] = "embedded",
    against: Annotated[Against, typer.Option(help="off: reuse off; recorded: its calls against recorded ones, too.")] = Against.off,
    calibration: Annotated[Path | None, typer.Option(metavar="FILE", help="Also replay with segments, within its bounds.")] = None,
    chat_template: Annotated[Path | None, typer.Option(metavar="FILE", help="This chat template instead of the model's own.")] = None,
    store: Annotated[Path | None, typer.Option(metavar="DIR", help="Also replay over this store's pages; by default in memory.")] = None,
    policy: PolicyOption = None,
    adapter: Annotated[str | None, typer.Option(metavar="NAME=PATH", help="A LoRA that answers: a folder or Hugging Face id.")] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the requests.")] = "default",
    transcripts: Annotated[bool, typer.Option("--transcripts", help="Each list of messages is a whole conversation.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Requests that are replayed, from the first one on.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer that are compared.")] = 128,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Ask recorded requests without reuse and with it. Compares ids, bits and tool calls. Exit code 1 at the first difference."""
    from ..calibration import Calibration
    from ..engine import Engine
    from ..lint.templated import read_template
    from ..replay import Replay, read

    requests, problems = read(source, transcripts, limit)
    known = None if calibration is None else Calibration.load(calibration)
    adapters = {} if adapter is None else dict([named_adapter(adapter)])
    template = None if chat_template is None else read_template(chat_template)
    with (
        Engine(model, device=device, store=store, calibration=known, chat_template=template, policy=policy, adapters=adapters) as engine,
        bar("replaying", as_json) as tell,
    ):
        acting, recorded = next(iter(adapters), None), against is Against.recorded
        run = Replay(engine, known, namespace=namespace, adapter=acting, tokens=max_tokens, recorded=recorded)
        found = run.run(requests, lambda done: tell(done, len(requests)))
    if as_json:
        say_json({"source": source, "model": model, "unread": len(problems), **asdict(found)})
    else:
        for said in (*(f"not read as it is: {why}" for why in problems), *(f"left out: {why}" for why in found.why_left_out)):
            typer.echo(shown(said), err=True)
        typer.echo(
            f"{count(found.requests, 'request')} against reuse {Against.off.value} ({', '.join(found.ways)}): "
            f"{found.cached_tokens:,} of {found.prompt_tokens:,} prompt tokens cached, {count(found.bitwise, 'answer')} compared bit by bit"
        )
    if (first := found.difference) is not None:
        if not as_json:
            place = "" if first.page is None else f"; page {first.page} is wrong from token {first.token} on, in span {first.span!r}"
            whose = "" if first.conversation is None else f", conversation {first.conversation!r}"
            typer.echo(shown(f"request {first.request} (line {first.line}{whose}), {first.way}: {first.reason}: {first.detail}{place}"))
        raise typer.Exit(1)
    if not found.requests:  # as good as a file without requests
        typer.echo("agentcache: nothing was compared: all requests fail without reuse, too", err=True)
        raise typer.Exit(1)
