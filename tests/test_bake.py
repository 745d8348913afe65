"""Baking: every answer gives a whole project, and an answer that can't is refused before anything is written."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import FOLDER, ROOT, Bake
from cookiecutter.exceptions import FailedHookException

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Every file of a project. A new one is added here, so that none comes or goes unseen.
TOP = ".gitignore LICENSE Makefile README.md config.py config.yaml data.py model.py pyproject.toml train.py"
FASTTRAIN = """
    __init__ __main__ checkpoint clock dashboard dashboard_panel decoding device effort errors evidence facts
    failures feed findings finite folder gauges graph history host images inject join judge judge_data
    judge_growth judge_ranks judge_step keeper listing lmdb_file loader lock logs looks machine metrics
    names observe overrides packed parallel parts precision profile records remote resume run rundir
    sampler saver seeding settings settings_file shapes shard_index shards sinks skips slots snapshot
    stand_in state stop supply tensorboard transfer typed update verdicts warm watch watchdog window
    worker writer
"""
TOOLS = """
    __init__ batch_size bench check_data check_image checks compare doctor edit_settings evaluate
    footprint judge markup pack pack_source pack_store photos profile_data project rendezvous report
    report_charts report_curves report_data report_page report_parts report_sections report_serve
    sample_steps search sweep tour trials tune work
"""
PAGE = "report.css report.js"
LAUNCH = "kubernetes.yaml one_machine.sh several_machines.sh slurm.sbatch"
TESTS = """
    bench check_data checkpoint compare dashboard data device doctor edit_settings evidence examples
    failures feed finite folder fuzz gauges images join judge keeper logs model pack pack_faults packed
    planted preemption profile profile_data records report run sampler saver search seeding settings
    shapes shards skips slots soak state stop tour training transfer tune update warm watch
"""
TEST_HELPERS = """
    chrome conftest faults fuzz fuzz_changes fuzz_checkpoint fuzz_data fuzz_settings planted plants
    simulated soak
"""
FILES = {
    *TOP.split(),
    *(f"fasttrain/{name}.py" for name in FASTTRAIN.split()),
    *(f"fasttrain/tools/{name}.py" for name in TOOLS.split()),
    *(f"fasttrain/tools/{name}" for name in PAGE.split()),
    *(f"launch/{name}" for name in LAUNCH.split()),
    *(f"tests/test_{name}.py" for name in TESTS.split()),
    *(f"tests/{name}.py" for name in TEST_HELPERS.split()),
}

# Text that has broken generated files elsewhere, and that is allowed here.
ODD_TEXTS = [
    'He said "hello"',
    "it's",
    "'''",
    '"""',
    "C:\\new\\table",
    "ends with a backslash \\",
    'a backslash and a quote \\"',
    "key: value # no comment",
    "- [ ] {x} }} %}",
    "100 % ${HOME} $(id) `id` %s %(x)s",
    "<b>bold</b> & more",
    "emoji 🚀👩‍🔬, Greek λ, 深度学习, עברית",
    "  spaces around  ",
    "null",
    "x" * 200,
]

# Slugs that can't be a project's, with a part of the rule that the message must state.
BAD_SLUGS = {
    "": "a letter first",
    "My-Net": "a-z, 0-9 and _",
    "my-net": "a-z, 0-9 and _",
    "my net": "a-z, 0-9 and _",
    "123_net": "a letter first",
    "_net": "a letter first",
    "net_": "no _ at the end",
    "my.proj": "a-z, 0-9 and _",
    "深度学习": "a-z, 0-9 and _",
    "é": "a-z, 0-9 and _",
    "net\n": "a-z, 0-9 and _",
    "net;id": "a-z, 0-9 and _",
    ".": "a-z, 0-9 and _",
    "..": "a-z, 0-9 and _",
    "../outside": "a-z, 0-9 and _",
    "nested/net": "a-z, 0-9 and _",
    "~": "a-z, 0-9 and _",
    "C:\\net": "a-z, 0-9 and _",
    "x" * 51: "at most 50 characters",
    "x" * 300: "at most 50 characters",
    "class": "Python language",
    "import": "Python language",
    "logging": "standard library",
    "torch": "package",
    "torchvision": "package",
    "numpy": "package",
    "cv2": "package",
    "omegaconf": "package",
    "nvidia_ml_py": "package",
    "fasttrain": "file or folder",
    "data": "file or folder",
    "train": "file or folder",
    "tests": "file or folder",
    "con": "Windows",
    "lpt1": "Windows",
}

