"""A headless Chromium for the tests of pages: opened, looked at, and typed into over the browser's debugging pipe."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds for an answer: a hang becomes a failure


BETWEEN = -32000  # the code of the answer that a page gave way to another


class BetweenPages(Exception):
    """There is no page at the moment."""


def found() -> str | None:
    """The browser's path, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    """Two ends of a pipe, numbered from 10 on."""
    ends = os.pipe()
    high = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 10)
    for end in ends:
        os.close(end)
    return high


class Chrome:
    """One browser with one page. Everything that it complains of in the console is kept in `complaints`."""

    def __init__(self, home: Path) -> None:
        path = found()
        assert path is not None
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        arguments = [path, *flags, f"--user-data-dir={home}", "--remote-debugging-pipe", "about:blank"]
        reads, self._out = _pipe()
        self._in, writes = _pipe()
        quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        # 3 and 4 are where --remote-debugging-pipe expects them.
        pipes = [(os.POSIX_SPAWN_DUP2, reads, 3), (os.POSIX_SPAWN_DUP2, writes, 4)]
        self._pid = os.posix_spawn(path, arguments, os.environ, file_actions=[*quiet, *pipes])
        os.close(reads)
        os.close(writes)
        self._number, self._buffer, self._session = 0, b"", ""
        self.complaints: list[str] = []
        self.loads = 0
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        """One command of the debugging protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        if answer.get("error", {}).get("code") == BETWEEN:
            raise BetweenPages(answer["error"]["message"])
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, address: str, width: int = 1280, scheme: str = "light") -> None:
        """Open a page and wait until it is loaded."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        before = self.loads
        self.ask("Page.navigate", url=address)
        self.until(lambda: self.loads > before)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def until(self, true: Any) -> None:
        """Wait until it is so, or what the page says in answer to a script is."""
        end = time.monotonic() + PATIENCE
        while not self._is(true):
            assert time.monotonic() < end, true
            self.ask("Browser.getVersion")
            time.sleep(0.05)

    def _is(self, true: Any) -> bool:
        try:
            return bool(self.run(true) if isinstance(true, str) else true())
        except BetweenPages:
            return False

    def close(self) -> None:
        self._session = ""
        self.ask("Browser.close")
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)

    def __enter__(self) -> Chrome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loads += 1
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(parameters["entry"]["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
