"""Refuses answers that would give a broken project. cookiecutter runs this before it writes the first file.

Every problem is one line: the field, the answer, the rule. The exit code is then 1 and cookiecutter removes the folder.

The folder is made before this hook runs, so `__safe_folder` in cookiecutter.json has by then given a slug that is no
plain name (`../x`, `/tmp/x`, an empty one) a harmless folder inside the target; `__answered_slug` keeps the answer.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
import unicodedata
from typing import Any

# tojson leaves no quote that could end these strings, and a raw string keeps JSON's backslashes.
ANSWERS: dict[str, Any] = json.loads(r'''{{ cookiecutter | tojson }}''')  # fmt: skip
AS_GIVEN: dict[str, Any] = json.loads(r'''{{ _cookiecutter | default({}) | tojson }}''')  # fmt: skip

TEXT_FIELDS = ("project_name", "author", "description")
MAY_BE_EMPTY = ("description",)
TEXT_LIMIT = 200  # characters
SLUG_LIMIT = 50
BRACES = ("{" * 2, "{" + "%", "{" + "#")  # how Jinja's marks begin; written so that Jinja does not see them here

# Installing the project under one of these names would replace that package, or a folder of that name hide it.
PACKAGES = {"torch", "torchvision", "numpy", "loguru", "omegaconf", "psutil", "nvidia_ml_py", "pynvml", "rich"}
PACKAGES |= {"simplejpeg", "opencv_python_headless", "cv2", "pillow", "pil", "lmdb", "pyyaml", "yaml", "pytest", "ruff"}
PACKAGES |= {"mypy", "tensorboard", "vl_convert_python", "vl_convert", "webdataset", "h5py", "tfrecord"}
PACKAGES |= {"albumentations", "pytest_xdist", "types_pyyaml", "pip", "setuptools", "wheel", "cookiecutter"}
PROJECT_MODULES = {"fasttrain", "train", "data", "model", "config", "tests", "launch", "runs"}
DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


def text_problem(field: str) -> str | None:
    """What is wrong with a free text, or None."""
    value, given = ANSWERS[field], AS_GIVEN.get(field, "")
    if not isinstance(value, str):
        return "expected text"
    if not value.strip() and field not in MAY_BE_EMPTY:
        return "expected some text, found nothing"
    if len(value) > TEXT_LIMIT:
        return f"expected at most {TEXT_LIMIT} characters, found {len(value)}"
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in value):
        return "expected one line of valid Unicode without control characters"
    if any(mark in text for mark in BRACES for text in (value, str(given))):
        return f"expected no {BRACES[0]!r}, {BRACES[1]!r} or {BRACES[2]!r}: cookiecutter would evaluate what follows"
    return None


def slug_problem(slug: Any) -> str | None:
    """What is wrong with the name of the folder, or None."""
    if not isinstance(slug, str) or not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", slug):
        return "expected a-z, 0-9 and _ only, a letter first and no _ at the end, like my_net"
    if len(slug) > SLUG_LIMIT:
        return f"expected at most {SLUG_LIMIT} characters, found {len(slug)}"
    if keyword.iskeyword(slug):
        return "expected another name: this is a word of the Python language"
    if slug in sys.stdlib_module_names:
        return "expected another name: this is a module of Python's standard library"
    if slug in PACKAGES:
        return "expected another name: this is a package that the project or its tools need"
    if slug in PROJECT_MODULES:
        return "expected another name: the project has a file or folder of this name"
    if slug in DEVICES:
        return "expected another name: Windows keeps this one for a device"
    return None


def main() -> int:
    """Print every problem; 1 if there is one, else 0."""
    slug = ANSWERS.get("__answered_slug", ANSWERS["project_slug"])
    found = [(field, ANSWERS[field], text_problem(field)) for field in TEXT_FIELDS]
    found.append(("project_slug", slug, slug_problem(slug)))
    problems = [(field, value, problem) for field, value, problem in found if problem]
    for field, value, problem in problems:
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        print(f"{field}={shown}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
