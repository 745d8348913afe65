"""Settings: every value becomes what its type says, or one clear line says why not. Nothing else may happen."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from config import Config
from fasttrain.errors import SettingsError
from fasttrain.overrides import nearest
from fasttrain.settings import load, location, to_yaml, value
from fasttrain.typed import Given, Setting

PROJECT = Path(__file__).parents[1]
FILE = PROJECT / "config.yaml"


@dataclass
class Inner:
    rate: float = value(above=0)
    names: list[str] = value()
    sizes: list[int] | None = value(low=1)


@dataclass(kw_only=True)
class Small:
    count: int = value(low=1, high=5)
    note: str | None = value()
    mode: Literal["off", "Fast"] | None = value()
    file: str = location()
    inner: Inner


SMALL = "count: 2\nnote: hello\nmode: fast\nfile: a/b\ninner:\n  rate: 1e-4\n  names: [x, y]\n  sizes: null\n"


def get(key: str, *overrides: str, source: Path | Mapping[str, Any] = FILE) -> Any:
    found: Any = load(Config, source, overrides)[0]
    for name in key.split("."):
        found = getattr(found, name)
    return found


def typed(override: str) -> Any:
    return get(override.partition("=")[0], override)


def error(*overrides: str, schema: type = Config, source: Path | Mapping[str, Any] = FILE) -> str:
    """The one line that these settings are refused with."""
    with pytest.raises(SettingsError) as caught:
        load(schema, source, overrides)
    line = str(caught.value)
    assert line.isprintable(), "an error is one line that a terminal can show"
    assert caught.value.exit_code == 2
    return line


def small(tmp_path: Path, text: str | bytes = SMALL, *overrides: str) -> tuple[Small, dict[str, Any]]:
    return load(Small, written(tmp_path, text), overrides)


def written(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "small.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


# ---------------------------------------------------------------- what comes back


def test_the_shipped_file_gives_typed_dataclasses() -> None:
    cfg, saved = load(Config, FILE, [])
    assert type(cfg) is Config
    assert type(cfg.optimizer).__name__ == "Optimizer"
    assert (cfg.amp, cfg.data.workers, cfg.optimizer.weight_decay) == ("auto", None, 5e-4)
    assert cfg.data.mean == [0.485, 0.456, 0.406]
    assert type(cfg.data.mean) is list
    assert list(saved)[:4] == ["seed", "resume", "amp", "run"]
    assert type(saved["data"]["crop_scale"]) is list


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", ".0001", "'1e-4'", " 1e-4 "])
def test_numbers_are_numbers_in_every_spelling(tmp_path: Path, text: str) -> None:
    assert typed(f"optimizer.lr={text}") == 1e-4
    in_file = small(tmp_path, SMALL.replace("1e-4", text))[0].inner.rate
    assert (in_file, type(in_file)) == (1e-4, float)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.batch_size=1e3", 1000),
        ("data.batch_size=64.0", 64),
        ("data.batch_size=1_000", 1000),
        ("data.batch_size=010", 10),
        ("optimizer.lr=.5", 0.5),
        ("optimizer.lr=5", 5.0),
        ("data.shuffle=False", False),
        ("data.shuffle=no", False),
        ("data.shuffle=on", True),
        ("data.workers=null", None),
        ("data.workers=None", None),
        ("data.workers=auto", None),
        ("data.workers=", None),
        ("data.workers=~", None),
        ("data.workers=0", 0),
        ("train.clip_norm=off", None),
        ("train.mixup=off", 0.0),
        ("data.workers=off", 0),
        ("data.pin_memory=auto", None),
        ("data.pin_memory=off", False),
        ("data.start_method=off", None),
        ("data.start_method=Spawn", "spawn"),
        ("run.dir=none", None),
        ("run.dir=OFF", None),
        ("run.dir=", None),
        ("model.weights=~", None),
        ("resume=auto", "auto"),
        ("resume=null", None),
        ("amp=off", "off"),
        ("amp=No", "off"),
        ("amp=false", "off"),
        ("amp=BF16", "bf16"),
        ("run.log_level=debug", "DEBUG"),
        ("model.name=1e3", "1e3"),
        ("model.name=007", "007"),
        ("model.name=on", "on"),
        ("model.name='a b'", "a b"),
        ("model.name=\"'quoted'\"", "'quoted'"),
        ("model.name=a=b", "a=b"),
        ("optimizer.betas=[0.8, 1e-1]", [0.8, 0.1]),
        ("optimizer.betas=0.8,.9", [0.8, 0.9]),
        ("data.crop_scale=[1,1]", [1.0, 1.0]),
    ],
)
def test_command_line_values_mean_what_a_person_means(override: str, expected: object) -> None:
    found = typed(override)
    assert found == expected
    assert type(found) is type(expected)


def test_text_fields_keep_the_text_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "007").mkdir()
    for text in ("1e3", "on", "123", "null.d", "1:30", "a b"):
        assert typed(f"run.dir={text}") == str(tmp_path / text)
    assert typed("run.dir='null'") == str(tmp_path / "null")
    assert typed("data.path=007") == str(tmp_path / "007")


@pytest.mark.parametrize(
    ("old", "new", "key", "expected"),
    [
        ("mode: fast", "mode: off", "mode", "off"),
        ("mode: fast", "mode: FAST", "mode", "Fast"),
        ("mode: fast", "mode:", "mode", None),
        ("note: hello", "note: ~", "note", None),
        ("note: hello", "note: 'off'", "note", "off"),
        ("note: hello", "note: 1:30", "note", "1:30"),
        ("note: hello", "note: 010", "note", "010"),
        ("note: hello", "note: yes", "note", "yes"),
        ("note: hello", "note: 2024-01-01", "note", "2024-01-01"),
        ("note: hello", "note: |\n  two\n  lines", "note", "two\nlines\n"),
        ("count: 2", "count: 3.0", "count", 3),
    ],
)
def test_file_values_are_read_by_their_type(tmp_path: Path, old: str, new: str, key: str, expected: object) -> None:
    assert getattr(small(tmp_path, SMALL.replace(old, new))[0], key) == expected


def test_lists(tmp_path: Path) -> None:
    inner = small(tmp_path, SMALL.replace("[x, y]", "\n    - 1\n    - off"), "inner.sizes=[1, 2e0]")[0].inner
    assert (inner.names, inner.sizes) == (["1", "off"], [1, 2])
    inner = small(tmp_path, SMALL, "inner.names=['a b', c]", "inner.sizes=[]")[0].inner
    assert (inner.names, inner.sizes) == (["a b", "c"], [])


def test_of_several_overrides_the_last_counts() -> None:
    assert get("optimizer.lr", "optimizer.lr=1", "optimizer.lr=x", "optimizer.lr=3") == 3.0


def test_an_override_rescues_a_bad_or_missing_line_of_the_file(tmp_path: Path) -> None:
    assert small(tmp_path, SMALL.replace("count: 2", "count: x"), "count=3")[0].count == 3
    assert small(tmp_path, SMALL.replace("count: 2\n", ""), "count=3")[0].count == 3


# ---------------------------------------------------------------- paths


def test_a_relative_path_starts_where_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cfg, saved = small(tmp_path)
    assert cfg.file == saved["file"] == str(tmp_path / "a" / "b")
    assert small(tmp_path, SMALL, "file=../c")[0].file == str(tmp_path / "c")
    assert small(tmp_path, SMALL, "file=~/c")[0].file == str(tmp_path / "home" / "c")
    assert small(tmp_path, SMALL.replace("a/b", "~/d"))[0].file == str(tmp_path / "home" / "d")
    assert load(Small, {**saved, "file": "rel"}, [])[0].file == str(here / "rel")


def test_a_path_must_exist_or_be_a_known_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert get("data.path", "data.path=shapes") == "shapes"
    words = "expected an existing file or folder, a pattern of tar files, an http(s) URL"
    names = "or one of shapes, fashion_mnist, cifar10"
    assert error("data.path=shape") == f"data.path=shape: {words}, {names}; there is no {tmp_path / 'shape'}"
    assert error("resume=x").startswith(
        "resume=x: expected an existing file or folder, or auto, or null; there is no /"
    )
    assert "there is no" in error("data.path=" + "x" * 5000)
    (tmp_path / "shape").mkdir()
    assert get("data.path", "data.path=shape") == str(tmp_path / "shape")


# ---------------------------------------------------------------- values refused


WHOLE = "a whole number of at least 1"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        *(
            (f"data.batch_size={text}", WHOLE)
            for text in ("0", "-1", "1.5", "x", "true", "nan", "inf", "1e400", "null")
        ),
        *((f"data.batch_size={text}", WHOLE) for text in ("", "0x10", "1:30", "٣", "[1]", "1 2", "1__0", "9" * 5000)),
        ("data.workers=-1", "a whole number of at least 0, or null"),
        ("seed=9223372036854775808", "and at most 9223372036854775807"),
        ("optimizer.lr=0", "a number above 0"),
        ("optimizer.lr=True", "a number above 0"),
        ("optimizer.lr=NaN", "a number above 0"),
        ("optimizer.lr=.inf", "a number above 0"),
        ("data.val_fraction=1", "a number above 0 and below 1"),
        ("train.label_smoothing=1", "a number of at least 0 and below 1"),
        ("data.flip=1.1", "a number from 0 to 1"),
        ("data.flip=yes", "a number from 0 to 1"),
        ("data.shuffle=1", "true or false"),
        ("data.shuffle=0", "true or false"),
        ("data.shuffle=auto", "true or false"),
        ("amp=fp8", "one of auto, bf16, fp16, off"),
        ("amp=on", "one of auto, bf16, fp16, off"),
        ("amp=null", "one of auto, bf16, fp16, off"),
        ("data.start_method=x", "one of fork, spawn, forkserver, or null"),
        ("data.mean=[1,2]", "a list of 3 numbers, not of 2"),
        ("data.mean=[1,2,x]", "a list of 3 numbers"),
        ("data.mean=[1,2,true]", "a list of 3 numbers"),
        ("data.mean=[1,2,3", "a list of 3 numbers"),
        ("data.mean=null", "a list of 3 numbers"),
        ("data.std=[1,1,0]", "a list of 3 numbers, each above 0"),
        ("data.crop_scale=[1,0.5]", "a list of 2 numbers, each above 0 and at most 1, the smaller first"),
        ("model.name=", "a text"),
        ("model.name=null", "a text"),
        ("model.name=???", "a text"),
        ("model.name=a\0b", "a text"),
    ],
)
def test_senseless_values_are_refused_in_words(override: str, expected: str) -> None:
    key, _, text = override.partition("=")
    line = error(override)
    assert line.startswith(f"{key}={text[:50] if text.isprintable() else ''}")
    assert re.search(f": expected (.*, )?{re.escape(expected)}($|[,;] | in any case$)", line)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("count", True),
        ("count", 1.5),
        ("count", float("nan")),
        ("count", 10**400),
        ("count", [1]),
        ("count", {"a": 1}),
        ("count", object()),
        ("note", 3),
        ("note", True),
        ("mode", True),
        ("mode", 0),
        ("file", None),
        ("inner", 5),
        ("inner", None),
        ("inner", []),
    ],
)
def test_saved_settings_are_checked_too(tmp_path: Path, key: str, bad: object) -> None:
    saved = small(tmp_path)[1]
    line = error(schema=Small, source={**saved, key: bad})
    assert line.startswith(key)
    assert "(the saved settings)" in line


@pytest.mark.parametrize("bad", [0, 1, 1.0, "1", [True]])
def test_a_switch_is_no_number(bad: object) -> None:
    with pytest.raises(SettingsError, match="expected true or false"):
        Setting("k", bool).read(Given(bad))


def test_saved_settings_hold_texts_as_they_are(tmp_path: Path) -> None:
    saved = small(tmp_path)[1]
    assert load(Small, {**saved, "note": "null", "count": 3.0, "mode": False}, [])[1] == {
        **saved, "note": "null", "count": 3, "mode": "off"
    }  # fmt: skip


def test_a_value_of_the_file_is_refused_with_its_line(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL.replace("1e-4", "fast"))
    assert error(schema=Small, source=file) == "inner.rate=fast: expected a number above 0 (small.yaml:6)"


def test_every_limit_is_put_in_words() -> None:
    def words(kind: type, **limits: Any) -> str:
        return Setting("k", kind, limits=limits).expected

    assert words(int) == "a whole number"
    assert words(int, low=1, high=4) == "a whole number from 1 to 4"
    assert words(float, high=4) == "a number of at most 4"
    assert words(float, below=4) == "a number below 4"
    assert words(float, above=0, high=1) == "a number above 0 and at most 1"


@pytest.mark.parametrize(
    ("limit", "allowed", "refused"),
    [("low", "1", "0.999"), ("high", "1", "1.001"), ("above", "1.001", "1"), ("below", "0.999", "1")],
)
def test_limits_hold_at_their_edge(limit: str, allowed: str, refused: str) -> None:
    setting = Setting("k", float, limits={limit: 1})
    assert setting.read(Given(allowed)) == float(allowed)
    with pytest.raises(SettingsError):
        setting.read(Given(refused))


# ---------------------------------------------------------------- keys and forms refused


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optimzer.lr", "optimizer.lr"),
        ("train.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("OPTIMIZER.LR", "optimizer.lr"),
        ("optimizer.lr.x", "optimizer.lr"),
        ("batch_size", "data.batch_size"),
        ("data.batchsize", "data.batch_size"),
        ("train.batch-size", "data.batch_size"),
        ("bs", "data.batch_size"),
        ("model.weight", "model.weights"),
        ("epochs", "train.epochs"),
        ("optimizer.workers", "data.workers"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, near: str) -> None:
    assert error(f"{key}=1") == f"{key}: no such setting (on the command line); did you mean {near}?"


def test_an_unknown_key_like_no_other_names_the_section() -> None:
    assert "optimizer has name, lr, momentum" in error("optimizer.qqq=1")
    assert "config.yaml has all of them" in error("qqq=1")
    assert nearest("z" * 1000 + ".lr", ["optimizer.lr"]) is None, "only the start of an endless key is compared"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SMALL + "cuont: 2\n", "cuont: no such setting (small.yaml:9); did you mean count?"),
        (SMALL + "rate: 2\n", "rate: no such setting (small.yaml:9); did you mean inner.rate?"),
        (SMALL + "  count: 2\n", "inner.count: no such setting (small.yaml:9); did you mean count?"),
        (SMALL.replace("inner:", "iner:"), "iner: no such setting (small.yaml:5); did you mean inner?"),
        (SMALL.replace("count: 2", "count: {a: 1}"), "count: expected a whole number from 1 to 5, not a section"),
        ("inner: 5\n", "inner=5: expected the settings of this section, indented below it (small.yaml:1)"),
        ("inner:\n", "inner=: expected the settings of this section, indented below it (small.yaml:1)"),
        ("inner: [1]\n", "inner=[1]: expected the settings of this section"),
        (SMALL + "inner.rate: 2\n", "inner.rate: dotted names are for the command line"),
        (SMALL.replace("count: 2\n", ""), "count: missing in small.yaml; expected a whole number from 1 to 5"),
        (SMALL.replace("  rate: 1e-4\n", ""), "inner.rate: missing in small.yaml; expected a number above 0"),
        ("count: 2\ninner: {}\n", "note: missing in small.yaml; expected a text, or null"),
        (SMALL.replace("note", "count"), "small.yaml:2: count stands here a second time, first at small.yaml:1"),
        (SMALL.replace("[x, y]", "[x, [y]]"), "small.yaml:7: expected a list of numbers or texts"),
        (SMALL.replace("[x, y]", "[x: y]"), "small.yaml:7: expected a list of numbers or texts"),
        (SMALL.replace("[x, y]", "x: y"), "small.yaml:7: not YAML: mapping values are not allowed here"),
    ],
)  # fmt: skip
def test_a_wrong_structure_is_refused_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    assert error(schema=Small, source=written(tmp_path, text)).startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["--optimizer.lr=0.1"], "optimizer.lr=0.1"),
        (["--optimizer.lr", "0.1"], "optimizer.lr=0.1"),
        (["--lr", "0.1"], "optimizer.lr=0.1"),
        (["--batch-size=4"], "data.batch_size=4"),
        (["-x"], "section.key=VALUE; config.yaml has all settings"),
        (["--help"], "section.key=VALUE; config.yaml has all settings"),
        (["optimizer.lr"], "optimizer.lr=VALUE"),
        (["optimizer.lr", "0.1"], "optimizer.lr=0.1"),
        (["optimizer.lr", "data.workers=2"], "optimizer.lr=VALUE"),
        (["+optimizer.lr=1"], "optimizer.lr=1"),
        (["++optimizer.lr=1"], "optimizer.lr=1"),
        (["~optimizer.lr"], "optimizer.lr=VALUE"),
        (["~train.max_steps"], "train.max_steps=null"),
        (["optimizer.lr:0.1"], "optimizer.lr=0.1"),
        (["optimizer.lr: 0.1"], "optimizer.lr=0.1"),
        (["=5"], "section.key=5; config.yaml has all settings"),
        ([""], "section.key=VALUE; config.yaml has all settings"),
    ],
)
def test_other_forms_are_refused_with_the_right_one(arguments: list[str], right: str) -> None:
    line = error(*arguments)
    assert line.startswith(arguments[0])
    assert line.endswith(f": expected key=value, without dashes or other signs: {right}")


@pytest.mark.parametrize("argument", ["optimizer={lr: 1}", "optimizer=", "optimizer=sgd"])
def test_a_section_can_not_be_overridden_as_a_whole(argument: str) -> None:
    expected = "optimizer is a section; write each setting on its own, optimizer.name=VALUE"
    assert error(argument) == f"{argument}: {expected}"


# ---------------------------------------------------------------- references


def test_references_are_filled_in_but_saved_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_RATE", "1e-3")
    monkeypatch.setenv("FT_DIR", "runs")
    text = SMALL.replace("a/b", "${oc.env:FT_DIR}/${note}").replace("1e-4", "${oc.env:FT_RATE}")
    cfg, saved = small(
        tmp_path, text, "inner.names=[${mode}, ${oc.env:FT_NONE,7}]", "inner.sizes=${oc.env:FT_NONE,null}"
    )
    assert (cfg.file, cfg.inner.rate) == (str(tmp_path / "runs" / "hello"), 1e-3)
    assert (cfg.inner.names, cfg.inner.sizes) == (["Fast", "7"], None)
    assert (saved["file"], saved["inner"]["rate"]) == ("${oc.env:FT_DIR}/${note}", "${oc.env:FT_RATE}")
    again, saved_again = load(Small, written(tmp_path, to_yaml(saved)), [])
    assert (again, saved_again) == (cfg, saved)
    assert "1e-3" not in to_yaml(saved)


def test_a_reference_takes_the_type_of_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_ODD", "off")
    monkeypatch.setenv("FT_MEAN", "[1, 2, 3]")
    assert typed("data.workers=${oc.env:FT_ODD}") == 0
    assert typed("amp=${oc.env:FT_ODD}") == "off"
    assert typed("model.name=${oc.env:FT_ODD}") == "off"
    assert typed("data.mean=${oc.env:FT_MEAN}") == [1.0, 2.0, 3.0]
    assert typed("data.mean=${data.std}") == get("data.std")
    chain = ["train.max_steps=${train.epochs}", "train.epochs=${dashboard.every}", "dashboard.every=${seed}", "seed=7"]
    assert get("train.max_steps", *chain) == 7


def test_the_environment_is_not_shown_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_SECRET", "hunter2")
    assert error("optimizer.lr=${oc.env:FT_SECRET}") == "optimizer.lr=${oc.env:FT_SECRET}: expected a number above 0"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.dir=${oc.env:FT_NONE}"], "the environment variable FT_NONE to be set"),
        (["run.dir=${optimizer.rl}"], "the key of a setting in place of optimizer.rl; did you mean optimizer.lr?"),
        (["run.dir=${oc.env}"], "the key of a setting in place of oc.env"),
        (["run.dir=${data}"], "the key of a setting in place of data"),
        (["run.dir=${run.dir}"], "a reference that doesn't lead back to itself"),
        (["run.dir=${data.root}", "data.root=${run.dir}"], "a reference that doesn't lead back to itself"),
        (["run.dir=${model.name}", "data.root=${run.dir}", "model.name=${data.root}"], "a reference that doesn't lead"),
        (["run.dir=${oc.env:FT_REFERENCE}"], "at most 2000 characters, and no more references, once"),
        (["run.dir=${oc.env:FT_LONG}"], "at most 2000 characters, and no more references, once"),
        (["run.dir=" + "${seed}" * 2000], "references of the form"),
        (["run.dir=${seed}", "run.dir=${oc.env:A,'}"], "another reference"),
        *(
            ([f"run.dir={text}"], "references of the form ${section.key} or ${oc.env:NAME}")
            for text in (
                "${",
                "${}",
                "${oc.env:A",
                "${oc.coerce:this.Spec,1}",
                "${oc.create:{a: 1}}",
                "${oc.decode:'1'}",
                "${oc.select:seed}",
                "${eval:1+1}",
                "${oc.${seed}:1}",
                "${oc.env:${oc.decode:A}}",
                "${oc.env:A,[[[[]]]]}",
                "${.dir}",
                "${" * 300,
            )
        ),
    ],
)
def test_references_that_lead_nowhere_are_refused(
    overrides: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_REFERENCE", "${oc.env:HOME}")
    monkeypatch.setenv("FT_LONG", "x" * 3000)
    line = error(*overrides)
    assert f": expected {expected}" in line


def test_references_that_double_again_and_again_end_quickly() -> None:
    """Followed one after the other, these would be 8**19 texts."""
    chain = make_dataclass("Chain", [(f"k{i}", str, value()) for i in range(20)])
    source = {f"k{i}": f"${{k{i + 1}}}" * 8 for i in range(19)} | {"k19": "text"}
    assert "expected at most 2000 characters" in error(schema=chain, source=source)


# ---------------------------------------------------------------- writing them


@pytest.mark.parametrize(
    "text",
    ["123", "1e3", "null", "none", "off", "~", "", " x ", "yes", "[a]", "a: b #c", "\"q'", "é😀", "a\nb\t\x7f"],
)  # fmt: skip
def test_settings_survive_being_written_and_read(tmp_path: Path, text: str) -> None:
    saved = small(tmp_path)[1]
    saved["inner"] |= {"rate": 1e-5, "names": [text or "x", "on"], "sizes": [1]}
    saved["note"] = text or None
    file = written(tmp_path, to_yaml(saved))
    cfg, again = load(Small, file, [])
    assert again == saved
    assert (cfg.note, cfg.inner.rate) == (text or None, 1e-5)


def test_the_shipped_settings_survive_being_written_and_read(tmp_path: Path) -> None:
    cfg, saved = load(Config, FILE, ["run.dir=123", "optimizer.lr=1e-4", "optimizer.final_lr=1e-20"])
    saved["data"]["std"] = saved["data"]["mean"]  # one list in two places must not become an alias
    cfg.data.std = cfg.data.mean
    file = written(tmp_path, to_yaml(saved))
    assert load(Config, file, []) == (cfg, saved) == load(Config, saved, [])


# ---------------------------------------------------------------- hostile files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "small.yaml: is empty"),
        ("# nothing\n---\n", "small.yaml: is empty"),
        ("- a\n- b\n", "small.yaml:1: expected settings, one `key: value` a line"),
        ("# text\n\njust text", "small.yaml:3: expected settings"),
        (
            "count: 2\n\tnote: x\n",
            "small.yaml:2: not YAML: found character '\\t' that cannot start any token; indent with",
        ),
        ("count: [1\nnote: 2", "small.yaml:2: not YAML: "),
        ("count: 'x", "small.yaml:1: not YAML: found unexpected end of stream"),
        ("count: 2\n---\ncount: 3\n", "small.yaml:3: expected one YAML document"),
        (
            "count: !!python/object/apply:os.system [ls]",
            "small.yaml:1: expected a plain value without the tag tag:yaml.org",
        ),
        ("count: !!python/name:os.system", "small.yaml:1: expected a plain value without the tag"),
        ("count: !new x", "small.yaml:1: expected a plain value without the tag !new"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n", "small.yaml:1: expected no anchors (&) or aliases (*)"),
        ("count: 2\n<<: *a\n", "small.yaml:2: expected no anchors (&) or aliases (*)"),
        ("? [a]\n: 1\n", "small.yaml:1: expected the name of a setting before the colon"),
        ("[" * 100_000, "small.yaml:1: "),
        ("a: " + "{a: " * 100_000, "small.yaml:1: more than 10 sections within each other"),
        ("\n".join(" " * i + "a:" for i in range(1000)), "small.yaml:11: more than 10 sections within each other"),
        ('count: "\\UFFFFFFFF"\n', "small.yaml: not YAML: "),
        ("%YAML 1." + "9" * 5000 + "\n---\ncount: 1\n", "small.yaml: not YAML: "),
        ("count: \0", "small.yaml: not YAML: unacceptable character"),
        (b"\xff\xfe\x00a", ": expected a YAML file in UTF-8"),
        (bytes(range(256)), ": expected a YAML file in UTF-8"),
        (b"#" * 1_000_001, ": has more than 1000000 bytes"),
        ("x" * 200_000 + ": 1\n", ""),
    ],
    ids=range(24),
)
def test_a_broken_or_hostile_file_is_one_line(tmp_path: Path, content: str | bytes, expected: str) -> None:
    line = error(schema=Small, source=written(tmp_path, content))
    assert expected in line
    assert len(line) < 1100


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    assert small(tmp_path, b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())[0].note == "hello"


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert error(source=tmp_path / "no.yaml") == f"{tmp_path / 'no.yaml'}: there is no such settings file"
    assert "there is no such settings file" in error(source=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "there is no such settings file" in error(source=tmp_path / "pipe")


PIECES = [
    *"\t\n:#-[]{}&*!|>'\"%@`~?,$\\\0\x85\u2028é",
    "${",
    "!!python/name:os",
    "<<: *a",
    "  ",
    "---\n",
    "nan",
    "1e999",
]


def mutated(text: str, draw: random.Random) -> str:
    """The text with up to four pieces replaced, repeated or left out."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(text))
        end = start + draw.choice([0, 0, 1, 5, 200])
        there = text[draw.randrange(len(text)) :][:40]
        text = text[:start] + draw.choice([draw.choice(PIECES), there, ""]) + text[end:]
    return text


