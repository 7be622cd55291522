"""Pages in a real Chromium, as far as one is installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

_CONSOLE = re.compile(r":(?:INFO|WARNING|ERROR):CONSOLE[:(]\d+\)?\] (.*)")


def browser() -> str:
    """A Chromium, or the test is skipped."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium: the page is not looked at in a browser")


def opened(page: Path, folder: Path, *options: str, part: str = "") -> tuple[str, list[str]]:
    """The document at `page` as Chromium builds it, its scripts run, and what they wrote to the console.

    `folder` is for the browser's profile, `part` what follows # in the address.
    """
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=5000",
        "--enable-logging=stderr", *options, "--dump-dom", page.as_uri() + (f"#{part}" if part else ""),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, _CONSOLE.findall(done.stderr)


def asked(page: Path, folder: Path, script: str, width: int = 1440, part: str = "") -> Any:
    """What `script`, the body of a function, returns in the loaded page, in a frame of this width. Console output is an error.

    A frame, because a window of Chromium is not as narrow as a phone. It tells its parent by a message: files are strangers.
    """
    copy = page.with_name(f"asked-{page.name}")
    tell = f"(() => {{ {script} }})()"
    copy.write_text(
        page.read_text()
        + f"<script>addEventListener('load', () => setTimeout(() => parent.postMessage(JSON.stringify({tell}), '*')))</script>"
    )
    outer = page.with_name(f"outer-{page.name}")
    outer.write_text(
        f'<pre></pre><iframe style="width:{width}px;height:900px;border:0" src="{copy.name}#{part}"></iframe>'
        "<script>onmessage = told => document.querySelector('pre').textContent = encodeURIComponent(told.data)</script>"
    )
    text, console = opened(outer, folder, "--window-size=1600,1000")
    assert not console, console
    found = re.search(r"<pre>(.+?)</pre>", text)
    assert found, "the script in the page returned nothing"
    return json.loads(unquote(found[1]))
