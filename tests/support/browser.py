"""A headless Chromium without a network, driven over the DevTools protocol through two pipes: no
port, no package.

What a page says in the console, throws, and asks for is written down from its first line on.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_ARGUMENTS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-dev-shm-usage",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    *("--disable-default-apps", "--no-default-browser-check", "--mute-audio", "--hide-scrollbars"),
    *(
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--remote-debugging-pipe",
        "--force-color-profile=srgb",
    ),
)
_PATIENCE_S = 15.0
# What Chromium calls a key, where that is not its letter.
_KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Enter": 13, "Escape": 27, "Tab": 9}


def chromium() -> str:
    """The browser's path. Where there is none the test is skipped, but in CI it fails: .ci/run
    installs one."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    method = "there is no Chromium to open the page with; on Debian: apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(method)
    pytest.skip(method)


class Browser:
    """One process, which `close` ends."""

    def __init__(self, profile: Path) -> None:
        commands_out, commands_in = os.pipe()
        answers_out, answers_in = os.pipe()

        def take_places() -> None:  # it reads commands from descriptor 3 and answers on 4
            spare = [os.dup(number) for number in (commands_out, answers_in)]
            while min(spare) < 5:
                spare = [os.dup(number) for number in spare]
            for number, position in zip(spare, (3, 4), strict=True):
                os.dup2(number, position, inheritable=True)

        log = (profile.parent / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            [chromium(), *_ARGUMENTS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=take_places,
            close_fds=False,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        log.close()
        os.close(commands_out)
        os.close(answers_in)
        self._commands, self._answers = commands_in, answers_out
        self._rest, self._number = b"", 0
        self.pages: dict[str, Page] = {}

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Its answer; events that come before it go to their pages."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._next(deadline)
            if answer is None:
                raise TimeoutError(f"{method} has no answer after {_PATIENCE_S} s")
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """The next message, of which an event was also told to its page; None at the deadline."""
        while b"\0" not in self._rest:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._answers], [], [], remaining)[0]:
                return None
            got = os.read(self._answers, 1 << 20)
            if not got:
                raise RuntimeError(
                    "Chromium ended; its last words are in chromium.log beside the profile"
                )
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        page = self.pages.get(message.get("sessionId", ""))
        if page and "method" in message:
            page.hear(message["method"], message["params"])
        return message

    @contextmanager
    def open(
        self, file: Path, fragment: str = "", *, width: int = 1280, dark: bool = False
    ) -> Iterator[Page]:
        """A new tab that shows a file, as soon as its first view is there."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.call(
                "Network.emulateNetworkConditions",
                offline=True,
                latency=0,
                downloadThroughput=0,
                uploadThroughput=0,
            )
            page.resize(width)
            page.theme(dark)
            page.call("Page.navigate", url=file.resolve().as_uri() + fragment)
            page.wait("document.documentElement?.dataset.ready")
            yield page
        finally:
            del self.pages[session]
            self.call("Target.closeTarget", targetId=target)


class Page:
    """A tab. `errors`: what the console, exceptions and refused loads said; `requests`: what it
    asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def hear(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.errors.append(
                str(details.get("exception", {}).get("description", details["text"]))
            )
        elif method == "Runtime.consoleAPICalled" and event["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(
                "console: "
                f"{[single.get('value', single.get('description')) for single in event['args']]}"
            )
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"log: {event['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"][:200])

    def value(self, expression: str) -> Any:
        """Of JavaScript, a promise's too, as JSON has it."""
        message = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in message:
            details = message["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return message["result"].get("value")

    def wait(self, expression: str, seconds: float = _PATIENCE_S) -> Any:
        """The first value of `expression` that is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so after {seconds} s: {expression}; errors: {self.errors}")
            time.sleep(0.02)
        return value

    def go(self, fragment: str) -> None:
        """To another place of the page, whose view is there on return."""
        self.value(f"location.hash = {json.dumps(fragment)}")
        self.settle()

    def settle(self) -> None:
        self.wait("document.documentElement?.dataset.ready === (location.hash || '#')")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def each(self, selector: str, expression: str) -> list[Any]:
        """Of every element `e` the value of an expression."""
        result: list[Any] = self.value(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => {expression})"
        )
        return result

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the first such element, from the window's corner."""
        [box, *_] = self.each(
            selector,
            "(({left, top, right, bottom}) => [left, top, right, "
            "bottom])(e.getBoundingClientRect())",
        )
        return tuple(box)

    def click(self, selector: str, number: int = 0, *, x: float = 0.5, y: float = 0.5) -> None:
        """By the mouse, at a place of the element: what lies over it gets the click."""
        rect = self.value(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            " e.scrollIntoView({block: 'center', inline: 'center'});"
            " const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; })()"
        )
        self.press_at(rect[0] + x * rect[2], rect[1] + y * rect[3])

    def press_at(self, x: float, y: float) -> None:
        at = {"x": x, "y": y}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        def send(kind: str, at: tuple[float, float], **more: Any) -> None:
            self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **more)

        send("mouseMoved", start)
        send("mousePressed", start, button="left", clickCount=1)
        for piece in (0.3, 0.7, 1.0):
            at = (start[0] + piece * (end[0] - start[0]), start[1] + piece * (end[1] - start[1]))
            send("mouseMoved", at, button="left", buttons=1)
        send("mouseReleased", end, button="left", clickCount=1)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = _KEYS.get(key, ord(key[0].upper()))
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def theme(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, out: Path, *, full: bool = False) -> None:
        clip = {}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {
                "clip": {
                    "x": 0,
                    "y": 0,
                    "scale": 1,
                    "width": size["width"],
                    "height": min(size["height"], 6000),
                }
            }
        image = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=full, **clip
        )
        out.write_bytes(base64.b64decode(image["data"]))
