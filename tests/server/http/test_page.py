"""Web page at `/`: assets, scripts, and a chat in a browser."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import httpx2
import pytest

from larder import Engine
from larder.models import LoadedModel
from larder.server import (
    LOCAL,
    ApiKeyAuth,
    Archive,
    ChatMessage,
    EngineOptions,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    Principal,
    create_app,
)
from larder.server.http import middleware
from larder.store import ByteBudgets, Tier
from server.fake_engine_client import NAME
from server.http.browser import CHROMIUM, browser
from server.http.running_server import Running, listening, running

BAR = "document.querySelector('#sessions .bar i').style.getPropertyValue('--s')"
GAP = "find('took').getBoundingClientRect().top - find('say').getBoundingClientRect().bottom"
SCRIPTS = tuple(f"{name}.js" for name in middleware.SCRIPTS)


def asset(name: str) -> str:
    return files("larder.server.page").joinpath(name).read_text(encoding="utf-8")


def test_page_loads_assets_of_this_server_only(served: Running) -> None:
    reply = httpx2.get(served.url)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    asked = set(re.findall(r'(?:src|href)="([^"]+)"', reply.text)) - {"data:,"}
    assert asked == {"page.css", *SCRIPTS}
    for name in asked:
        assert httpx2.get(f"{served.url}/{name}").headers["content-type"].startswith("text/")
    assert "://" not in "".join(map(asset, SCRIPTS))


def test_element_ids_used_by_scripts_exist() -> None:
    there = set(re.findall(r'id="(\w+)"', asset("page.html")))
    wanted = set(re.findall(r'find\("(\w+)"\)', "".join(map(asset, SCRIPTS))))
    assert wanted and wanted <= there


def test_scripts_never_insert_html() -> None:
    scripts = "".join(map(asset, SCRIPTS))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", scripts)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_browser_shows_kept_entries_of_a_session(tmp_path: Path) -> None:
    with running(LoopbackAuth()) as served, browser(tmp_path) as page:
        messages = [ChatMessage("user", "How long?"), ChatMessage("assistant", "<b>Two</b> days.")]
        served.hub.held[LOCAL, "about bread"] = messages
        page.open(f"{served.url}/#about%20bread")
        page.until("state.kept")
        text = page.run("document.body.innerText")
        for shown in (NAME, "about bread", "8 tokens", "device 1.0 MiB, disk 3.0 MiB", "75%"):
            assert shown in text
        assert "6 of 8 entries per head" in text
        assert page.run(BAR) == "0.75", "held entries against the budget"
        assert page.run("find('size').textContent") == "1.0 MiB", "memory alone, not the store"
        assert "10 B of 40 B" in text and "8 entries per head were" not in text
        assert page.run("find('sessions').querySelector('[aria-current=true]') !== null")
        assert page.run("find('heads').rows[2].cells[1].title") == (
            "layer 1, head 0: 4 of 8 positions"
        )
        turns = page.run("[...find('turns').querySelectorAll('p')].map((each) => each.innerText)")
        assert turns == ["How long?", "<b>Two</b> days."]
        held = page.run("[...find('turns').querySelectorAll('i')].map((each) => each.title)")
        assert held == [f"held by {heads} of 4 heads" for heads in (4, 2, 2, 4)]
        assert page.run("find('trouble').hidden") and not page.complaints
        page.size(390, 844)
        shadow = 12.8  # pixels below the form, which would cover what the answer took
        assert page.run(GAP) >= shadow
        page.run("say('refuse overloaded 503')")
        assert page.until("find('said').textContent").startswith("Refused")
        assert page.run("state.speaking === null && find('text').value") == "refuse overloaded 503"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_browser_chat_shows_kept_entries(tmp_path: Path, seed_model: LoadedModel) -> None:
    engine = Engine(seed_model, policy="keydiff", budget="96")
    hub = LocalEngineClient(engine, EngineOptions(ByteBudgets({Tier.DEVICE: 8 << 20})))
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=8))
    with listening(app) as url, browser(tmp_path) as page:
        page.open(url)
        page.until("state.model")
        for text in (
            "My cat is called Mira. " + "We had bread and plums. " * 40,
            "What is my cat called?",
        ):
            page.run(f"find('text').value = {text!r}; find('say').requestSubmit()")
            page.until("state.speaking === null && state.epoch === known()?.epoch")
        assert page.run("find('turns').children.length") == 4
        share = page.run("find('share').textContent")
        assert 0 < int(share.removesuffix("%")) < 100
        assert page.run("find('heads').rows.length") == 7
        assert "96 of 96 entries per head" in page.run("find('sessions').innerText")
        assert page.run(BAR) == "1"
        assert page.run("find('turns').querySelectorAll('i:not(.kept)').length") > 0
        assert (
            page.run("new Set([...find('turns').querySelectorAll('i')].map((e) => e.title)).size")
            > 2
        )
        page.run("act('fork')")
        page.until("state.sessions.length === 2 && state.epoch >= 0")
        page.run("choose(null)")
        assert page.until("!find('blank').hidden && find('sessions').children.length === 2")
        assert not page.complaints


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_page_asks_for_a_key_and_then_shows_the_chat(tmp_path: Path) -> None:
    keys = {"sk-anne-0123456789": Principal("anne", is_operator=False)}
    with running(ApiKeyAuth(keys)) as served, browser(tmp_path) as page:
        page.open(served.url)
        page.until("!find('door').hidden && find('room').hidden")
        page.run("find('key').value = 'sk-anne-0123456789'; find('door').requestSubmit()")
        page.until("!find('room').hidden && state.model && !state.isOperator")
        page.run("say('hello')")
        page.until("state.speaking === null && state.turns.length === 2")
        assert page.run("find('turns').innerText").strip().endswith("You said: hello")


WRONG = "sk-nobody-0123456789"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_page_refuses_a_wrong_key_and_asks_again(tmp_path: Path) -> None:
    keys = {"sk-anne-0123456789": Principal("anne", is_operator=False)}
    with running(ApiKeyAuth(keys)) as served, browser(tmp_path) as page:
        page.open(served.url)
        page.until("!find('door').hidden")
        assert page.run("find('trouble').hidden"), "nobody has given a key yet"
        page.run(f"find('key').value = {WRONG!r}; find('door').requestSubmit()")
        page.until("sessionStorage.getItem(KEY) !== null && !find('trouble').hidden")
        assert page.until("!find('door').hidden && find('room').hidden && find('key').value === ''")
        assert page.run("find('said').textContent") == "The server does not know this key."
        assert page.run("document.activeElement === find('key')")
        page.run("find('key').value = 'sk-anne-0123456789'; find('door').requestSubmit()")
        page.until("find('door').hidden && find('trouble').hidden && state.model")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_stop_button_ends_the_answer_and_gives_the_text_back(
    tmp_path: Path, seed_model: LoadedModel
) -> None:
    hub = LocalEngineClient(Engine(seed_model, policy="full"), EngineOptions())
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=4000))
    with listening(app) as url, browser(tmp_path) as page:
        page.open(url)
        page.until("state.model")
        page.run("find('text').value = 'Tell me a long story.'; find('say').requestSubmit()")
        assert page.until("!find('stop').hidden && find('send').hidden")
        page.until("state.turns.at(-1)?.text.length > 0")
        assert page.run("[...find('actions').children].every((each) => each.disabled)")
        page.run("find('stop').click()")
        page.until("state.speaking === null && find('stop').hidden && !find('send').hidden")
        assert page.run("find('text').value") == "Tell me a long story."
        assert page.run("find('turns').children.length === 0 && find('trouble').hidden")
        page.until("state.sessions.length === 0")
        page.run("look(true)")
        assert page.run("find('trouble').hidden && find('maps').hidden && location.hash === ''")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_page_says_what_became_of_a_cache(tmp_path: Path, seed_model: LoadedModel) -> None:
    hub = LocalEngineClient(Engine(seed_model, policy="full"), EngineOptions())
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=4))
    with listening(app) as url, browser(tmp_path) as page:
        page.open(url)
        page.until("state.model")
        page.run("find('text').value = 'My cat is Mira.'; find('say').requestSubmit()")
        page.until("state.speaking === null && state.epoch === known()?.epoch")
        press = "find('actions').querySelector('[data-act=%s]').click()"
        page.run(press % "compact")
        page.until("find('took').textContent.startsWith('Its cache is on the device, without')")
        page.run(press % "release")
        page.until("find('took').textContent === '' && find('sessions').innerText.includes('only')")
        for name in ("prefetch", "compact"):
            page.run("find('took').textContent = ''")
            page.run(press % name)
            page.until("find('took').textContent.startsWith('There is no cache')")
        assert not page.complaints
