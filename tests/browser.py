"""Pages in a real Chromium, as far as one is installed: one process for all tests, and one window, in which a page follows another.

A window of its own, with its process, would cost more than to load the page. What a page could leave to the next one ends with it:
the pages store nothing, and window and medium are set anew.
"""

import atexit
import base64
import contextlib
import functools
import io
import itertools
import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

SECONDS = 60  # that an answer may take
# poor() is what text of a page has less than 4.5:1 to its ground, and what marks less than 3:1 (WCAG 2.1, 1.4.3 and 1.4.11), by mode
CONTRAST = """
    const every = (selector, from = document) => [...from.querySelectorAll(selector)];
    const lum = text => { const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(one => one / 255).map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const contrast = (a, b) => { const [low, high] = [lum(a), lum(b)].sort((x, y) => x - y); return (high + 0.05) / (low + 0.05); };
    const ground = element => { for (let e = element; e; e = e.parentElement) { const found = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(found)) return found; } return "rgb(255, 255, 255)"; };
    const said = e => e.outerHTML.slice(0, 80), ink = e => getComputedStyle(e).fill === "none" ? getComputedStyle(e).color : getComputedStyle(e).fill, paper = e => ground(e.closest("svg").parentElement);
    const shown = selector => every(selector).filter(e => e.checkVisibility());
    const poorly = () => ({
        texts: shown("body *").filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && !e.closest("svg, script, style, option, select")).filter(e => contrast(getComputedStyle(e).color, ground(e)) < 4.5).map(said),
        fields: [...shown("input, select").filter(e => contrast(getComputedStyle(e).color, ground(e)) < 4.5), ...shown("input[placeholder]").filter(e => contrast(getComputedStyle(e, "::placeholder").color, ground(e)) < 4.5)].map(said),
        words: shown("svg text, svg tspan").filter(e => e.textContent.trim() && !e.closest("[aria-label=text]")).filter(e => contrast(ink(e), paper(e)) < 4.5).map(said),
        marks: shown("[aria-label=dot] path, [aria-label=bar] rect, [aria-label=cell] rect, .strip circle, .picture-small circle").filter(e => Math.max(...["fill", "stroke"].map(name => getComputedStyle(e)[name]).filter(one => one !== "none").map(one => contrast(one, paper(e)))) < 3).map(said),
    });
    const poor = () => Object.fromEntries(["light", "dark"].map(mode => { document.documentElement.style.colorScheme = mode; return [mode, poorly()]; }));
"""
GOOD = {mode: {"texts": [], "fields": [], "words": [], "marks": []} for mode in ("light", "dark")}
_SETTLED = """(async () => { if (typeof unpacked !== "undefined") await unpacked; return new Promise(done => requestAnimationFrame(() => setTimeout(done))); })()"""  # what loading has put off is done


