"""The sections of the report that tell: verdict, figures, ranks, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.dashboard import duration
from fasttrain.judge import Finding
from fasttrain.records import PHASES
from fasttrain.tools.markup import Markup, tag
from fasttrain.tools.report_data import RunData, number, shares, validations
from fasttrain.tools.report_parts import bar, fold, section, sentence, setting, swatch, table

MOST_RANKS = 64  # in the table of ranks; of more, the slowest
LOG_BYTES, LOG_LINES = 1 << 20, 40  # of the log's end that is searched, and lines shown


def verdict(runs: Sequence[RunData]) -> Markup:
    """What holds each run back, and the exact change."""
    parts = []
    for run in runs:
        found = run.verdict
        state = "unsure" if not found.enough else "held" if found.findings else "fine"
        title = tag(
            "p", tag("span", class_=f"dot {state}", aria_hidden="true"), sentence(found.says), class_=f"says {state}"
        )
        name = tag("h3", run.name, class_="run-name") if len(runs) > 1 else None
        cards = [_card(finding, found.says) for finding in found.findings]
        parts.append(tag("div", name, title, tag("div", *cards, class_="cards") if cards else None, class_="verdict"))
    return section("verdict", "Verdict", *parts)


def _card(finding: Finding, headline: str) -> Markup:
    """One finding; its sentence is left out where the headline says it already."""
    where = f" on rank {finding.rank}" if finding.rank is not None else ""
    share = max(0.0, min(1.0, number(finding.share) if finding.share == finding.share else 0.0))
    cost = tag("p", tag("strong", f"{share:.0%}"), " of the time", class_="cost") if share > 0 else None
    return tag(
        "article",
        tag("header", tag("h4", finding.cause.replace("_", " "), where), cost),
        bar([("wait", share)]) if share > 0 else None,
        tag("p", sentence(finding.says)) if not headline.endswith(finding.says) else None,
        tag("p", sentence(finding.evidence), class_="evidence"),
        tag("p", tag("span", "Change", class_="label"), finding.remedy, class_="remedy"),
        tag("p", f"{number(finding.sure):.0%} sure", class_="sure"),
        class_="card",
    )


def numbers_of(run: RunData) -> dict[str, str]:
    """The figures that sum a run up, by their names, as text."""
    columns, parts = run.columns, shares(run.columns)
    wall = columns["wall"][np.isfinite(columns["wall"])]
    found = {"ran for": duration(run.seconds), "batches": f"{len(run.history.ranks[0].records):,}"}
    if len(wall) and wall.sum() > 0:
        found["images/s"] = f"{np.nansum(columns['images']) * run.world / wall.sum():,.0f}"
        found["ms a batch"] = f"{np.median(wall) * 1e3:,.1f}"
    if parts:
        found["waiting for data"] = f"{parts['wait'][0]:.1%}"
    if run.verdict.busy is not None:
        found["device busy"] = f"{run.verdict.busy:.1%}"
    for name, (_, values) in validations(run).items():
        known = values[np.isfinite(values)]
        if len(known):
            best = known.min() if "loss" in name or "error" in name else known.max()
            found[f"best {name}"] = f"{best:.4g}"
    return found


def tiles(run: RunData) -> Markup:
    """One run's figures, large."""
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in numbers_of(run).items()]
    return tag("dl", *items, class_="tiles")


