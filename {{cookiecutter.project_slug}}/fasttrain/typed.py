"""One setting: what its type and limits allow, in words, and the value made from what was written.

Text is read by the type of its setting, in the file as on the command line. So `1e-4` is a number for optimizer.lr and
a name for run.dir, and `off` is a choice for amp and false for data.shuffle.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fasttrain.errors import SettingsError

_NUMBER = re.compile(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_LARGEST = 2**63 - 1  # what torch and a checkpoint can hold
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Given:
    """What was written for a setting or a section, and where."""

    value: Any  # a text, a list of them, names with a Given each; from saved settings the value itself
    where: str = ""  # "config.yaml:12"; empty for the command line
    base: str = ""  # the folder that a relative path starts at; empty for the current directory
    quoted: bool = False  # text in quotes is never a word for null

    @property
    def has_reference(self) -> bool:
        return any("${" in text for text in self.texts)

    @property
    def texts(self) -> list[str]:
        items = self.value if isinstance(self.value, (list, tuple)) else [self.value]
        return [item for item in items if isinstance(item, str)]


@dataclass(frozen=True)
class Setting:
    """The type and the limits of one field of the schema."""

    key: str  # dotted
    kind: type  # int, float, bool or str
    choices: tuple[str, ...] = ()
    optional: bool = False
    many: bool = False  # a list of `kind`
    limits: Mapping[str, Any] = field(default_factory=dict)  # the arguments of settings.value or settings.location

    @property
    def is_path(self) -> bool:
        return "must_exist" in self.limits

    @property
    def expected(self) -> str:
        """What is allowed, in words: "a whole number of at least 1, or null"."""
        limits = self.limits
        if self.choices:
            words = f"one of {', '.join(self.choices)}"
        elif self.is_path:
            names = limits["or_name"]
            words = "an existing file or folder" if limits["must_exist"] else "a path"
            words += ", a pattern of tar files, an http(s) URL" if limits.get("or_pattern") else ""
            words += f", or {'one of ' * (len(names) > 1)}{', '.join(names)}" if names else ""
        elif self.many:
            length = "" if limits.get("length") is None else f"{limits['length']} "
            plural = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}[self.kind]
            words = f"a list of {length}{plural}" + (f", each {self._bounds}" if self._bounds else "")
            words += ", the smaller first" if limits.get("ordered") else ""
        else:
            words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[self.kind]
            words += f" of {self._bounds}" if self._bounds.startswith("at") else f" {self._bounds}".rstrip()
        return words + (", or null" if self.optional else "")

    @property
    def _bounds(self) -> str:
        words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
        given = {name: self.limits[name] for name in words if self.limits.get(name) is not None}
        if given.keys() == {"low", "high"}:
            return f"from {given['low']} to {given['high']}"
        return " and ".join(f"{words[name]} {limit}" for name, limit in given.items())

    @property
    def _off_is_0(self) -> bool:
        """``data.workers=off`` means 0; ``train.clip_norm=off``, where 0 is not allowed, means null."""
        return self.kind in (int, float) and self.limits.get("low") == 0

    def read(self, given: Given, written: Given | None = None) -> Any:
        """The value that `given` stands for, within the limits.

        Args:
            given: what to read.
            written: what an error shows, where `given` is that with its references filled in.

        Raises:
            SettingsError: it is of another type or outside the limits.
        """
        try:
            if self._is_null(given):
                if self.optional:
                    return None
                raise ValueError
            if self.many:
                return self._read_list(given.value)
            value = self._read_one(given.value)
            return self._located(value, given.base) if self.is_path else value
        except ValueError as error:
            shown = written or given
            place = f" ({shown.where})" if shown.where else ""
            raise SettingsError(self.key, shown.value, f"{self.expected}{error}{place}") from None

    # Below, a ValueError says that the value is not allowed; its text is added to what is expected.

    def _is_null(self, given: Given) -> bool:
        if not isinstance(given.value, str):
            return given.value is None
        word = given.value.strip().lower()
        if not word or word in (choice.lower() for choice in self.choices):
            return not word
        if self.kind is str and not self.choices:
            return not given.quoted and word in (("null", "~", "none", "off") if self.optional else ("null", "~"))
        off_is_null = self.kind is not bool and not self._off_is_0
        return word in ("null", "~", "none", "auto") or (word == "off" and off_is_null)

    def _read_list(self, raw: Any) -> list[Any]:
        if isinstance(raw, str):
            text = raw.strip()
            text = text[1:-1].strip() if text[:1] == "[" and text[-1:] == "]" else text
            raw = [item.strip().strip("'\"") for item in text.split(",")] if text else []
        if not isinstance(raw, (list, tuple)):
            raise ValueError
        values = [self._read_one(item) for item in raw]
        if self.limits.get("length") not in (None, len(values)):
            raise ValueError(f", not of {len(values)}")
        if self.limits.get("ordered") and values != sorted(values):
            raise ValueError
        return values

    def _read_one(self, raw: Any) -> Any:
        word = raw.strip().lower() if isinstance(raw, str) else None
        if self.choices:
            known = {choice.lower(): choice for choice in self.choices}
            if "off" in known and (raw is False or word in ("no", "false")):
                word = "off"
            if word not in known:
                raise ValueError
            return known[word]
        if self.kind is str:
            if not isinstance(raw, str) or raw == "???" or "\0" in raw:  # ??? is OmegaConf's mark of a missing value
                raise ValueError
            return raw
        if self.kind is bool:
            value = raw if word is None else _BOOLEANS.get(word)
            if not isinstance(value, bool):
                raise ValueError
            return value
        return self._read_number(0 if word == "off" and self._off_is_0 else raw)

    def _read_number(self, raw: Any) -> int | float:
        if isinstance(raw, str):
            text = raw.strip()
            if len(text) > 40 or not _NUMBER.fullmatch(text):
                raise ValueError
            number: int | float = int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text)
        elif isinstance(raw, (int, float)) and not isinstance(raw, bool):
            number = raw
        else:
            raise ValueError
        if not -sys.float_info.max <= number <= sys.float_info.max:  # nan too
            raise ValueError
        if self.kind is int and number != int(number):
            raise ValueError
        if self.kind is int and abs(number) > _LARGEST:
            raise ValueError(f", and at most {_LARGEST} in any case")
        outside = {"low": operator.lt, "high": operator.gt, "above": operator.le, "below": operator.ge}
        for name, is_outside in outside.items():
            if self.limits.get(name) is not None and is_outside(number, self.limits[name]):
                raise ValueError
        return int(number) if self.kind is int else float(number)

    def _located(self, text: str, base: str) -> str:
        """The absolute path, or the name where it is one of `or_name`."""
        pattern = bool(self.limits.get("or_pattern"))
        if text in self.limits["or_name"] or (pattern and text.lower().startswith(("http://", "https://"))):
            return text
        try:
            full = os.path.abspath(os.path.join(base, os.path.expanduser(text)))
        except OSError as error:  # the current directory was removed
            raise ValueError(f"; the current directory can't be read: {error.strerror}") from None
        if pattern and ".tar" in text and re.search(r"[*?\[{]", text):
            return full
        if self.limits["must_exist"] and not os.path.exists(full):
            raise ValueError(f"; there is no {full}")
        return full


def describe(schema: type, prefix: str = "") -> tuple[dict[str, Setting], list[str]]:
    """All settings of a dataclass by dotted key, in order, and the dotted names of its sections."""
    settings: dict[str, Setting] = {}
    sections: list[str] = []
    hints = get_type_hints(schema)
    for each in dataclasses.fields(schema):
        key = prefix + each.name
        if dataclasses.is_dataclass(hints[each.name]):
            sections.append(key)
            inner, names = describe(hints[each.name], key + ".")
            settings.update(inner)
            sections.extend(names)
        else:
            settings[key] = _setting(key, hints[each.name], each.metadata)
    return settings, sections


def _setting(key: str, hint: Any, limits: Mapping[str, Any]) -> Setting:
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
        optional = len(kinds) < len(get_args(hint))
        hint = kinds[0] if len(kinds) == 1 else hint
    many = get_origin(hint) is list
    if many:
        (hint,) = get_args(hint)
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind = str if choices and all(isinstance(choice, str) for choice in choices) else hint
    if kind not in (int, float, bool, str):
        raise TypeError(f"{key}: a setting is an int, float, bool, str, a Literal of texts, a list of them, or None")
    return Setting(key, kind, choices, optional, many, limits)
