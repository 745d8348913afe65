"""The rules that keep the project readable: style and types, who may import whom, one place for each setting."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import FOLDER, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWNERS = {"train", "data", "model", "config"}  # the modules that the project's owner edits


def check_with(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} in {folder}\n{done.stdout}{done.stderr}"


@pytest.fixture(params=["template", "project"])
def sources(request: pytest.FixtureRequest) -> Path:
    """The project's folder, before and after it is rendered."""
    folder: Path = request.getfixturevalue(request.param)
    return folder / FOLDER if request.param == "template" else folder


def test_the_loop_in_the_readme_is_that_of_train_py() -> None:
    (shown,) = re.findall(r"```python\n(for epoch .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert textwrap.indent(shown, "    ") in (ROOT / FOLDER / "train.py").read_text()


def test_style_of_the_project(sources: Path) -> None:
    check_with(sources, "ruff", "check", "--no-cache", ".")
    check_with(sources, "ruff", "format", "--no-cache", "--check", ".")


def test_types_of_the_project(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_with(sources, "mypy", "--strict", f"--cache-dir={tmp_path_factory.getbasetemp() / 'mypy'}", ".")


def test_style_and_types_of_the_template(tmp_path: Path) -> None:
    check_with(ROOT, "ruff", "check", "--no-cache", "hooks", "tests", "benchmarks")
    check_with(ROOT, "ruff", "format", "--no-cache", "--check", "hooks", "tests", "benchmarks")
    check_with(ROOT, "mypy", f"--cache-dir={tmp_path}")


def modules(folder: Path) -> dict[str, ast.Module]:
    """The parsed modules of a project without its tests, by their dotted names."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith("tests"):
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(name: str, tree: ast.Module, is_package: bool) -> Iterator[str]:
    """Dotted names of all that a module imports, at its top or inside functions; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".") if is_package else name.split(".")[:-1]
            above = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def imported(folder: Path) -> dict[str, set[str]]:
    return {
        name: set(imports(name, tree, (folder / name.replace(".", "/")).is_dir()))
        for name, tree in modules(folder).items()
    }


def test_the_walk_over_imports_sees_every_form() -> None:
    text = "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\ndef h():\n    import_module('i')\n"
    assert set(imports("p.m", ast.parse(text), False)) == {"a.b", "c.d", "p.e", "p.f.g", "i"}
    assert set(imports("p", ast.parse("from .f import g"), True)) == {"p.f.g"}


def test_the_first_floor_imports_neither_tools_nor_the_owners_files(project: Path) -> None:
    for name, names in imported(project).items():
        if name.startswith("fasttrain") and not name.startswith("fasttrain.tools") and name != "fasttrain.__main__":
            assert not {each for each in names if each.startswith("fasttrain.tools")}, name
            assert not {each for each in names if each.split(".")[0] in OWNERS}, name


def test_the_owners_files_do_not_import_tools(project: Path) -> None:
    found = imported(project)
    for name in OWNERS:
        assert not {each for each in found[name] if each.startswith("fasttrain.tools")}, name


def test_tools_reach_the_owners_files_through_one_module(project: Path) -> None:
    found = imported(project)
    assert "fasttrain.tools.project" in found
    for name, names in found.items():
        if name == "fasttrain.__main__" or name.startswith("fasttrain.tools"):
            reached = {each.split(".")[0] for each in names} & OWNERS
            assert not reached or name == "fasttrain.tools.project", f"{name} imports {reached}"


# Python itself reports whatever starts a thread or a process, or opens a file to write. The packages that the project
# uses are imported before that: what they do is not the project's.
IMPORT_ALL = """
import importlib, json, multiprocessing, os, sys

STARTS = ("_thread.start", "subprocess.", "os.fork", "os.posix_spawn", "os.exec", "os.system", "socket.")

def watch(event, arguments):
    if event.startswith(STARTS):
        print(event, arguments)
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        print(event, arguments)

packages, own = json.loads(sys.argv[1])
for name in packages:
    importlib.import_module(name)
sys.addaudithook(watch)
for name in own:
    importlib.import_module(name)
assert multiprocessing.get_start_method(allow_none=True) is None, "the start method is set"
"""


def test_importing_every_module_starts_nothing(project: Path) -> None:
    own = [name for name in modules(project) if name != "fasttrain.__main__"]
    assert set(own) >= OWNERS
    roots = {each.split(".")[0] for names in imported(project).values() for each in names}
    packages = sorted(root for root in roots - OWNERS - {"fasttrain"} if importlib.util.find_spec(root))
    command = [sys.executable, "-B", "-c", IMPORT_ALL, json.dumps([packages, own])]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_each_setting_has_a_value_and_a_type(project: Path) -> None:
    """config.yaml and config.py name the same keys; each line of config.yaml says what its value is for."""
    classes = {
        node.name: [line for line in node.body if isinstance(line, ast.AnnAssign)]
        for node in modules(project)["config"].body
        if isinstance(node, ast.ClassDef)
    }

    def fields(name: str) -> dict[str, Any]:
        lines = {ast.unparse(line.target): ast.unparse(line.annotation) for line in classes[name]}
        return {field: fields(kind) if kind in classes else None for field, kind in lines.items()}

    def keys(section: dict[str, Any]) -> dict[str, Any]:
        return {key: keys(inner) if isinstance(inner, dict) else None for key, inner in section.items()}

    assert keys(yaml.safe_load((project / "config.yaml").read_text(encoding="utf-8"))) == fields("Config")


def test_each_tools_table_links_its_documentation() -> None:
    for file in (ROOT / "pyproject.toml", ROOT / FOLDER / "pyproject.toml"):
        tables = re.split(r"(?m)^(?=\[)", file.read_text(encoding="utf-8"))
        tools = {re.match(r"\[+tool\.(\w+)", table): table for table in tables}
        last = {match[1]: table for match, table in tools.items() if match}  # of the tables of a tool
        assert set(last) == {"setuptools", "ruff", "mypy", "pytest"}
        for tool, table in last.items():
            assert re.search(r"(?m)^# https://\S+$\s*\Z", table), f"{file}: [tool.{tool}]"


def test_no_project_is_named_like_a_package_that_it_needs() -> None:
    """The hook's list holds every package of the project's pyproject.toml."""
    with (ROOT / FOLDER / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    needed = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[^\w.-]", each)[0].replace("-", "_") for each in needed}
    lines = ast.parse((ROOT / "hooks/pre_gen_project.py").read_text(encoding="utf-8")).body
    refused: set[str] = set()
    for line in lines:
        if isinstance(line, ast.Assign | ast.AugAssign) and "PACKAGES" in ast.unparse(line).split()[0]:
            refused |= ast.literal_eval(line.value)
    assert names - refused == set()