BAD_TEXTS = [
    ("project_name", "", "some text"),
    ("project_name", "   ", "some text"),
    ("author", "", "some text"),
    ("author", "two\nlines", "one line"),
    ("author", "bell \x07", "one line"),
    ("description", "tab\t", "one line"),
    ("description", "line separator \u2028", "one line"),
    ("description", "half a character \ud83d", "one line"),
    ("description", "x" * 201, "at most 200 characters, found 201"),
    ("description", "sum {{ 7 * 7 }}", "cookiecutter would evaluate"),
    ("author", "{# gone #}Ann", "cookiecutter would evaluate"),
    ("author", "{% raw %}Ann{% endraw %}", "cookiecutter would evaluate"),
]


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def metadata(project: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def assert_parses(path: Path) -> None:
    """Every format that a program reads can be read; other files are only text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        compile(text, str(path), "exec")
    elif path.suffix == ".toml":
        tomllib.loads(text)
    elif path.suffix == ".json":
        json.loads(text)
    elif path.suffix in (".yaml", ".yml"):
        assert list(yaml.safe_load_all(text))


def test_the_set_of_files_is_exact(project: Path) -> None:
    assert files_in(project) == FILES


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"project_name": "Bird Song 2"},
        {"project_slug": "birds"},
        {"author": "Ann & Co."},
        {"description": ""},
        {"license": "BSD-3-Clause"},
        {"license": "Apache-2.0"},
        {"license": "Proprietary"},
    ],
    ids=str,
)
def test_each_answer_gives_a_whole_project(bake: Bake, tmp_path: Path, answers: dict[str, str]) -> None:
    project = bake(tmp_path, **answers)
    assert files_in(project) == FILES
    for name in files_in(project):
        assert_parses(project / name)
        if not name.endswith(".py"):
            text = (project / name).read_text(encoding="utf-8")
            assert "{{" not in text, name
            assert "{%" not in text, name
            assert "cookiecutter." not in text, name


def test_every_file_is_valid_before_it_is_rendered() -> None:
    for name in FILES:
        assert_parses(ROOT / FOLDER / name)


def test_python_files_are_copied_as_they_are(bake: Bake, tmp_path: Path) -> None:
    project = bake(tmp_path, project_name="Other", author="Other", license="Apache-2.0")
    sources = [name for name in FILES if name.endswith(".py")]
    assert sources
    for name in sources:
        assert (project / name).read_bytes() == (ROOT / FOLDER / name).read_bytes(), name


def test_scripts_stay_executable(project: Path) -> None:
    for name in ("launch/one_machine.sh", "launch/several_machines.sh"):
        assert os.access(project / name, os.X_OK), name


@pytest.mark.parametrize(
    ("license_answer", "expression", "words"),
    [
        ("MIT", "MIT", "Permission is hereby granted, free of charge"),
        ("BSD-3-Clause", "BSD-3-Clause", "Neither the name of the copyright holder"),
        ("Apache-2.0", "Apache-2.0", "Grant of Patent License"),
        ("Proprietary", "LicenseRef-Proprietary", "All rights reserved. No part"),
    ],
)
def test_the_licence_is_the_one_asked_for(
    bake: Bake, tmp_path: Path, license_answer: str, expression: str, words: str
) -> None:
    project = bake(tmp_path, license=license_answer, author="Ann O'Neill")
    text = (project / "LICENSE").read_text(encoding="utf-8")
    assert words in text
    assert f"Copyright (c) {datetime.date.today().year} Ann O'Neill" in text.replace("Copyright 2", "Copyright (c) 2")
    assert metadata(project)["license"] == expression


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_text_arrives_unchanged(bake: Bake, tmp_path: Path, text: str) -> None:
    project = bake(tmp_path, project_slug="odd", project_name=text, author=text, description=text)
    assert metadata(project)["description"] == text
    assert metadata(project)["authors"] == [{"name": text}]
    assert text in (project / "LICENSE").read_text(encoding="utf-8")
    for name in files_in(project):
        assert_parses(project / name)


@pytest.mark.parametrize(
    ("name", "slug"),
    [("My-Net", "my_net"), ("深度学习", "shen_du_xue_xi"), ("Größe 2", "grosse_2"), ("a " * 90, "a_" * 24 + "a")],
)
def test_the_slug_follows_from_the_name(bake: Bake, tmp_path: Path, name: str, slug: str) -> None:
    project = bake(tmp_path, project_name=name)
    assert project == tmp_path / slug
    assert metadata(project)["name"] == slug


@pytest.mark.parametrize(("slug", "rule"), BAD_SLUGS.items(), ids=[repr(slug)[:20] for slug in BAD_SLUGS])
def test_a_bad_slug_is_refused_and_leaves_nothing(
    bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str], slug: str, rule: str
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(FailedHookException):
        bake(target, project_slug=slug)
    message = capfd.readouterr().err.splitlines()[0]
    assert message.startswith("project_slug=")
    assert rule in message
    assert [*tmp_path.rglob("*")] == [target]


def test_an_absolute_slug_writes_nothing_there(bake: Bake, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(FailedHookException):
        bake(target, project_slug=str(tmp_path / "outside" / "net"))
    assert [*tmp_path.rglob("*")] == [target]


@pytest.mark.parametrize("name", ["123 net", "Class", "Torch", "!!!"])
def test_a_name_that_derives_a_bad_slug_is_refused(
    bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(FailedHookException):
        bake(tmp_path, project_name=name)
    assert capfd.readouterr().err.startswith("project_slug=")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("field", "text", "rule"), BAD_TEXTS)
def test_bad_text_is_refused_and_leaves_nothing(
    bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str], field: str, text: str, rule: str
) -> None:
    with pytest.raises(FailedHookException):
        bake(tmp_path, project_slug="net", **{field: text})
    message = capfd.readouterr().err.splitlines()[0]
    assert message.startswith(f"{field}=")
    assert rule in message
    assert not [*tmp_path.iterdir()]


def test_all_problems_are_named_at_once(bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FailedHookException):
        bake(tmp_path, project_slug="class", author="", description="x" * 999)
    lines = capfd.readouterr().err.splitlines()[:3]
    assert [line.partition("=")[0] for line in lines] == ["author", "description", "project_slug"]
    assert all(len(line) < 200 for line in lines)


@pytest.mark.parametrize("slug", ["tests", "../target"])
def test_a_refusal_spares_a_folder_that_was_there(bake: Bake, tmp_path: Path, slug: str) -> None:
    folder = tmp_path / "target" / "tests"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(FailedHookException):
        bake(tmp_path / "target", project_slug=slug, overwrite_if_exists=True)
    assert files_in(tmp_path) == {"target/tests/mine.txt"}


def cli(
    template: Path, config: Path, folder: Path, *arguments: str, keys: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cookiecutter", "--config-file", str(config), "-o", str(folder), str(template)]
    return subprocess.run(
        [*command, *arguments], input=keys, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False
    )


def test_the_command_line_bakes_and_says_what_is_next(
    template: Path, cookiecutter_config: Path, tmp_path: Path
) -> None:
    done = cli(template, cookiecutter_config, tmp_path, "--no-input", 'author=Ann "A" \\')
    assert done.returncode == 0, done.stderr
    assert metadata(tmp_path / "my_training")["authors"] == [{"name": 'Ann "A" \\'}]
    for step in ("cd my_training", "make train", "make test", "data.path=", "torchrun", "pytorch.org"):
        assert step in done.stdout


def test_the_command_line_refuses(template: Path, cookiecutter_config: Path, tmp_path: Path) -> None:
    done = cli(template, cookiecutter_config, tmp_path, "--no-input", "project_slug=../x")
    assert done.returncode == 1
    assert done.stderr.startswith("project_slug='../x': expected")
    assert not [*tmp_path.iterdir()]


def test_every_question_has_a_help_text(template: Path, cookiecutter_config: Path, tmp_path: Path) -> None:
    answers = ["Bird Song", "", "Ann", "Hears birds \\ {x}", "3"]
    done = cli(template, cookiecutter_config, tmp_path, keys="\n".join(answers) + "\n")
    assert done.returncode == 0, done.stderr
    asked = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    questions = [field for field in asked if not field.startswith("_")]
    assert questions == ["project_name", "project_slug", "author", "description", "license"]
    assert set(asked["__prompts__"]) == set(questions)
    assert set(asked["__prompts__"]["license"]) == {"__prompt__", *asked["license"]}
    shown = " ".join(done.stdout.split())
    for field in questions[:-1]:
        assert asked["__prompts__"][field] in shown
    found = metadata(tmp_path / "bird_song")
    assert (found["name"], found["description"], found["license"]) == ("bird_song", "Hears birds \\ {x}", "Apache-2.0")
