"""Prints what to do with the new project. It changes nothing and needs no network."""

from __future__ import annotations

import json
from typing import Any

# tojson leaves no quote that could end this string, and a raw string keeps JSON's backslashes.
ANSWERS: dict[str, Any] = json.loads(r'''{{ cookiecutter | tojson }}''')  # fmt: skip

NEXT_STEPS = """
{slug} is ready. It trains as it is, on images that it draws itself:

    cd {slug}
    make train        the first time this installs into .venv; it takes every GPU, or the CPU
    make test         the project's own tests

On your own images, a folder with train/ and val/, or with one folder a class:

    make train ARGS="data.path=path/to/images"

Without make, in an environment of yours:

    pip install -e ".[dev]"
    python train.py data.path=path/to/images
    torchrun --standalone --nproc-per-node=auto train.py data.path=path/to/images     with several GPUs

No GPU? Install PyTorch's CPU build into the environment first, as pytorch.org describes: it is much smaller, and
what is installed already is kept.
"""


def main() -> None:
    """Print the next steps."""
    print(NEXT_STEPS.format(slug=ANSWERS["project_slug"]))


if __name__ == "__main__":
    main()
