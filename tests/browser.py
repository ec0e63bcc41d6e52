"""Opens a page in a real headless browser and hands back what it made of it."""

from __future__ import annotations

import dataclasses
import html.parser
import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]


def browser() -> str:
    """The browser's path; a test without one is skipped."""
    named = os.environ.get("STRANDLINE_BROWSER")
    found = named or next((path for path in map(shutil.which, NAMES) if path), None)
    if not found:
        pytest.skip("no Chromium was found (apt install chromium, or name one in STRANDLINE_BROWSER)")
    return found


@dataclasses.dataclass
class Node:
    """An element of the page after its scripts ran."""

    tag: str
    attributes: dict
    text: str = ""
    inner: list = dataclasses.field(default_factory=list)

    def all(self, tag: str | None = None, **attributes):
        """Descendants with this tag and these attributes; `cls` means one of the classes."""
        wanted = attributes.pop("cls", None)
        found = []
        for node in self.inner:
            classes = (node.attributes.get("class") or "").split()
            if (
                (tag is None or node.tag == tag)
                and (wanted is None or wanted in classes)
                and all(node.attributes.get(k.replace("_", "-")) == v for k, v in attributes.items())
            ):
                found.append(node)
            found.extend(node.all(tag, **attributes, **({"cls": wanted} if wanted else {})))
        return found

    def one(self, tag: str | None = None, **attributes) -> Node:
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def words(self) -> str:
        return " ".join((self.text + " " + " ".join(node.words for node in self.inner)).split())


class _Parser(html.parser.HTMLParser):
    VOID = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self):
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        node = Node(tag, dict(attrs))
        self.open[-1].inner.append(node)
        if tag not in self.VOID:
            self.open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].inner.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag):
        for at in range(len(self.open) - 1, 0, -1):
            if self.open[at].tag == tag:
                del self.open[at:]
                return

    def handle_data(self, data):
        # Text in the order in which it is read, also between elements.
        self.open[-1].inner.append(Node("#text", {}, data))


def render(page: pathlib.Path, after: str = "", width: int = 1200) -> Node:
    """The page's elements once its scripts, and then `after`, have run. Nothing may have gone wrong."""
    with tempfile.TemporaryDirectory() as profile:
        shown = page
        if after:
            shown = pathlib.Path(profile) / "page.html"
            text = page.read_text()
            assert text.count("</body>") == 1
            shown.write_text(text.replace("</body>", f"<script>{after}</script></body>"))
        done = subprocess.run(
            [
                browser(),
                *QUIET,
                f"--user-data-dir={profile}/profile",
                f"--window-size={width},2000",
                "--virtual-time-budget=5000",
                "--dump-dom",
                shown.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    parser = _Parser()
    parser.feed(done.stdout)
    root = parser.root.one("html")
    assert root.attributes.get("data-error") is None, root.attributes
    assert root.attributes["data-rendered"] == "yes"
    return root