def side_by_side(runs: Sequence[RunData]) -> Markup:
    """The figures of several runs, and the settings in which they differ."""
    rows = [numbers_of(run) for run in runs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = [[name, *(row.get(name, "n/a") for row in rows)] for name in names]
    different = differences(runs)
    heads = [tag("span", swatch(f"run{i}"), run.name) for i, run in enumerate(runs)]
    return section(
        "runs",
        "Runs side by side",
        table(["", *heads], body),
        tag("h3", "Settings that differ"),
        table(["", *heads], different) if different else tag("p", "None.", class_="none"),
    )


def ranks(run: RunData, named: bool) -> Markup | None:
    """What the ranks spent a batch on, one row a rank; None for one rank."""
    if len(run.ranks) < 2:
        return None
    means = {
        rank: {phase: float(np.nanmean(each[phase])) * 1e3 for phase in PHASES}
        for rank, each in run.ranks
        if np.isfinite(each["wall"]).any()
    }
    if not means:
        return None
    # A rank that is slow waits least for the others; its own work is all but the backward pass, in which ranks meet.
    own = {rank: sum(value for phase, value in each.items() if phase != "backward") for rank, each in means.items()}
    shown = sorted(sorted(means, key=lambda rank: own[rank])[-MOST_RANKS:])
    most = max(sum(means[rank].values()) for rank in shown) or 1.0
    rows = [
        [
            f"rank {rank}",
            bar([(phase, value / most) for phase, value in means[rank].items()]),
            *(f"{means[rank][phase]:,.1f}" for phase in PHASES),
            f"{sum(means[rank].values()):,.1f}",
        ]
        for rank in shown
    ]
    note = f"the slowest {MOST_RANKS} of {len(means)}; " if len(means) > MOST_RANKS else ""
    words = f"Mean milliseconds a batch; {note}ranks wait for one another in backward, where gradients are summed."
    heads = ["", "", *(tag("span", swatch(phase), phase) for phase in PHASES), "batch"]
    title = tag("h3", run.name, class_="run-name") if named else None
    return tag("div", title, tag("p", words, class_="note"), table(heads, rows, class_="ranks"))


def compared(runs: Sequence[RunData]) -> Markup | None:
    """The section of the ranks, if any run has more than one."""
    tables = [table for run in runs if (table := ranks(run, len(runs) > 1)) is not None]
    return section("ranks", "Ranks compared", *tables) if tables else None


def settings(runs: Sequence[RunData]) -> Markup:
    """Settings, versions and the log's warnings of each run."""
    parts = []
    for i, run in enumerate(runs):
        name = tag("h3", run.name, class_="run-name") if len(runs) > 1 else None
        rows = [[key, setting(value)] for key, value in flat(run.history.settings)]
        facts = [[key, setting(value)] for key, value in flat(run.history.facts)]
        parts += [
            name or Markup(""),
            fold(f"settings-{i}", f"All settings ({len(rows)})", table(["key", "value"], rows)),
            fold(f"facts-{i}", "Versions, device, command", table(["fact", "value"], facts)),
            fold(f"pauses-{i}", "Pauses", _pauses(run)),
            fold(f"log-{i}", *_log(run.history.directory)),
            *(
                fold(f"profile-{i}-{at}", f"Costliest operations ({path.name})", _text(path))
                for at, path in enumerate(sorted(run.history.directory.glob("profile*.txt"))[:4])
            ),
        ]
    return section("settings", "Settings and log", *parts)


def differences(runs: Sequence[RunData]) -> list[list[Any]]:
    """Settings that are not the same in all runs; where a run was written to doesn't count."""
    each = [dict(flat(run.history.settings)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for one in each for key in one):
        values = [setting(one.get(key, "not there")) for one in each]
        if len(set(values)) > 1 and not key.startswith(("run.dir", "resume")):
            rows.append([key, *values])
    return rows


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """A tree of mappings as dotted keys and values."""
    if not isinstance(tree, Mapping) or not tree:
        return [(prefix[:-1], tree)] if prefix else []
    return [pair for name, value in tree.items() for pair in flat(value, f"{prefix}{name}.")]


def _pauses(run: RunData) -> Markup:
    """How often the clock was stopped for what, and for how long."""
    totals: dict[str, list[float]] = {}
    for event in run.events("pause"):
        totals.setdefault(str(event.get("name")), []).append(number(event.get("seconds")))
    rows = [
        [name, len(each), f"{np.nansum(each):,.1f}", f"{np.nanmax([*each, 0.0]):,.2f}"] for name, each in totals.items()
    ]
    return table(["pause", "times", "seconds", "longest"], rows)


def _log(directory: Path) -> tuple[str, Markup]:
    """The last warnings and errors in the ranks' logs."""
    lines: list[str] = []
    for path in sorted(directory.glob("rank*.log"))[:MOST_RANKS]:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            read = file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()
        lines += [line for line in read if any(f" {level} " in line[:36] for level in ("WARNING", "ERROR", "CRITICAL"))]
    shown = [line[:1000] for line in sorted(lines)[-LOG_LINES:]]
    body = tag("pre", "\n".join(shown), tabindex="0") if shown else tag("p", "None.", class_="none")
    return f"Warnings and errors in the log ({len(lines)})", body


def _text(path: Path) -> Markup:
    with path.open(encoding="utf-8", errors="replace") as file:
        return tag("pre", file.read(LOG_BYTES // 8), class_="wide-text", tabindex="0")