def browser() -> str:
    """A Chromium, or the test is skipped."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium: the page is not looked at in a browser")


class Chromium:
    """A process that answers requests of the DevTools protocol, which are JSON texts, each ended by a NUL. It ends when nobody can ask it
    any more."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="mrb-", ignore_cleanup_errors=True)
        self._numbers, self._received = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        self.idle: list[str] = []  # sessions of windows that show no page
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(SECONDS)
        with theirs:
            number = theirs.fileno()
            take = f'exec "$0" "$@" 3<&{number} 4>&{number}'  # where it expects requests, and writes answers
            command = [
                "bash",
                "-c",
                take,
                browser(),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-features=BackForwardCache",  # a page that has been left is gone
                "--remote-debugging-pipe",
            ]
            self._process = subprocess.Popen(
                [*command, f"--user-data-dir={self._profile.name}"],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a request, to the browser itself or to the page of a session; AssertionError where it is refused."""
        number = next(self._numbers)
        request = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self._connection.sendall(json.dumps(request).encode() + b"\0")
        answer = self.until(lambda message: message.get("id") == number)
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next message that is wanted; what comes before it is kept in `events`."""
        while True:
            while b"\0" not in self._received:
                part = self._connection.recv(1 << 20)
                assert part, "Chromium has ended"
                self._received += part
            text, _, self._received = self._received.partition(b"\0")
            message = json.loads(text)
            self.events.append(message)
            if wanted(message):
                return message

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._profile.cleanup()


@functools.cache
def chromium() -> Chromium:
    """The process of this session, which its first page starts."""
    started = Chromium()
    atexit.register(started.close)
    return started


@dataclass(frozen=True)
class Loaded:
    """A page whose scripts have run."""

    session: str

    def value(self, expression: str) -> Any:
        """What an expression is in the page, or what its promise comes to; AssertionError with what it throws."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        found = chromium().ask("Runtime.evaluate", self.session, **asked)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def pixels(self, left: float, top: float, width: float, height: float) -> Any:
        """What a part of the window looks like, as an array (rows, columns, colours) of 0 to 1."""
        x, y = self.value("[scrollX, scrollY]")
        clip = {"x": x + left, "y": y + top, "width": width, "height": height, "scale": 1}
        shot = chromium().ask("Page.captureScreenshot", self.session, format="png", clip=clip)
        return matplotlib.image.imread(io.BytesIO(base64.b64decode(shot["data"])))

    def console(self) -> list[str]:
        """What the page has written to the console, errors that nobody caught included."""
        found = []
        for event in chromium().events:
            parameters = event.get("params", {})
            match event.get("method"):
                case "Runtime.consoleAPICalled":
                    found.append(" ".join(str(one.get("value", one.get("description"))) for one in parameters["args"]))
                case "Runtime.exceptionThrown":
                    thrown = parameters["exceptionDetails"]
                    found.append(thrown.get("exception", {}).get("description") or thrown["text"])
                case "Log.entryAdded":
                    found.append(parameters["entry"]["text"])
        return found

    def resize(self, width: int) -> None:
        """Make the window this wide, and wait until the page is laid out anew."""
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        chromium().ask("Emulation.setDeviceMetricsOverride", self.session, **window)
        self.value(_SETTLED)


def _window() -> str:
    """The session of a window that shows no page."""
    process = chromium()
    if process.idle:
        return process.idle.pop()
    target = process.ask("Target.createTarget", url="about:blank")["targetId"]
    session = process.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log"):
        process.ask(f"{domain}.enable", session)
    return session


def _go(session: str, address: str) -> None:
    """Load what is at an address."""
    process = chromium()
    process.events.clear()

    def arrived(message: dict[str, Any]) -> bool:
        return message.get("method") == "Page.loadEventFired" and message.get("sessionId") == session

    process.ask("Page.navigate", session, url=address)
    if not any(map(arrived, process.events)):
        process.until(arrived)


@contextlib.contextmanager
def loaded(page: Path, part: str = "", width: int = 1440, slower: int = 1) -> Iterator[Loaded]:
    """A page in a window of this width; `part` is what follows # in the address, `slower` how many times as long its scripts take. The window of a test that fails is not used again."""
    shown = Loaded(_window())
    chromium().ask("Emulation.setEmulatedMedia", shown.session, media="")
    chromium().ask("Emulation.setCPUThrottlingRate", shown.session, rate=slower)
    shown.resize(width)
    _go(shown.session, page.as_uri() + (f"#{part}" if part else ""))
    shown.value(_SETTLED)
    yield shown
    _go(shown.session, "about:blank")  # else another part of the same page would not be loaded, but scrolled to
    chromium().idle.append(shown.session)


def opened(page: Path) -> tuple[str, list[str]]:
    """The document at `page` as Chromium builds it, its scripts run, and what they wrote to the console."""
    with loaded(page) as shown:
        return shown.value("document.documentElement.outerHTML"), shown.console()


def asked(page: Path, script: str, width: int = 1440, part: str = "") -> Any:
    """What `script`, the body of a function, returns in the loaded page, in a window of this width. Console output is an error."""
    with loaded(page, part, width) as shown:
        text = shown.value(f"JSON.stringify((() => {{ {script} }})())")
        console = shown.console()
    assert not console, console
    assert text, "the script in the page returned nothing"
    return json.loads(text)
