"""A real browser for tests: Chromium without a window, driven over its DevTools pipe with the standard library alone.

`Browser` opens one tab; `goto`, `evaluate`, `hover`, `size`, `dark`, `shot` act on it; `complaints` has every message
of its console that is a warning or worse, every exception, and every request for anything but the page itself.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


def found() -> str | None:
    """The path of a Chromium: `GRUPPETTO_CHROMIUM`, or one on the path, or None."""
    return os.environ.get("GRUPPETTO_CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with a profile of its own, gone when the block ends. Every answer has `deadline_s` to come."""

    def __init__(self, deadline_s: float = 200.0) -> None:
        self.complaints: list[str] = []
        self._deadline_s, self._last, self._rest = deadline_s, 0, b""
        self._profile = tempfile.mkdtemp(prefix="gruppetto-chromium-")

    def __enter__(self) -> Browser:
        path = found()
        assert path is not None, "no Chromium"
        (low_read, self._to), (self._from, low_write) = os.pipe(), os.pipe()
        # Chromium reads commands on 3 and answers on 4; a shell puts the pipes there, so they must not lie there now.
        read, write = (fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 20) for pipe in (low_read, low_write))
        run = f'exec "$0" "$@" 3<&{read} 4>&{write} {read}<&- {write}>&-'
        command = ["bash", "-c", run, path, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pipe in (low_read, low_write, read, write):
            os.close(pipe)
        self._session: str | None = None
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._to, self._from):
            os.close(pipe)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    # -- what a test does ----------------------------------------------------------------------------------------------

    def goto(self, page: Path) -> None:
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + self._deadline_s
        while not self.evaluate("document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < deadline, f"{page} does not load"
            time.sleep(0.02)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; what it throws fails the test."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def size(self, width: int, height: int = 900, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def shot(self, path: Path, whole: bool = True) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    # -- the pipe ------------------------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._deadline_s
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, f"Chromium ended with {self._process.poll()}"
            self._rest += part
        whole, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(whole)
        return answer

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {[one.get('value') for one in params['args']]}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.complaints.append(f"request: {url}")
