"""An episode, or a run, as one HTML file that needs no server, no script and no network. All text is shown as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from k3rl.dashboard.episodes import Bodies, Body, TokenColumns
from k3rl.dashboard.queries import row_of
from k3rl.dashboard.rows import EpisodeEntry
from k3rl.dashboard.run_reader import RunReader, UnknownRun, finite
from k3rl.run import visible

MOST_TOKENS = 200_000  # of one file; what is left out is said
_CURVES = 24
_EPISODES = 1_000
_WHOLE = 5  # best and worst episodes of a run that are written out
_STYLE = """
:root{color-scheme:light dark}body{font:14px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.15rem .7rem .15rem 0;text-align:left}
th{font-weight:600;border-bottom:1px solid #8886}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.5rem 0;
font:13px/1.5 ui-monospace,monospace;border-left:3px solid #8884;padding:.3rem .7rem}.p{opacity:.65}
.s{outline:1px solid #8885;border-radius:2px}.b0{background:#3b76af00}.b1{background:#e8a33d33}.b2{background:#e8a33d66}
.b3{background:#d5672a88}.b4{background:#b22d1bbb}svg{background:#8881;margin:0 1rem 0 0}figure{display:inline-block;
margin:.5rem 1rem .5rem 0}figcaption{font-size:12px;opacity:.8}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
"""


def episode_html(run: RunReader, bodies: Bodies, name: str, attempt: int | None = None) -> str:
    """The file of one episode: scores, turns, exact tokens; sampled ones by their logprob. Raises UnknownRun."""
    body = bodies.body(run, name, attempt)
    return _page(f"{name} of {run.name}", _episode(run, body, "h1"))


def run_html(run: RunReader, bodies: Bodies) -> str:
    """The file of a run: how it stands, its curves, its last 1,000 episodes, the best and the worst written out."""
    about, entries = run.about(), run.episodes()
    parts = [f"<h1>{_text(about.get('name', run.name))}</h1>", _table(_facts(about))]
    parts.append("<h2>Curves</h2>" + "".join(_curves(run)))
    shown = entries[-_EPISODES:]
    more = f" (the last {len(shown):,} of {len(entries):,})" if len(entries) > len(shown) else ""
    parts.append(f"<h2>Episodes{more}</h2>" + _episode_table(run, shown))
    scored = sorted((e for e in entries if e.reward is not None), key=lambda entry: entry.reward or 0.0)
    for title, chosen in (("Best", scored[::-1][:_WHOLE]), ("Worst", scored[:_WHOLE])):
        parts.append(f"<h2>{title} episodes</h2>")
        for entry in chosen:
            try:
                parts.append(_episode(run, bodies.body(run, entry.id, entry.attempt), "h3"))
            except UnknownRun as error:
                parts.append(f"<p>{_text(str(error))}</p>")
    return _page(f"run {about.get('name', run.name)}", "\n".join(parts))


def _page(title: str, body: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{_text(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _text(value: Any) -> str:
    return escape(visible(str(value)), quote=True)


def _table(facts: Mapping[str, Any]) -> str:
    rows = (f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{''.join(rows)}</table>"


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    names = ("status", "error", "pipeline", "attempt", "episodes", "config_hash", "command")
    return {name: about[name] for name in names if about.get(name) is not None}


def _episode(run: RunReader, body: Body, heading: str) -> str:
    entry, row = body.entry, body.row
    facts = {
        "task": entry.task,
        "step": f"{entry.step} of {entry.stage}, attempt {entry.attempt}",
        "score": _score(row.get("score") or {}),
        "advantage": _number(run.advantage(entry)),
        "ended by": entry.stop_reason,
        "turns, sampled tokens": f"{entry.turns}, {entry.sampled_tokens:,}",
    }
    facts |= {f"metric {name}": value for name, value in (row.get("metrics") or {}).items()}
    parts = [f"<{heading}>{_text(entry.id)}</{heading}>", _table(facts)]
    left = MOST_TOKENS
    for name, columns in body.branches.items():
        shown = min(left, len(columns.ids))
        cut = f" ({len(columns.ids) - shown:,} tokens left out)" if shown < len(columns.ids) else ""
        parts.append(f"<p>branch {_text(name)}{cut}</p>" + _tokens(columns, shown))
        left -= shown
    if row.get("answer"):
        parts.append(f"<p>answer</p><pre>{_text(row['answer'])}</pre>")
    return "\n".join(parts)


def _tokens(columns: TokenColumns, count: int) -> str:
    if columns.pieces is None:
        return f"<pre>{_text(columns.unavailable)}: {_text(columns.ids[:count])}</pre>"
    spans = []
    for piece, kind, logprob in zip(columns.pieces[:count], columns.kinds, columns.logprobs, strict=False):
        if kind == 0:
            spans.append(f'<span class="p">{_text(piece)}</span>')
        else:
            surprise = 0 if logprob is None else min(4, int(-logprob))
            spans.append(f'<span class="s b{surprise}" title="{_number(logprob)}">{_text(piece)}</span>')
    return f"<pre>{''.join(spans)}</pre>"


def _score(score: Mapping[str, Any]) -> str:
    if score.get("status") == "scored":
        parts = ", ".join(f"{name} {_number(value)}" for name, value in (score.get("parts") or {}).items())
        return f"{_number(score.get('reward'))}" + (f" ({parts})" if parts else "")
    if score.get("status") == "invalid":
        return f"invalid: {score.get('hack')}; {score.get('evidence')}"
    return f"no reward: {score.get('reason', 'unknown')}"


def _number(value: Any) -> str:
    number = finite(value)
    return "unknown" if number is None else f"{number:.4g}"


def _episode_table(run: RunReader, entries: Sequence[EpisodeEntry]) -> str:
    names = ("id", "step", "task", "status", "reward", "advantage", "turns", "sampled_tokens", "stop_reason")
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = []
    for entry in reversed(entries):
        row = row_of(run, entry)
        cells = (_number(row[n]) if n in ("reward", "advantage") else _text(row[n]) for n in names)
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _curves(run: RunReader) -> list[str]:
    """The first curves as pictures, those of the reward before the others."""
    found = []
    for stage, columns in run.metrics()["stages"].items():
        for name, values in sorted(columns["values"].items(), key=lambda item: not item[0].startswith("reward/")):
            points = [
                (s, v) for s, value in zip(columns["steps"], values, strict=True) if (v := finite(value)) is not None
            ]
            if len(points) > 1:
                found.append((not name.startswith("reward/"), _curve(f"{stage}: {name}", points)))
    return [picture for _, picture in sorted(found, key=lambda item: item[0])[:_CURVES]]


def _curve(title: str, points: Sequence[tuple[float, float]], width: int = 300, height: int = 110) -> str:
    steps, values = [s for s, _ in points], [v for _, v in points]
    low, high = min(values), max(values)
    spread = high - low or 1.0
    span = (steps[-1] - steps[0]) or 1.0
    line = " ".join(
        f"{4 + (s - steps[0]) / span * (width - 8):.1f},{height - 6 - (v - low) / spread * (height - 12):.1f}"
        for s, v in points
        if math.isfinite(v)
    )
    label = f"{title}: {values[0]:.4g} to {values[-1]:.4g} (from {low:.4g} to {high:.4g})"
    return (
        f'<figure><svg width="{width}" height="{height}" role="img" aria-label="{_text(label)}">'
        f'<polyline fill="none" stroke="#3b76af" stroke-width="1.5" points="{line}"/></svg>'
        f"<figcaption>{_text(label)}</figcaption></figure>"
    )
