"""Valid session names, at every endpoint and in the store."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from larder.core import InputError, branch_name, check_session_name, root_name
from larder.models import LoadedModel
from larder.server import (
    LOCAL,
    Archive,
    ChatMessage,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    create_app,
)
from larder.session import chat_log_path
from larder.store import SessionTurn as Written
from server.http.running_server import listening
from server_engine_clients import hub_in

PERSIAN = "می‌خواهم"
ALLOWED = (
    "👩‍💻 notes",
    PERSIAN,
    "山田　太郎",
    "❤️‍🔥",
    "1️⃣ first",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "葛\U000e0100城",
    "അവന്‍",
    "../../etc/passwd",
    "a/b/pin",
    "%2e%2e%2f",
    "a" * 254,
    "é" * 255,
    "a" * 255 + "~12",
    "~5",
    "e\u0301",
    "s\U0001fae8",  # newer than Python 3.11's Unicode
)
REFUSED = (
    "",
    " ",
    " a",
    "a ",
    "a ~2",
    "\u3000a",
    "a\u00a0b",
    "a\u2003b",
    "a\nb",
    "a\n",
    "a\x00b",
    "a\x85b",
    "a\u2028b",
    "a\u200bb",
    "a\u200db",
    "é\u200d",
    "\u200cé",
    "é\u200d\u200dé",
    "a\ufe0f",
    "\u202eabc",
    "\u200fא",
    "a\u00adb",
    "\u3164",
    "a\ufffdb",
    "a\U000e0067",
    "\ue000",
    "\U0001ffff",
    "a" * 256,
    "a" * 256 + "~2",
    ".",
    "..",
    "..~2",
    "a/kept",
    "a/kept~2~3",
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.text(
    st.sampled_from("aé क्\u200d\u200c\ufe0f👩💻~23/.\u3000\u00a0\n"), min_size=1, max_size=8
)
FEW = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])


def is_allowed(name: str) -> bool:
    try:
        check_session_name(name)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("name", ALLOWED, ids=ascii)
def test_ordinary_text_is_a_valid_session_name(name: str) -> None:
    check_session_name(name)


@pytest.mark.parametrize("name", [*REFUSED, "a\ud83d"], ids=ascii)
def test_invalid_names_are_refused_with_a_printable_message(name: str) -> None:
    with pytest.raises(InputError, match="must") as caught:
        check_session_name(name, "session_id")
    assert str(caught.value).isprintable() and str(caught.value).startswith("session_id must")


@pytest.mark.extended
def test_only_visible_control_characters_and_two_spaces_are_allowed() -> None:
    seen = {0x600, 0x601, 0x602, 0x603, 0x604, 0x605, 0x6DD, 0x70F, 0x890, 0x891, 0x8E2}
    seen |= {0x110BD, 0x110CD, *range(0x13430, 0x13440)}  # number signs and hieroglyphs
    private = {*range(0xE010, 0xF8F0), *range(0xF0010, 0xFFFF0), *range(0x100010, 0x10FFF0)}
    surrogates = {*range(0xD810, 0xDFF0)}  # enough of these are looked at
    for number in sorted({*range(0x110000)} - private - surrogates):
        sign = chr(number)
        if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"):
            assert is_allowed(f"é{sign}a") == (number in seen or sign in " \u3000"), hex(number)


@given(NAMES)
@example("a~2~3")
@example("~1~2")
def test_branch_and_root_of_a_valid_name_are_valid(name: str) -> None:
    if is_allowed(name):
        assert is_allowed(root_name(name)) and root_name(
            branch_name(root_name(name), 7)
        ) == root_name(name)
        assert is_allowed(branch_name(root_name(name), 999_999_999))


@pytest.fixture(scope="module")
def hub(
    small: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngineClient]:
    with hub_in(tmp_path_factory.mktemp("names"), small) as made:
        yield made


@pytest.fixture(scope="module")
def client(hub: LocalEngineClient) -> Iterator[httpx2.Client]:
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=1))
    with listening(app) as url, httpx2.Client(base_url=url, timeout=30) as made:
        yield made


def ask(client: httpx2.Client, text: str, **more: object) -> httpx2.Response:
    messages = [{"role": "user", "content": text}]
    headers = more.pop("headers", None)
    body = {"model": "characters", "messages": messages, **more}
    return client.post("/v1/chat/completions", json=body, headers=headers)  # pyright: ignore


def session_path(name: str, more: str = "") -> str:
    return f"/v1/sessions/{quote(name, safe='')}{more}"


def names(client: httpx2.Client) -> set[str]:
    return {each["id"] for each in client.get("/v1/sessions").json()["data"]}


@pytest.mark.failure(number=30)
@pytest.mark.extended
@FEW
@given(NAMES.filter(is_allowed))
@example("👩‍💻 notes")
@example(PERSIAN)
@example("é" * 255)
@example("a b　c/d?e#f%20~3")
def test_valid_name_is_accepted_by_every_endpoint_and_the_store(
    client: httpx2.Client, hub: LocalEngineClient, name: str
) -> None:
    root = root_name(name)
    own = [name, root, *(branch_name(root, number) for number in (2, 3, 4, 5))]
    for each in own:
        client.delete(session_path(each), params={"branches": True})
    answer = ask(client, "Hi", session_id=name)
    assert (answer.status_code, answer.json().get("kv", {}).get("session")) == (200, name)
    assert name in names(client) and client.get(session_path(name)).json()["id"] == name
    other = ask(client, "No", headers={"x-session-id": name.encode()}).json()["kv"]["session"]
    assert other != name and root_name(other) == root  # a branch
    fork = client.post(session_path(name, "/fork")).json()["id"]
    assert {name, other, fork} <= names(client)
    store = hub.context.persistence._store  # pyright: ignore
    assert {name, other} <= {record.name for record in store.sessions.indexed_heads(LOCAL)}
    file = client.post(session_path(name, "/export")).content
    assert client.delete(session_path(name)).json()["deleted"] is True
    assert client.post(session_path(name, "/import"), content=file).json()["id"] == name
    kept = store.sessions.export(store.sessions.head(LOCAL, other))
    client.delete(session_path(other))
    assert store.sessions.import_file(kept, LOCAL, other).name == other
    for each in {name, other, fork}:
        assert client.delete(session_path(each)).status_code == 200
    assert not names(client) & {name, other, fork}
    assert chat_log_path(name).name.isascii()


@pytest.mark.failure(number=30)
@pytest.mark.parametrize("name", REFUSED, ids=ascii)
def test_invalid_name_is_refused_by_every_endpoint(
    client: httpx2.Client, hub: LocalEngineClient, name: str
) -> None:
    refuse_everywhere(client, hub, name)


@pytest.mark.failure(number=30)
@FEW
@given(NAMES.filter(lambda name: not is_allowed(name)))
def test_generated_invalid_names_are_refused_by_every_endpoint(
    client: httpx2.Client, hub: LocalEngineClient, name: str
) -> None:
    refuse_everywhere(client, hub, name)


def refuse_everywhere(client: httpx2.Client, hub: LocalEngineClient, name: str) -> None:
    before = names(client)
    fork = client.post(session_path("x", "/fork"), json={"name": name})
    answers = [ask(client, "Hi", session_id=name), fork]
    if name:  # empty, these two are as if they were not there
        answers += [ask(client, "Hi", prompt_cache_key=name), ask(client, "Hi", kv_steps={name: 1})]
    if name.strip(" ") == name != "" and all(sign >= " " and sign != "\x7f" for sign in name):
        # What else there is HTTP itself leaves out of a header, or refuses.
        answers.append(ask(client, "Hi", headers={"x-session-id": name.encode()}))
    if name not in ("", ".", ".."):  # a client resolves these before it asks
        answers += [client.delete(session_path(name))]
        if not name.endswith("/kept"):  # asks for the positions of another session
            answers += [client.get(session_path(name))]
        answers += [
            client.post(session_path(name, f"/{verb}")) for verb in ("pin", "export", "import")
        ]
    for answer in answers:
        result = answer.json()["error"]
        assert (answer.status_code, result["code"]) == (400, "invalid_session_id"), (
            answer.request.url
        )
    assert names(client) == before
    store = hub.context.persistence._store  # pyright: ignore
    with pytest.raises(InputError, match="must"):
        store.sessions.append(LOCAL, name, Written((1, 2), b"{}"), 0)
    with pytest.raises(InputError, match="must"):
        store.sessions.save(LOCAL, name, (1, 2))
    with pytest.raises(InputError, match="must"):
        chat_log_path(name)
    with pytest.raises(Exception, match="must") as caught:
        hub.open(LOCAL, name, (ChatMessage("user", "Hi"),))
    assert caught.value.status == 400  # pyright: ignore


def test_empty_name_in_a_path_is_refused(client: httpx2.Client) -> None:
    answers = [client.get("/v1/sessions/"), client.delete("/v1/sessions/")]
    answers += [client.get("/v1/sessions//kept")]
    answers += [client.post(f"/v1/sessions//{verb}") for verb in ("pin", "fork", "export")]
    answers += [client.post("/v1/sessions//import", content=b"x")]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_session_id"), (
            answer.request.url
        )


def test_name_of_invalid_utf8_is_refused(client: httpx2.Client) -> None:
    for answer in (
        ask(client, "Hi", headers={"x-session-id": b"caf\xe9"}),
        client.get("/v1/sessions/caf%E9"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_session_id")


def test_session_with_a_formerly_valid_name_can_be_removed(
    hub: LocalEngineClient, tmp_path: Path
) -> None:
    store = hub.context.persistence._store  # pyright: ignore
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("larder.store.sessions.epochs.check_name", lambda name: None)
        store.sessions.append(LOCAL, " old", Written((1, 2), b"{}"), 0)
    assert store.sessions.append(LOCAL, " old", Written((1, 2, 3), b"{}"), 1).epoch == 2
    store.sessions.remove(LOCAL, " old")
    assert " old" not in {record.name for record in store.sessions.indexed_heads(LOCAL)}
