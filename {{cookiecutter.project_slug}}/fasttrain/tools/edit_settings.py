"""Changing values in a settings file and nothing else: every other byte stays, comments, order and odd spacing too."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fasttrain.errors import SettingsError, UserError, as_typed


def changed(text: str, changes: Mapping[str, Any]) -> str:
    """The text of a settings file with these values in it.

    YAML's own parser says where a value stands; only those characters are replaced. A comment behind the value keeps
    its column where there is room.

    Args:
        changes: dotted key: number, bool or None.

    Raises:
        SettingsError: a key is not in the file, or its value spans lines.
    """
    places = dict(_values(yaml.compose(text, Loader=yaml.SafeLoader)))
    for key in changes:
        if key not in places:
            raise SettingsError.line(f"{key}: is not in the settings file")
        start, end = places[key]
        if "\n" in text[start:end]:
            raise SettingsError.line(f"{key}: its value spans lines; put it on one line")
    for key, value in sorted(changes.items(), key=lambda each: -places[each[0]][0]):  # from the end: places stay right
        text = _replaced(text, *places[key], as_typed(value))
    return text


def difference(old: str, new: str, name: str) -> str:
    """What changed, as a unified diff; empty if nothing did."""
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), fromfile=name, tofile=f"{name} (proposed)", n=0, lineterm=""
    )
    return "\n".join(lines)


def read(file: Path) -> str:
    """The file's text with its line ends as they are."""
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: can't be read: {error}") from None


def write(file: Path, text: str) -> None:
    """Replace the file at once: whatever happens, the old or the new one is there, whole."""
    file = file.resolve()  # a link stays one
    whole = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        whole.write_bytes(text.encode())
        whole.chmod(file.stat().st_mode)
        whole.replace(file)
    except OSError as error:
        whole.unlink(missing_ok=True)
        raise UserError(f"{file}: can't be written ({error.strerror}); it is as it was") from None


def _values(node: Any, prefix: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """Each value's dotted key, and where its text begins and ends."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, (value.start_mark.index, value.end_mark.index)
        yield from _values(value, f"{name}.")


def _replaced(text: str, start: int, end: int, value: str) -> str:
    rest = text[end:]
    line = rest.split("\n", 1)[0]
    spaces = len(line) - len(line.lstrip(" "))
    if start == end and text[start - 1] == ":":  # `key:` alone means null
        value = f" {value}"
    if line.lstrip(" ").startswith("#"):
        room = max(1, spaces - (len(value) - (end - start)))
        rest = " " * room + rest[spaces:]
    return text[:start] + value + rest
