"""Settings on the command line, `optimizer.lr=3e-4`, and the nearest valid key for one that does not exist."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher

from fasttrain.errors import SettingsError
from fasttrain.typed import Given, Setting


def read_arguments(
    arguments: Sequence[str], settings: Mapping[str, Setting], sections: Collection[str]
) -> dict[str, Given]:
    """What each key was given; of several for one key the last counts.

    Raises:
        SettingsError: an argument is not of the form key=value, or no setting has that key.
    """
    given = {}
    for index, argument in enumerate(arguments):
        key, equals, text = argument.partition("=")
        key = key.strip()
        if not equals or key[:1] in ("-", "+", "~", ""):
            raise _wrong_form(argument, arguments[index + 1 : index + 2], settings)
        if key in sections:
            example = next(name for name in settings if name.startswith(key + "."))
            raise SettingsError.line(f"{argument}: {key} is a section; write each setting on its own, {example}=VALUE")
        if key not in settings:
            raise unknown(key, "on the command line", settings, sections)
        quoted = len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]
        given[key] = Given(text[1:-1] if quoted else text, quoted=quoted)
    return given


def _wrong_form(argument: str, following: Sequence[str], settings: Mapping[str, Setting]) -> SettingsError:
    name, *rest = re.split("[=:]", argument.lstrip("-+~"), maxsplit=1)
    typed, value = argument, "".join(rest).strip()
    if not rest and following and "=" not in following[0] and following[0][:1] not in ("-", ""):
        value = following[0]  # `--key value`
        typed = f"{argument} {value}"
    key = name.strip() if name.strip() in settings else nearest(name, settings)
    if argument.startswith("~") and key and settings[key].optional:
        value = "null"
    example = f"{key or 'section.key'}={value or 'VALUE'}" + ("" if key else "; config.yaml has all settings")
    return SettingsError.line(f"{typed}: expected key=value, without dashes or other signs: {example}")


def unknown(key: str, where: str, valid: Collection[str], sections: Collection[str]) -> SettingsError:
    """The error for a key that is not among the valid ones."""
    section = key.rpartition(".")[0]
    near = nearest(key, valid)
    if near is None and section in sections:
        inside = [name.removeprefix(section + ".") for name in valid if name.startswith(section + ".")]
        hint = f"{section} has {', '.join(inside)}" if inside else f"{section} has no sections"
    else:
        hint = f"did you mean {near}?" if near else "config.yaml has all of them"
    return SettingsError.line(f"{key[:100]}: no such setting ({where}); {hint}")


def nearest(key: str, valid: Collection[str]) -> str | None:
    """The valid key most like `key`: as a whole, by its last part (`train.lr`), or by its initials (`bs`)."""
    wanted = key[:100].strip().lower().replace("-", "_")  # cut: the comparison takes quadratic time
    wanted = wanted.replace("learning_rate", "lr")
    section, _, last = wanted.rpartition(".")

    def likeness(candidate: str) -> tuple[float, float]:
        place, _, tail = candidate.lower().rpartition(".")
        whole = _ratio(wanted, candidate.lower())
        if last == tail:
            by_end = 1.0
        elif last == _initials(tail) or sorted(last) == sorted(tail):  # swapped letters: a ratio makes little of these
            by_end = 0.9
        else:
            by_end = _ratio(last, tail)
        return (by_end if place == section else max(by_end, whole)), whole

    best = max(valid, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= 0.6 else None


def _initials(name: str) -> str:
    parts = name.split("_")
    return "".join(part[:1] for part in parts) if len(parts) > 1 else name


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
