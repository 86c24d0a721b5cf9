"""A headless Chromium, driven over its DevTools protocol through a pair of pipes: no port, no
library.

Messages are JSON, each ended by a zero byte; see
https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_PATIENCE = 60.0  # seconds, for a machine that has other work
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def require() -> str:
    """The browser's path. Skips the test where there is none, and fails where
    LOCKSTEP_REQUIRE_BROWSER=1 says there must be one.
    """
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        message = f"no browser ({', '.join(_NAMES)}): apt-get install chromium"
        (pytest.fail if os.environ.get("LOCKSTEP_REQUIRE_BROWSER") == "1" else pytest.skip)(message)
    return str(found)


class Page:
    """One tab. `complaints`: what its console says; `requests`: the addresses that it asked for."""

    def __init__(self, out: int, back: int) -> None:
        self._out, self._back, self._rest = out, back, b""
        self._number = 0
        self._session: str | None = None
        self._events: list[Mapping[str, Any]] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def open(self, file: Path, *, width: int, dark: bool = False, media: str = "screen") -> None:
        """Load `file` in a window `width` pixels wide, and wait until it is there."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._events.clear()
        self.send("Page.navigate", url=file.as_uri())
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self._events))

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression on the page."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def send(self, method: str, **parameters: Any) -> Any:
        """One command, and its answer."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answers: list[Mapping[str, Any]] = []
        self._until(
            lambda: bool(answers),
            lambda each: answers.append(each) if each.get("id") == number else None,
        )
        assert "result" in answers[0], answers[0]
        return answers[0]["result"]

    def _until(
        self,
        done: Callable[[], bool],
        look: Callable[[Mapping[str, Any]], object] = lambda each: None,
    ) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not done():
            for message in self._read(deadline):
                look(message)
                self._note(message)

    def _read(self, deadline: float) -> Iterator[Mapping[str, Any]]:
        ready, _, _ = select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(self._back, 2**16) if ready else b""
        assert chunk, "the browser says nothing"
        *whole, self._rest = (self._rest + chunk).split(b"\0")
        yield from map(json.loads, whole)

    def _note(self, message: Mapping[str, Any]) -> None:
        method, what = message.get("method"), message.get("params", {})
        if method is None:
            return
        self._events.append(message)
        if method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(what))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a browser of its own, which keeps its files in `profile` and is gone afterwards."""
    theirs, ours = os.pipe(), os.pipe()
    os.set_inheritable(theirs[0], True)
    os.set_inheritable(ours[1], True)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        " --disable-background-networking --remote-debugging-pipe"
    )
    shell = f'exec 3<&{theirs[0]} 4>&{ours[1]}; exec "$0" "$@"'  # the protocol's file descriptors
    words = [
        "bash",
        "-c",
        shell,
        require(),
        *flags.split(),
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    process = subprocess.Popen(
        words,
        pass_fds=(theirs[0], ours[1]),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs[0])
    os.close(ours[1])
    try:
        yield Page(theirs[1], ours[0])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(theirs[1])
        os.close(ours[0])