def refusal(source: Path, arguments: list[str]) -> str | None:
    try:
        load(Config, source, arguments)
    except SettingsError as error:
        return str(error)
    return None


def test_mutated_files_and_arguments_load_or_are_refused(tmp_path: Path) -> None:
    draw = random.Random(0)
    original = FILE.read_text()
    lines = []
    for _ in range(300):
        lines.append(refusal(written(tmp_path, mutated(original, draw)), []))
        key = draw.choice(original.split()).strip(":")
        argument = draw.choice(["", "data.", "--"]) + key + draw.choice(["", "=", ":"]) + draw.choice(PIECES)
        lines.append(refusal(FILE, [argument]))
    refused = [line for line in lines if line is not None]
    assert all(line.isprintable() and len(line) < 1500 for line in refused)
    assert 200 < len(refused) < 600, "most mutations, but not all, break a file"


def test_reading_settings_imports_no_torch() -> None:
    code = "import sys, fasttrain.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0


def test_the_presets_of_the_readme_are_settings_that_load() -> None:
    text = (FILE.parent / "README.md").read_text()
    block = text.partition("### Presets")[2].partition("```")[2].partition("```")[0]
    presets = [line.partition("train.py ")[2].split() for line in block.split("\n") if line]
    assert len(presets) == 4
    for overrides in presets:
        plain = load(Config, FILE, [])[1]
        changed = load(Config, FILE, overrides)[1]
        assert sum(plain[section] != changed[section] for section in plain) > 0, overrides
