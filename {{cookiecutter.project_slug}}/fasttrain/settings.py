"""Settings from config.yaml and the command line: checked and typed before any work.

    cfg, settings = load(Config, Path("config.yaml"), ["optimizer.lr=3e-4"])

The dataclasses in config.py say which settings there are and what each may be; all of them must stand in the file.
A value may refer to another, `${run.dir}`, or to the environment, `${oc.env:NAME}` or `${oc.env:NAME,default}`:
OmegaConf fills these in. No other of its resolvers can be used, since some of them import code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fasttrain.errors import SettingsError
from fasttrain.overrides import nearest, read_arguments, unknown
from fasttrain.settings_file import read_file
from fasttrain.typed import Given, Setting, describe

T = TypeVar("T")

_LONGEST = 2000  # characters of a value with references, before and after they are filled in
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.env\s*:\s*\w+\s*(?:,[^${}\[\]]*)?|([A-Za-z_][\w.]*)\s*)\}")  # 1: another key


def value(
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    length: int | None = None,
    ordered: bool = False,
) -> Any:
    """A setting, with the limits of its number or of each number in its list.

    Args:
        low, high: least and greatest value allowed.
        above, below: limits that are not allowed themselves.
        length: how many numbers the list has.
        ordered: no number of the list is smaller than the one before.
    """
    limits = {"low": low, "high": high, "above": above, "below": below, "length": length, "ordered": ordered}
    return dataclasses.field(metadata=limits)


def location(must_exist: bool = False, or_name: tuple[str, ...] = (), or_pattern: bool = False) -> Any:
    """A setting that holds a path; its value becomes absolute.

    Args:
        must_exist: refuse a path where there is no file or folder.
        or_name: words that are allowed instead of a path, and stay as they are.
        or_pattern: http(s) URLs, which stay as they are, and patterns that name several tar files, need not exist.
    """
    return dataclasses.field(metadata={"must_exist": must_exist, "or_name": or_name, "or_pattern": or_pattern})


def load(schema: type[T], source: Path | Mapping[str, Any], overrides: Sequence[str]) -> tuple[T, dict[str, Any]]:
    """Merge a settings file, or settings saved with a run, with the overrides of the command line.

    Args:
        schema: dataclass of the settings; a field that is a dataclass is a section.
        source: the YAML file, or what this function returned second.
        overrides: "section.key=value" each.

    Returns:
        The settings as an instance of `schema`, and as plain nested dicts in which references are left as written, so
        that these can be saved with a run and no secret is.

    Raises:
        SettingsError: the first thing that is wrong.
    """
    settings, sections = describe(schema)
    if isinstance(source, Mapping):
        name, root = "the saved settings", Given(source, "the saved settings")
    else:
        name, root = Path(source).name, read_file(Path(source))
    given = dict(_settings_in(root, "", settings, sections))
    given.update(read_arguments(overrides, settings, sections))
    for key, setting in settings.items():
        if key not in given:
            raise SettingsError.line(f"{key}: missing in {name}; expected {setting.expected}")
    saved = {key: each.value if (each := given[key]).has_reference else settings[key].read(each) for key in settings}
    filled = _fill_in(saved, settings, given)
    merged = OmegaConf.merge(OmegaConf.structured(schema), _nested(filled))
    return cast(T, OmegaConf.to_object(merged)), _nested(saved)


def to_yaml(settings: Mapping[str, Any]) -> str:
    """The settings as YAML text that `load` reads back to equal values."""
    return yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


class _Dumper(yaml.SafeDumper):
    """Texts in double quotes, since a text can look like a number or like a word for null; names plain."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')

    def represent_list(self, data: Any) -> yaml.SequenceNode:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)

    def represent_mapping(self, *arguments: Any, **options: Any) -> yaml.MappingNode:
        node = super().represent_mapping(*arguments, **options)
        for name, _ in node.value:
            name.style = None
        return node


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(list, _Dumper.represent_list)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, each in flat.items():
        *names, last = key.split(".")
        section = tree
        for name in names:
            section = section.setdefault(name, {})
        section[last] = each
    return tree


