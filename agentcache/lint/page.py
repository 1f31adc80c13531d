"""A report as one page for a browser: prompts as coloured bars, findings by cause. No scripts, nothing loaded, all text escaped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from html import escape

from .report import Report
from .show import grouped
from .values import Finding, Step

MOST = 60  # conversations with bars, the costliest first
FINDINGS = 200  # of each cause

_STYLE = """
:root { color-scheme: light dark; --reused: #3a9d5d; --again: #d64545; --new: #9aa4b2; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 1rem 0 .2rem; overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem; } .facts div { border: 1px solid var(--line); border-radius: 6px; padding: .5rem 1rem; }
.facts b { display: block; font-size: 1.3rem; }
.step { display: grid; grid-template-columns: 5rem 1fr 9rem; gap: .6rem; align-items: center; font-size: .8rem; margin: 1px 0; }
.bar { display: flex; height: 14px; background: #8882; border-radius: 3px; overflow: hidden; } .bar i { display: block; height: 100%; }
.parts { height: 4px; margin-top: 1px; }
.reused { background: var(--reused); } .again { background: var(--again); } .new { background: var(--new); }
.system { background: #7c5cd6; } .tools { background: #d6a53a; } .user { background: #3a7bd6; } .assistant { background: #3ab5b0; }
.tool { background: #b56a3a; } .text { background: #3a7bd6; } .generation, .other { background: #888; }
.key span { margin-right: 1rem; white-space: nowrap; } .key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px; }
article { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .8rem; margin: .5rem 0; } article p { margin: .2rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; font-size: .8rem; } del { color: var(--reused); text-decoration: none; }
ins { color: var(--again); text-decoration: none; } .fix { font-style: italic; } small { opacity: .7; }
"""  # noqa: E501
_KINDS = ("system", "tools", "user", "assistant", "tool", "text", "generation", "other")


def page(report: Report) -> str:
    """The whole page."""
    body = [*_head(report), *_bars(report), *_findings(report), *_hazards(report), *_problems(report)]
    title = _safe(f"agentcache lint: {report.source}")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _safe(text: str) -> str:
    """Escaped, and without characters that a file cannot hold or that turn the direction of writing."""
    shown = "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
    return escape(shown, quote=True)


def _head(report: Report) -> Iterator[str]:
    totals = report.totals()
    yield f"<h1>Why prompts were not reused: {_safe(report.source)}</h1>"
    share = "-" if totals["reused_share"] is None else f"{totals['reused_share']:.1%}"
    possible = "-" if totals["possible_share"] is None else f"{totals['possible_share']:.1%}"
    facts = [
        (f"{totals['requests']:,}", "requests"),
        (f"{totals['conversations']:,}", "conversations"),
        (f"{totals['prompt_tokens']:,}", f"prompt tokens ({report.unit})"),
        (share, "of later prompts reusable as sent"),
        (possible, "with nothing moved"),
        (f"{totals['again_tokens'] + totals['across_tokens']:,}", "tokens computed again though known"),
        (f"{totals['findings']:,}", "findings"),
    ]
    if "price" in totals:
        facts += [(f"{totals['price']['as_sent']:,.4f}", "price as sent"), (f"{totals['price']['wasted']:,.4f}", "of it wasted")]
    yield '<div class="facts">' + "".join(f"<div><b>{_safe(value)}</b>{_safe(name)}</div>" for value, name in facts) + "</div>"


def _bars(report: Report) -> Iterator[str]:
    tracks: dict[str, list[Step]] = defaultdict(list)
    for step in report.steps:
        tracks[step.conversation].append(step)
    chosen = sorted(tracks.values(), key=lambda steps: -sum(step.again for step in steps))
    yield "<h2>Each request as a bar</h2>"
    named = (("reused", "reused"), ("again", "computed again"), ("new", "new"), *((kind, kind) for kind in _KINDS))
    yield '<p class="key">' + "".join(f'<span><i class="{kind}"></i>{name}</span>' for kind, name in named) + "</p>"
    widest = max((step.tokens for step in report.steps), default=1) or 1
    for steps in chosen[:MOST]:
        yield f"<h3>{_safe(steps[0].conversation)}</h3>"
        for step in steps:
            yield _bar(step, widest)
    if len(chosen) > MOST:
        yield f"<p><small>{len(chosen) - MOST} more conversations cost less and are not shown.</small></p>"


def _bar(step: Step, widest: int) -> str:
    new = max(0, step.tokens - step.reused - step.again)
    shares = (("reused", step.reused), ("again", step.again), ("new", new))
    top = "".join(f'<i class="{kind}" style="width:{100 * size / widest:.3f}%"></i>' for kind, size in shares if size)
    under = "".join(
        f'<i class="{kind}" style="width:{100 * size / widest:.3f}%" title="{_safe(kind)}: {size:,}"></i>'
        for kind, size in step.parts
        if size
    )
    parts = f'<div class="bar parts">{under}</div>' if under else ""
    why = _safe(str(step.cause)) if step.cause is not None else ("first" if step.first else "")
    title = f"{step.tokens:,} tokens: {step.reused:,} reused, {step.again:,} computed again, {new:,} new"
    bars = f'<div title="{title}"><div class="bar">{top}</div>{parts}</div>'
    return f'<div class="step"><span>request {step.request}</span>{bars}<span>{why}</span></div>'


def _findings(report: Report) -> Iterator[str]:
    yield "<h2>Findings</h2>" if report.findings else "<h2>Findings</h2><p>None: every request goes on from the one before it.</p>"
    for cause, findings in grouped(report.findings):
        cost = sum(finding.cost_tokens for finding in findings)
        yield f"<h3>{_safe(str(cause))}: {len(findings):,} findings, {cost:,} tokens computed again</h3>"
        for finding in findings[:FINDINGS]:
            yield _article(finding)
        if len(findings) > FINDINGS:
            yield f"<p><small>and {len(findings) - FINDINGS:,} more</small></p>"


def _article(finding: Finding) -> str:
    also = f"; behind it also: {', '.join(map(str, finding.also))}" if finding.also else ""
    before = _safe(finding.context.before)
    return (
        f"<article><p><b>request {finding.request}</b> of {_safe(finding.conversation)} (line {finding.line}, after request "
        f"{finding.previous}), token {finding.token:,}, character {finding.char:,}: <b>{_safe(finding.writer)}</b>; "
        f"{_safe(finding.detail)}; {finding.cost_tokens:,} tokens{_safe(also)}</p>"
        f"<pre>was {before}<del>{_safe(finding.context.was)}</del></pre><pre>now {before}<ins>{_safe(finding.context.now)}</ins></pre>"
        f'<p class="fix">{_safe(finding.fix)}</p></article>'
    )


def _hazards(report: Report) -> Iterator[str]:
    if report.hazards:
        yield "<h2>Hazards, in single requests</h2>"
    for hazard, requests, values in report.hazards[:FINDINGS]:
        seen = f", {values} different" if values > 1 else ""
        shown = f"<pre>{_safe(hazard.text)}</pre>" if hazard.text else ""
        yield (
            f"<article><p><b>{_safe(str(hazard.cause))}</b> in {_safe(hazard.writer)}: {_safe(hazard.detail)} "
            f"({requests:,} requests{seen})</p>{shown}</article>"
        )


def _problems(report: Report) -> Iterator[str]:
    if report.problems:
        yield "<h2>Not read as it is</h2><ul>"
        yield from (f"<li>line {problem.line}: {_safe(problem.message)}</li>" for problem in report.problems)
        yield "</ul>"
