"""The page at `/`."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import httpx2
import pytest

from larder.server.request import Turn
from larder.server.tenants import LOCAL, Loopback
from server.fake_hub import NAME
from server.web.places import Running, running

SCRIPTS = ("talk.js", "map.js", "page.js")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def asset(name: str) -> str:
    return files("larder.server.page").joinpath(name).read_text(encoding="utf-8")


def test_the_page_needs_nothing_but_this_server(served: Running) -> None:
    reply = httpx2.get(served.url)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    asked = set(re.findall(r'(?:src|href)="([^"]+)"', reply.text)) - {"data:,"}
    assert asked == {"page.css", *SCRIPTS}
    for name in asked:
        assert httpx2.get(f"{served.url}/{name}").headers["content-type"].startswith("text/")
    assert "://" not in "".join(map(asset, SCRIPTS))


def test_scripts_find_what_they_look_for() -> None:
    there = set(re.findall(r'id="(\w+)"', asset("page.html")))
    wanted = set(re.findall(r'find\("(\w+)"\)', "".join(map(asset, SCRIPTS))))
    assert wanted and wanted <= there


def test_texts_reach_the_page_as_text() -> None:
    scripts = "".join(map(asset, SCRIPTS))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", scripts)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_browser_shows_what_is_kept(tmp_path: Path) -> None:
    with running(Loopback()) as served:
        said = [Turn("user", "How long?"), Turn("assistant", "<b>Two</b> days.")]
        served.hub.held[LOCAL, "about bread"] = said
        dom = browse(f"{served.url}/#about%20bread", tmp_path)
    assert NAME in dom
    assert 'aria-current="true">about bread<small>8 tokens, idle</small>' in dom
    assert "device 1.0 MiB, disk 3.0 MiB" in dom
    assert "75% of 8 positions over 4 heads" in dom
    assert "&lt;b&gt;Two&lt;/b&gt; days." in dom
    assert "layer 2, head 1: 4 of 8 positions" in dom
    assert '<p id="trouble" role="alert" hidden="">' in dom


def browse(url: str, home: Path) -> str:
    """The page's elements after its scripts have run for a while."""
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}")
    waiting = ("--virtual-time-budget=4000", "--dump-dom")
    done = subprocess.run(
        [CHROMIUM, *options, *waiting, url], capture_output=True, text=True, timeout=90, check=True
    )
    return done.stdout