def _settings_in(
    section: Given, prefix: str, settings: Mapping[str, Setting], sections: Sequence[str]
) -> Iterator[tuple[str, Given]]:
    """Each setting of the section and of those inside it, with its dotted key. Only keys of the schema pass."""
    for name, each in section.value.items():
        child = each if isinstance(each, Given) else Given(each, section.where, quoted=True)
        key = f"{prefix}{name}"
        is_section = isinstance(child.value, Mapping)
        if "." in str(name):
            raise SettingsError.line(
                f"{key}: dotted names are for the command line; put it in its section ({child.where})"
            )
        if key in sections and is_section:
            yield from _settings_in(child, key + ".", settings, sections)
        elif key in sections:
            raise SettingsError(key, child.value, f"the settings of this section, indented below it ({child.where})")
        elif key in settings and is_section:
            raise SettingsError.line(f"{key}: expected {settings[key].expected}, not a section ({child.where})")
        elif key in settings:
            yield key, child
        else:
            raise unknown(key, child.where, sections if is_section else settings, sections)


# ---------------------------------------------------------------- references


def _fill_in(saved: Mapping[str, Any], settings: Mapping[str, Setting], given: Mapping[str, Given]) -> dict[str, Any]:
    """The values with every reference replaced by what it stands for."""
    waiting = {key: each for key, each in given.items() if each.has_reference}
    known = OmegaConf.create(_nested({key: each for key, each in saved.items() if key not in waiting}))
    filled = dict(saved)

    def fill(key: str, chain: tuple[str, ...]) -> None:
        each = waiting[key]
        if key in chain:
            raise SettingsError(key, each.value, f"a reference that doesn't lead back to itself, as {chain[-1]} does")
        for other in _referred(key, each, settings):
            if other in waiting:  # before this one, so that OmegaConf follows one reference at a time: none can explode
                fill(other, (*chain, key))
        found = Given(_look_up(known, key, each), base=each.base)
        filled[key] = settings[key].read(found, written=each)
        OmegaConf.update(known, key, filled[key])
        del waiting[key]

    for key in list(waiting):
        if key in waiting:
            fill(key, ())
    return filled


def _referred(key: str, each: Given, settings: Mapping[str, Setting]) -> list[str]:
    """The keys of the settings that a value refers to. It may refer to nothing but settings and the environment."""
    keys = []
    for text in each.texts:
        rest = _REFERENCE.sub("", text[: _LONGEST + 1])
        if "${" in rest or len(text) > _LONGEST:
            form = f"references of the form ${{section.key}} or ${{oc.env:NAME}}, in at most {_LONGEST} characters"
            raise SettingsError(key, each.value, f"{form}{_at(each)}")
        keys += [match[1] for match in _REFERENCE.finditer(text) if match[1]]
    for other in keys:
        if other not in settings:
            near = nearest(other, settings)
            hint = f"; did you mean {near}?" if near else ""
            raise SettingsError(key, each.value, f"the key of a setting in place of {other}{hint}{_at(each)}")
    return keys


def _look_up(known: DictConfig, key: str, each: Given) -> Any:
    """The value with its references filled in by OmegaConf; `known` has all the values that it refers to."""
    try:
        OmegaConf.update(known, key, each.value)
        found = OmegaConf.select(known, key)
        found = OmegaConf.to_container(found, resolve=True) if isinstance(found, ListConfig) else found
    except OmegaConfBaseException as error:
        name = re.search(r"variable '(\w+)' not found", str(error))
        expected = (
            f"the environment variable {name[1]} to be set" if name else f"another reference: {error}".split("\n")[0]
        )
        raise SettingsError(key, each.value, expected + _at(each)) from None
    result = Given(found)
    if result.has_reference or any(len(text) > _LONGEST for text in result.texts):
        form = f"at most {_LONGEST} characters, and no more references, once the references are filled in"
        raise SettingsError(key, each.value, form + _at(each))
    return found


def _at(given: Given) -> str:
    return f" ({given.where})" if given.where else ""
