"""Reads a YAML file into what was written for each key, with its line, and refuses what settings don't need.

All values stay text, since only the type of a setting says what its text means: YAML alone takes 1:30 for a 90, 010
for an 8 and off for a false. Anchors, tags and deep nesting are refused as they are read, so no file can run code or
expand.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fasttrain.errors import SettingsError
from fasttrain.typed import Given

_LARGEST = 1_000_000  # bytes
_DEEPEST = 10  # sections within each other


def read_file(file: Path) -> Given:
    """The whole file as one section; a relative path in it starts at its folder.

    Raises:
        SettingsError: it can't be read or is not a file of settings.
    """
    if not os.path.isfile(file):
        raise SettingsError.line(f"{file}: there is no such settings file")
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
        text = content.decode()
    except OSError as error:
        raise SettingsError.line(f"{file}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError.line(f"{file}: expected a YAML file in UTF-8, this is something else") from None
    if len(content) > _LARGEST:
        raise SettingsError.line(f"{file}: has more than {_LARGEST} bytes, so it is no settings file")
    base = os.path.dirname(os.path.abspath(file))
    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        contents = [_build(event, events, file.name, base) for event in events if isinstance(event, yaml.NodeEvent)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        tab = "; indent with spaces, not tabs" if "\\t" in str(error.problem) else ""
        raise SettingsError.line(f"{file.name}:{line}: not YAML: {error.problem or error.context}{tab}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets the last two through for "\UFFFFFFFF"
        raise SettingsError.line(f"{file.name}: not YAML: {str(error).splitlines()[0]}") from None
    if not contents or contents[0].value == "":
        raise SettingsError.line(f"{file.name}: is empty; expected a line for each setting")
    if len(contents) > 1:
        raise SettingsError.line(f"{contents[1].where}: expected one YAML document, a second one begins here")
    if not isinstance(contents[0].value, dict):
        raise SettingsError.line(f"{contents[0].where}: expected settings, one `key: value` a line")
    return contents[0]


def _build(event: Any, events: Iterator[yaml.Event], name: str, base: str, depth: int = 0) -> Given:
    """The content that begins with `event`. All scalars stay text; only the setting's type says what they are."""
    where = f"{name}:{event.start_mark.line + 1}"
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise SettingsError.line(
            f"{where}: expected no anchors (&) or aliases (*); write ${{section.key}} to reuse a value"
        )
    if event.tag is not None:
        raise SettingsError.line(f"{where}: expected a plain value without the tag {event.tag}")
    if depth > _DEEPEST:
        raise SettingsError.line(f"{where}: more than {_DEEPEST} sections within each other")
    if isinstance(event, yaml.ScalarEvent):
        return Given(event.value, where, base, quoted=bool(event.style))
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(each := next(events), yaml.SequenceEndEvent):
            item = _build(each, events, name, base, depth + 1)
            if not isinstance(item.value, str):
                raise SettingsError.line(
                    f"{item.where}: expected a list of numbers or texts, this one holds another list"
                )
            items.append(item.value)
        return Given(items, where, base)
    section: dict[str, Given] = {}
    while not isinstance(each := next(events), yaml.MappingEndEvent):
        key = _build(each, events, name, base, depth + 1)
        if not isinstance(key.value, str):
            raise SettingsError.line(f"{key.where}: expected the name of a setting before the colon")
        if key.value in section:
            first = section[key.value].where
            raise SettingsError.line(
                f"{key.where}: {key.value} stands here a second time, first at {first}; remove one"
            )
        section[key.value] = dataclasses.replace(_build(next(events), events, name, base, depth + 1), where=key.where)
    return Given(section, where, base)
