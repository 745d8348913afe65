"""The HTML report: what it shows, that nothing in a run can harm it, and how a browser takes it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chrome import Chrome, found
from conftest import HOME

from fasttrain import history
from fasttrain.errors import UserError
from fasttrain.judge import Finding, Verdict
from fasttrain.tools import markup, report, report_data
from fasttrain.tools.report_serve import Server

PHASES = {"wait": 0.03, "copy": 0.0, "forward": 0.05, "backward": 0.03, "optimizer": 0.01, "other": 0.01}
EVIL = "</script></style><img src=x onerror=window.harm=1>\"'`\u2028\x1b[31m\u202e{{7*7}}"
FOUND = Verdict(
    (Finding("few workers", 0.42, 0.9, "The loader is slow.", f"71 of 100 {EVIL}", "data.workers: 2 -> 6", 1),),
    True,
    f"Waits for data {EVIL}",
    0.58,
)


def rows(batches: int, rank: int = 0, start: float = 10.0) -> Iterator[dict[str, Any]]:
    for i in range(batches):
        wait = PHASES["wait"] * (rank + 1)
        yield {
            "epoch": 0,
            "step": i,
            "time": start + i / 8,
            "wall": wait + 0.1,
            **PHASES,
            "wait": wait,
            "images": 32,
        } | {
            "loss": 1 / (i + 1),
            "lr": 0.1,
            "ready": 3,
            "worker": 0,
        }


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": 12.0, "event": kind, **fields}


def put(path: Path, lines: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def make(path: Path, batches: int = 60, ranks: int = 2, workers: int = 2) -> Path:
    """A run directory as a training leaves it."""
    path.mkdir()
    for rank in range(ranks):
        put(path / f"rank{rank}.jsonl", rows(batches, rank))
    gauges = [
        event("gauges", cpu=50.0, cores=[20, 80], rss=2e9, memory_used=3e9, gpu=97.0) | {"time": i} for i in range(9)
    ]
    metrics = [event("validation", epoch=i, accuracy=0.5 + i / 10, loss=0.5) | {"time": 11 + i} for i in range(3)]
    put(path / "events0.jsonl", [*gauges, *metrics, event("pause", name="validation", seconds=1.5)])
    (path / "config.yaml").write_text(f"seed: 0\ndata: {{workers: {workers}, path: x}}\nrun: {{dir: {path.name}}}\n")
    (path / "run.json").write_text(json.dumps({"world_size": ranks, "device": "a device", "started": 1.7e9}))
    (path / "profile0.txt").write_text("aten::add 12.5%\n")
    (path / "rank0.log").write_text("2026-01-01 00:00:00.000 WARNING  rank 0 | disk is slow\n")
    return path


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data + "\n"

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.elements)


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_data, "judge", lambda *_: FOUND)


def test_one_page_tells_all_of_a_run_and_fetches_nothing(tmp_path: Path, verdict: None) -> None:
    run = make(tmp_path / "first")
    assert report.main([str(run)]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    for words in (
        "few workers",
        "data.workers: 2 -> 6",
        "42%",
        "90% sure",
        "disk is slow",
        "a device",
        "aten::add",
        "rank 1",
    ):
        assert words in page.words, words
    titles = ("Time of a batch", "Throughput", "Loss", "accuracy", "Learning rate", "CPU", "Memory", "GPU utilisation")
    for title in titles:
        assert title in page.words, title
    drawn = [attributes for tag, attributes in page.elements if tag == "svg" and attributes.get("role") == "img"]
    assert len(drawn) == page.count("figure") + 1  # each chart once, the wide one for phones, too
    assert all(len(each["aria-label"] or "") > 20 for each in drawn)
    links = [value for _, each in page.elements for key in ("src", "href", "action") if (value := each.get(key))]
    assert all(link.startswith(("#", "data:image")) for link in links), links
    assert "unsafe" not in text.split("</head>")[0]


def test_runs_stand_side_by_side_with_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [make(tmp_path / "before", workers=1, ranks=1), make(tmp_path / "after", workers=6, ranks=1)]
    words = Page(report.build(runs)).words.split("Settings that differ")[1].split("Where the time goes")[0].split()
    assert words == ["before", "after", "data.workers", "1", "6"]
    with pytest.raises(UserError, match="9 runs: at most 8"):
        report.main([str(runs[0])] * 9)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    assert report.names([tmp_path / "a/run", tmp_path / "b/run"]) == ["a/run", "b/run"]
    assert report.names([tmp_path / "run", tmp_path / "run"]) == ["run (1)", "run (2)"]


def hostile(tmp_path: Path) -> str:
    """The page of a run in which every text tries to be markup or script."""
    run = make(tmp_path / EVIL.replace("/", "").replace("\x1b", ""))
    put(run / "events0.jsonl", [event("validation", **{EVIL: 0.5}), event("pause", name=EVIL, seconds=EVIL)])
    (run / "config.yaml").write_text(json.dumps({EVIL: {"key": EVIL}, "classes": [EVIL]}), encoding="utf-8")
    (run / "run.json").write_text(json.dumps({"device": EVIL, "command": [EVIL], "started": "x"}), encoding="utf-8")
    (run / "rank0.log").write_text(f"2026-01-01 00:00:00.000 ERROR    rank 0 | {EVIL}\n", encoding="utf-8")
    return report.build([run, make(tmp_path / "b")])


def test_nothing_in_a_run_gets_out_of_its_place(tmp_path: Path, verdict: None) -> None:
    text = hostile(tmp_path)
    page = Page(text)
    assert page.count("img") == 0
    assert [each for _, each in page.elements if "onerror" in each] == []
    executed = [each for tag, each in page.elements if tag == "script" and each.get("type") != "application/json"]
    assert len(executed) == 1
    assert "\x1b" not in text


def test_values_for_the_script_are_read_back_and_end_nothing() -> None:
    block = str(markup.data({EVIL: [1.5, None]}, class_="values"))
    assert block.count("</") == 1
    assert json.loads(block.split(">", 1)[1].rsplit("<", 1)[0]) == {EVIL: [1.5, None]}


def test_torn_empty_foreign_and_absurd_runs_give_a_page(tmp_path: Path) -> None:
    run = make(tmp_path / "odd", ranks=1)
    absurd: list[dict[str, Any]] = [
        {"loss": None, "loss_text": "nan"},
        {"loss": 10**400},
        {"wall": "<b>"},
        {"time": 1e308},
        {"lr": 1e300},
    ]
    lines = [json.dumps({**row, **more}) for row, more in zip(rows(9, start=30.0), absurd, strict=False)]
    lines += ['{"loss": NaN}', "[1]", json.dumps({"news": 1}), '{"epoch":0,"st']
    with (run / "rank0.jsonl").open("a") as file:
        file.write("\n".join(lines))
    put(
        run / "events0.jsonl",
        [event("gauges", cpu="much", cores=[None], rss=1e308), event("validation", accuracy=10**400)],
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "rank0.jsonl").touch()
    old = make(tmp_path / "old", batches=2, ranks=1)
    for name in ("config.yaml", "run.json", "events0.jsonl", "rank0.log"):
        (old / name).unlink()
    for runs in ([run], [empty], [old], [run, empty, old]):
        assert "Verdict" in Page(report.build(runs)).words
    (old / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json: can't be read"):
        report.build([old])
    with pytest.raises(UserError, match="holds no run"):
        report.build([tmp_path])


def test_a_long_run_is_thinned_without_losing_its_extremes(tmp_path: Path) -> None:
    x = np.arange(100_000.0)
    y = np.ones_like(x)
    y[[5, 77_777]] = [9.0, -3.0]
    line = report_data.thinned("loss", "run0", x, y)
    assert line.low is not None
    assert line.high is not None
    assert len(line.x) == len(line.y) == report_data.POINTS
    assert (line.low.min(), line.high.max()) == (-3.0, 9.0)
    assert np.isclose(np.median(line.y), 1.0)
    short, long = make(tmp_path / "short", 1000, 1), make(tmp_path / "long", 20_000, 1)
    assert len(report.build([long])) < 1.2 * len(report.build([short]))


def test_the_time_between_a_stop_and_its_resumption_is_cut_out(tmp_path: Path) -> None:
    run = make(tmp_path / "resumed", 40, 1)
    put(run / "rank0.jsonl", rows(40, start=9000.0))
    prepared = report_data.prepare(history.read(run), "resumed")
    assert prepared.seconds < 30
    assert np.diff(prepared.columns["time"]).max() < 1


def test_the_server_shows_one_page_to_this_machine_and_takes_nothing() -> None:
    with Server(0) as server:
        server.show("<p>hello")
        port = int(server.address.rstrip("/").rsplit(":", 1)[1])

        def ask(
            method: str = "GET", path: str = "/", host: str = f"localhost:{port}", **headers: str
        ) -> tuple[int, bytes, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.putrequest(method, path, skip_host=True)
            for key, value in {"Host": host, **headers}.items():
                connection.putheader(key.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

        status, body, headers = ask()
        assert (status, body) == (200, b"<p>hello")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert ask(If_None_Match=headers["ETag"])[:2] == (304, b"")
        assert ask(method="HEAD")[:2] == (200, b"")
        assert ask(host="[::1]:80")[0] == 200
        for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", ""):
            assert ask(host=host)[0] == 403, host
        assert ask(path="/run.json")[0] == 404
        assert ask(path="/../config.yaml")[0] == 404
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(method=method)[0] == 405, method
        with pytest.raises(UserError, match=f"--port {port}: can't be had"):
            Server(port)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if found() is None:
        pytest.skip("no Chromium or Chrome on this machine")
    with Chrome(tmp_path_factory.mktemp("chrome")) as opened:
        yield opened


def test_nothing_of_a_run_is_executed(tmp_path: Path, verdict: None, chrome: Chrome) -> None:
    report.write(hostile(tmp_path), tmp_path / "page.html")
    chrome.complaints.clear()
    chrome.open(f"file://{tmp_path}/page.html")
    assert chrome.run("typeof window.harm + document.images.length") == "undefined0"
    assert chrome.complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_browser_draws_every_chart_at_any_width(
    tmp_path: Path, verdict: None, chrome: Chrome, width: int, scheme: str
) -> None:
    run = make(tmp_path / "run")
    report.main([str(run)])
    chrome.complaints.clear()
    chrome.open(f"file://{run}/report.html", width, scheme)
    drawn = chrome.run(
        "[...document.querySelectorAll('figure')].filter(each => [...each.querySelectorAll('.plot svg')]"
        ".some(svg => svg.clientHeight > 50 && svg.querySelector('path[stroke^=var], path[fill^=var]'))).length"
    )
    assert drawn == chrome.run("document.querySelectorAll('figure').length") >= 9
    assert chrome.run("document.documentElement.scrollWidth") == width
    dark, colour = scheme == "dark", chrome.run("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, colour[4:-1].split(","))) < 60) == dark
    assert chrome.run("getComputedStyle(document.querySelector('svg path[stroke^=var]')).stroke").startswith("rgb(")
    heights = "[...document.querySelectorAll('.plot text')].map(each => each.getBoundingClientRect().height)"
    assert min(height for height in chrome.run(heights) if height) > 9
    assert chrome.complaints == []


def test_the_page_is_used_by_keyboard(tmp_path: Path, chrome: Chrome) -> None:
    run = make(tmp_path / "run")
    report.main([str(run)])
    chrome.open(f"file://{run}/report.html")
    chrome.press("Tab", 9)
    assert chrome.run("document.activeElement.className") == "skip"
    assert chrome.run("document.activeElement.getBoundingClientRect().left") >= 0
    for _ in range(40):
        chrome.press("Tab", 9)
        if chrome.run("document.activeElement.closest('#loss .stage') !== null"):
            break
    else:
        pytest.fail("the loss chart is not reached")
    assert chrome.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    value = "document.querySelector('#loss .value').textContent"
    last = chrome.run(value)
    chrome.press("Home", 36)
    first = chrome.run(value)
    chrome.press("End", 35)
    assert float(first) > float(chrome.run(value)) == float(last)
    assert chrome.run("document.querySelector('#speed .cursor').hidden") is False  # the charts share one cursor
    spoken = chrome.run("document.querySelector('[role=status]').textContent")
    assert spoken.startswith(chrome.run("document.querySelector('#loss .when').textContent") + ": training ")
    chrome.press("Escape", 27)
    assert chrome.run("document.querySelector('#speed .cursor').hidden") is True


SCROLLED = "document.querySelector('#facts-0').open = true; scrollTo(0, 700)"
KEPT = "document.querySelector('#facts-0').open && scrollY === 700"


def test_a_served_page_takes_in_what_is_new_where_it_stands(tmp_path: Path, chrome: Chrome) -> None:
    run = make(tmp_path / "run")
    with Server(0) as server:
        server.show(report.build([run], 0.2))
        chrome.complaints.clear()
        chrome.open(server.address)
        chrome.run(f"window.same = true; {SCROLLED}")
        put(run / "events0.jsonl", [event("validation", epoch=3, accuracy=0.98765)])
        server.show(report.build([run], 0.2))
        chrome.until("document.body.innerText.includes('0.9877')")
        assert chrome.run(f"window.same === true && {KEPT}")
        assert chrome.complaints == []


def test_a_watched_file_shows_what_is_new_and_rests_at_the_end(tmp_path: Path, chrome: Chrome) -> None:
    run = make(tmp_path / "run")
    command = [sys.executable, "-m", "fasttrain", "report", str(run), "--watch", "--every", "0.2"]
    with subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "kept up to date" in process.stdout.readline()
            chrome.until(lambda: (run / "report.html").exists())
            chrome.open(f"file://{run}/report.html")
            loaded = "document.readyState === 'complete'"
            chrome.until(f"{loaded} && (() => {{ {SCROLLED}; return true }})()")
            put(run / "events0.jsonl", [event("validation", epoch=3, accuracy=0.98765)])
            chrome.until(f"{loaded} && document.body.innerText.includes('0.9877') && {KEPT}")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "data-live" not in (run / "report.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in run.iterdir() if "report" in path.name) == ["report.html"]


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = make(tmp_path / "run", ranks=1)
    os.mkdir(run / "report.html")
    with pytest.raises(UserError, match=r"report\.html: can't be written .*--serve"):
        report.main([str(run)])
