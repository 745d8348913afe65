"""``python -m fasttrain check-data [key=value ...]``: decode every image of data.path before a training does.

Exit code 0: nothing to mend. 1: broken images, duplicates, or classes that don't match between the parts. Odd images
(transparency, turned by EXIF, a wrong extension, ...) are listed but training reads them right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain import folder, machine, settings, shards
from fasttrain.errors import UserError
from fasttrain.folder import Listing, printable
from fasttrain.parts import Parts, skip_list_line
from fasttrain.tools import project
from fasttrain.tools.check_image import Checker
from fasttrain.tools.work import Steps, ordered

TOGETHER = 16  # images that go to a worker process at once
SHOWN = 20  # lines of each kind; --json has all of them


@dataclass
class Report:
    """All findings; names are paths below data.path."""

    files: int = 0
    broken: dict[bytes, str] = field(default_factory=dict)
    odd: dict[bytes, list[str]] = field(default_factory=dict)
    duplicates: list[list[bytes]] = field(default_factory=list)
    surplus: list[bytes] = field(default_factory=list)  # of the duplicates, those that a skip list names
    classes: list[str] = field(default_factory=list)
    ignored: dict[str, int] = field(default_factory=dict)

    @property
    def problems(self) -> int:
        return len(self.broken) + len(self.duplicates) + len(self.classes)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "files": self.files,
            "broken": {os.fsdecode(name): reason for name, reason in self.broken.items()},
            "odd": {os.fsdecode(name): texts for name, texts in self.odd.items()},
            "duplicates": [[os.fsdecode(name) for name in group] for group in self.duplicates],
            "classes": self.classes,
            "ignored": self.ignored,
        }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fasttrain check-data",
        description="Decode every image of data.path; exit code 1 if any is broken.",
    )
    parser.add_argument("--jobs", type=int, help="processes; the cores this one may use")
    parser.add_argument(
        "--write-skip-list", metavar="FILE", help="broken files and surplus duplicates, for data.skip_list"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    options = parser.parse_intermixed_args(arguments)
    cfg, _ = settings.load(project.module("config").Config, project.HOME / "config.yaml", options.overrides)
    root = str(Path(cfg.data.root) / "shapes") if cfg.data.path == "shapes" else cfg.data.path
    if not os.path.isdir(root) and (not (os.path.isabs(root) or "://" in root) or not shards.is_shards(root)):
        raise UserError(f"data.path={cfg.data.path}: nothing to check: not an image folder, tar shards or packed store")
    parts = Parts(root, cfg.data.skip_list, cfg.data.root)
    report = check(parts, options.jobs or machine.cores(), cfg.data.start_method)
    if options.write_skip_list:
        write_skip_list(Path(options.write_skip_list), {*parts.skipped, *report.broken, *report.surplus})
    if options.json:
        print(json.dumps({"path": root, **report.plain()}))
    else:
        sys.stdout.writelines(line + "\n" for line in lines(report))
    return 1 if report.problems else 0


def check(parts: Parts, jobs: int, method: str | None = None) -> Report:
    """Decode all images of all parts.

    Raises:
        UserError: the training part can't be listed.
    """
    report = Report()
    listings: dict[str, Listing] = {}
    for name in parts.names:
        try:
            listings[name] = parts.listing(name)
        except UserError as error:
            if not listings:  # training
                raise
            report.classes.append(f"{name}: {error}")
    report.files = sum(map(len, listings.values()))
    before = {part: parts.before(part) for part in listings}
    names = [before[part] + found.name(i) for part, found in listings.items() for i in range(len(found))]
    labels = [found.classes[found.label(i)] for found in listings.values() for i in range(len(found))]
    digests = bytearray()
    chunks = [list(range(at, min(at + TOGETHER, len(names)))) for at in range(0, len(names), TOGETHER)]
    checker = Checker(list(listings.values()))
    with Steps("checking", len(names)) as steps:
        for places, found in zip(chunks, ordered(checker, chunks, min(jobs, len(chunks)), method), strict=True):
            for place, finding in zip(places, found, strict=True):
                digests += finding.digest if finding.broken is None else place.to_bytes(16, "big")
                if finding.broken is not None:
                    report.broken[names[place]] = finding.broken
                if finding.odd:
                    report.odd[names[place]] = finding.odd
            steps.advance(len(places))
    in_training = len(listings[parts.names[0]])
    for group in _equal(bytes(digests)):
        report.duplicates.append([names[place] for place in group])
        report.surplus += [names[place] for place in _surplus(group, labels, in_training)]
    report.classes += _mismatches(listings)
    report.ignored = _ignored(parts) if parts.folders else {}
    return report


def _equal(digests: bytes) -> Iterator[list[int]]:
    """Places of equal content, for each content that is there more than once. 16 bytes each."""
    halves = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    same = (halves[order][1:] == halves[order][:-1]).all(axis=1)
    group: list[int] = []
    for at in np.flatnonzero(same).tolist():
        if group and group[-1] != order[at]:
            yield sorted(group)
            group = []
        group = group or [int(order[at])]
        group.append(int(order[at + 1]))
    if group:
        yield sorted(group)


def _surplus(group: list[int], labels: list[str], in_training: int) -> list[int]:
    """Those to leave out: all where the classes differ, else all but one: a validation image if there is one."""
    if len({labels[place] for place in group}) > 1:
        return group
    keep = next((place for place in group if place >= in_training), group[0])
    return [place for place in group if place != keep]


def _mismatches(listings: dict[str, Listing]) -> list[str]:
    (first, training), *others = listings.items()
    found = []
    for name, listing in others:
        here, known = ({c for i, c in enumerate(x.classes) if (x.labels == i).any()} for x in (listing, training))
        if extra := sorted(here - known):
            found.append(f"{name} has classes that {first} lacks: {', '.join(map(printable, extra))}")
        if missing := sorted(known - here):
            found.append(f"{name} lacks classes of {first}: {', '.join(map(printable, missing))}")
    return found


def _ignored(parts: Parts) -> dict[str, int]:
    """Files that training passes over: hidden and system files, other kinds, images that lie in no class folder."""
    counts = {"hidden": 0, "other": 0, "outside": 0}
    tops = {os.fsencode(each) for each in parts.folders.values()}
    for top in tops:
        for where, folders, files in os.walk(top):
            hidden = [name for name in folders if folder.is_hidden(name)]
            folders[:] = [name for name in folders if name not in hidden]
            counts["hidden"] += len(hidden) + sum(map(folder.is_hidden, files))
            shown = [name for name in files if not folder.is_hidden(name)]
            images = sum(map(folder.is_image, shown))
            counts["other"] += len(shown) - images
            counts["outside"] += images if where in tops else 0
    return counts


def lines(report: Report) -> Iterator[str]:
    """The report as text."""
    yield from _some("broken", [f"{printable(name)}: {reason}" for name, reason in report.broken.items()])
    yield from _some("odd", [f"{printable(name)}: {', '.join(texts)}" for name, texts in report.odd.items()])
    yield from _some("duplicates", [" = ".join(map(printable, group)) for group in report.duplicates])
    yield from _some("classes", report.classes)
    if any(report.ignored.values()):
        counts = (
            (report.ignored["hidden"], "hidden or system files"),
            (report.ignored["other"], "files of other kinds"),
            (report.ignored["outside"], "images outside of the class folders"),
        )
        yield "passed over: " + ", ".join(f"{count} {what}" for count, what in counts if count)
    yield (
        f"{report.files} images: {len(report.broken)} broken, {len(report.odd)} odd, {len(report.duplicates)} contents "
        f"more than once, {len(report.classes)} mismatches of classes"
    )


def _some(kind: str, found: list[str]) -> Iterator[str]:
    yield from (f"{kind}: {text}" for text in found[:SHOWN])
    if len(found) > SHOWN:
        yield f"{kind}: and {len(found) - SHOWN} more; --json lists all"


def write_skip_list(file: Path, names: set[bytes]) -> None:
    """Paths below data.path, one a line. The file is replaced in one step."""
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as part:
            part.writelines(map(skip_list_line, sorted(names)))
        os.chmod(part.name, 0o644)  # a temporary file is for its owner alone
        os.replace(part.name, file)
    except OSError as error:
        raise UserError(f"--write-skip-list {printable(file)}: can't be written: {error.strerror}") from error
