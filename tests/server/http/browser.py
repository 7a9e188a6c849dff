"""Headless browser, driven over a pipe by the Chrome DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_SECONDS = 180
# The browser reads from descriptor 3 and writes to 4.
LAUNCH = """
import fcntl, os, sys
own, their = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 9) for each in sys.argv[1:3])
os.dup2(own, 3)
os.dup2(their, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """A page that is open.

    `complaints` are the errors that its scripts did not catch, and what it was forbidden.
    """

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out, self._rest, self._count = into, out, b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **value: Any) -> dict[str, Any]:
        """Have the browser do something, and what it says of it."""
        self._count += 1
        result: dict[str, Any] = {"id": self._count, "method": method, "params": value}
        if self._session is not None:
            result["sessionId"] = self._session
        os.write(self._into, json.dumps(result).encode() + b"\0")
        while True:
            heard = self._heard()
            if heard.get("id") == result["id"]:
                assert "error" not in heard, heard
                return heard["result"]
            self._note(heard)

    def open(self, url: str) -> None:
        """Go there, and wait until it is drawn."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Value of an expression in the page."""
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true; what it comes to."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while not (found := self.run(script)):
            assert time.monotonic() < ends, (
                f"{script} is not so: {self.run('document.body.innerText')}"
            )
            time.sleep(0.05)
        return found

    def size(self, width: int, height: int) -> None:
        """Be a screen of so many pixels."""
        result = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **result)

    def dark(self, scheme: str) -> None:
        """Be one that prefers `dark` or `light`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def picture(self) -> bytes:
        """Screenshot, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def _heard(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], PATIENCE_SECONDS)
            assert ready, "the browser says nothing any more"
            data = os.read(self._out, 1 << 16)
            assert data, "the browser has gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, heard: dict[str, Any]) -> None:
        if heard.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(heard["params"]["exceptionDetails"]))
        if heard.get("method") == "Log.entryAdded":
            entry = heard["params"]["entry"]
            if entry["level"] == "error":
                self.complaints.append(entry["text"])


@contextmanager
def browser(home: Path) -> Iterator[Page]:
    """A page in a browser whose files lie in a folder."""
    assert CHROMIUM is not None
    own, into = os.pipe()
    out, their = os.pipe()
    result = [CHROMIUM, *OPTIONS, f"--user-data-dir={home}"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(own), str(their), *result],
        pass_fds=(own, their),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(own)
    os.close(their)
    try:
        yield Page(into, out)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(into)
        os.close(out)
