"""Settings files and command lines made to do harm, or to be misread."""

from __future__ import annotations

import random
from pathlib import Path

from fuzz_changes import changed

from config import Config
from fasttrain import settings

# Separated by two spaces, or more.
_TEXTS = r"""
!!python/object/apply:os.system ['touch ../x']  !!python/name:os.system  !!binary aGk=
!x  &a [*a, *a]  &a  *a
${oc.env:HOME}  ${oc.env:NONE_SUCH}  ${oc.env:HOME,}  ${oc.create:{a: 1}}  ${oc.decode:1}  ${seed}
${oc.deprecated:seed}
${run.dir}  ${data.path}${data.path}  ${${seed}}  ${  }  ???  null  ~  true  off  1e999  -1e-999  .inf  nan  0x10  0o17
1_000  1:30  2001-01-01  []  {}
x{a,b}.tar  [[1]]  {a: b}  ? a  - - -  ---  ...  %YAML 1.1  |  >  "  '  "\U00110000"  "\x00"  #  :
__class__: x  a.b: 1  ../../x  ~root/x  data:  run: {dir: x}  seed: 1  -  /dev/zero  http://x/{0..9}.tar
<<: *a
"""
TOKENS = [token for line in _TEXTS.splitlines() for token in line.split("  ") if token]
TOKENS += ["\t", "\0", "\x85", "\u2028", "\ufeff", "\r", "\ud7ff", "9" * 50, "9" * 5000]


class Settings:
    """config.yaml and the command line."""

    name = "settings"

    def __init__(self, valid: Path) -> None:
        self.text = (Path(settings.__file__).parents[1] / "config.yaml").read_text()
        self.keys = [line.split(":")[0].strip() for line in self.text.splitlines() if ":" in line]
        self.overrides: list[str] = []

    def make(self, rng: random.Random, folder: Path) -> None:
        lines = self.text.splitlines()
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            at, token = rng.randrange(len(lines)), rng.choice(TOKENS)
            way = rng.randrange(6)
            if way == 0:
                lines[at] = lines[at].split(":")[0] + ": " + token
            elif way == 1:
                lines.insert(at, rng.choice(("", "  ", "    ")) + token)
            elif way == 2:
                lines[at] += token
            elif way == 3:
                lines[at], lines[0] = lines[0], lines[at]
            elif way == 4:
                lines[at] = " " * rng.randrange(5) + rng.choice(self.keys) + ": " + token
            else:
                cut = rng.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:cut] + token * rng.choice((1, 1, 3, 1000)) + lines[at][cut:]
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
        if rng.random() < 0.02:
            content += rng.choice((b"x: ", b"", b"[", b"- ", b"{a: ", b"&a", b"  ")) * 10 ** rng.choice((1, 4, 6, 7))
        (folder / "config.yaml").write_bytes(changed(rng, content) if rng.random() < 0.3 else content)
        self.overrides = []
        for _ in range(rng.choice((0, 0, 1, 3))):
            key = rng.choice((rng.choice(self.keys), f"{rng.choice(('data', 'run', 'x', ''))}.{rng.choice(self.keys)}"))
            self.overrides.append(f"{key}{rng.choice(('=', '=', '=', ':', '', '+=', '=='))}{rng.choice(TOKENS)}")

    def read(self, folder: Path) -> None:
        _, saved = settings.load(Config, folder / "config.yaml", self.overrides)
        (folder / "again.yaml").write_text(settings.to_yaml(saved), "utf-8", "surrogateescape")
        settings.load(Config, saved, [])
        settings.load(Config, folder / "again.yaml", [])
