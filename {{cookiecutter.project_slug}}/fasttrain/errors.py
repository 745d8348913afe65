"""The errors that are the user's to mend: one clear line each, no traceback.

Anything else that is raised is a fault of the code and ends with its traceback.
"""

from __future__ import annotations

from typing import Any


def as_typed(value: Any, longest: int = 1000) -> str:
    """`value` as text on one line, as it would be typed in config.yaml; cut after `longest` characters."""
    if value is None or isinstance(value, bool):
        text = "null" if value is None else str(value).lower()
    elif isinstance(value, list):
        text = "[" + ", ".join(as_typed(item, longest) for item in value[:longest]) + "]"
    else:
        text = str(value)
    cut = text if len(text) <= longest else text[:longest] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def one_line(text: object, longest: int = 300) -> str:
    """A message of others, which may have several lines, for the middle of one of ours."""
    return " ".join(str(text).split())[:longest]


class UserError(Exception):
    """Bad input. The message is one line that says what is wrong, where, and what to do; the process exits with 1."""

    exit_code = 1


class SettingsError(UserError):
    """A setting that can't be used; the process exits with 2 before any work is done.

    Args:
        key: dotted name, ``data.batch_size``.
        value: the value as it was given.
        expected: what would have been right, and where it helps what to do.
    """

    exit_code = 2

    def __init__(self, key: str, value: Any, expected: str) -> None:
        super().__init__(f"{key}={as_typed(value, 100)}: expected {as_typed(expected)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return SettingsError.line, self.args  # a loader worker sends it to the training process

    @classmethod
    def line(cls, text: str) -> SettingsError:
        """An error about something other than one value: `text` is the whole line."""
        error = cls.__new__(cls)
        error.args = (as_typed(text),)
        return error
