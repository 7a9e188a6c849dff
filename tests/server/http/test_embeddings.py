"""Embeddings endpoint: values, limits and fairness between tenants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group, run, sleep, to_thread
from openai import APIStatusError, OpenAI

from larder.server import ApiKeyAuth, Archive, EmbedderQueue, HttpSettings, Principal, create_app
from larder.session import Embedder, load_embedder
from server.fake_engine_client import FakeHub
from server.http.running_server import listening

KEYS = {"sk-anne-0123456789": "anne", "sk-bob-0123456789ab": "bob"}
ANNE, BOB = KEYS
DAY = {"model": "letters", "input": ["A day.", "Night!"]}


class Letters(Embedder):
    """Rows of the first two letters of a text, one batch at a time. `free` lets it go on."""

    def __init__(self) -> None:
        self.batches, self.counted = list[list[str]](), list[str]()
        self.threads = set[int]()
        self.free = threading.Event()
        self.free.set()
        self._running = threading.Lock()

    @property
    def name(self) -> str:
        return "letters"

    @property
    def max_tokens(self) -> int:
        return 8

    def embed_segments(self, texts: Sequence[str]) -> np.ndarray:
        assert self._running.acquire(blocking=False), "two threads at once"
        self.batches.append(list(texts))
        self.threads.add(threading.get_ident())
        self.free.wait(20)
        rows = np.array([[ord(text[0]), ord(text[1])] for text in texts], np.float32)
        self._running.release()
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def embed_questions(self, texts: Sequence[str]) -> np.ndarray:
        return self.embed_segments(texts)

    def num_tokens(self, text: str) -> int:
        self.counted.append(text)
        return super().num_tokens(text)


def app_with(embedder: Embedder | None, name: str = "letters") -> Any:
    door = ApiKeyAuth({key: Principal(name, is_operator=False) for key, name in KEYS.items()})
    queue = None if embedder is None else EmbedderQueue(embedder, name)
    return create_app(FakeHub(), door, Archive(), HttpSettings(), queue)


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture
def url(letters: Letters) -> Iterator[str]:
    with listening(app_with(letters)) as found:
        yield f"{found}/v1"


def refused(client: OpenAI, **fields: Any) -> tuple[int, str, str]:
    with pytest.raises(APIStatusError) as caught:
        client.embeddings.create(**{**DAY, **fields})
    body: Any = caught.value.body
    return caught.value.status_code, body["code"], body["message"]


def test_embeddings_match_the_embedder_as_floats_and_base64(url: str, letters: Letters) -> None:
    client = OpenAI(base_url=url, api_key=ANNE)
    want = letters.embed_segments(["A day.", "Night!"])
    coded = client.embeddings.create(**DAY)  # OpenAI's client asks for base64
    plain = client.embeddings.create(**DAY, encoding_format="float", dimensions=2)
    for found in (coded, plain):
        assert [each.index for each in found.data] == [0, 1] and found.model == "letters"
        np.testing.assert_array_equal([each.embedding for each in found.data], want)
        assert found.usage.prompt_tokens == found.usage.total_tokens == 3
    one = client.embeddings.create(model="letters", input="A day.", extra_body={"frob": 1})
    assert one.data[0].embedding == coded.data[0].embedding
    extra: Any = one.model_extra
    assert "'frob'" in extra["warnings"][0]


def test_invalid_embedding_input_is_refused(url: str, letters: Letters) -> None:
    client = OpenAI(base_url=url, api_key=ANNE)
    assert refused(client, input=[1, 2])[:2] == refused(client, input=[[1]])[:2]
    status, _, message = refused(client, input=[1, 2])
    assert status == 400 and "check_embedding_ctx_length" in message
    status, code, message = refused(client, input=["a b", "a b c d e f g h i"])
    assert (status, code) == (400, "context_length_exceeded")
    assert "input.1" in message and "8 tokens" in message
    assert refused(client, input="x" * ((1 << 18) + 1))[:2] == (400, "context_length_exceeded")
    assert refused(client, model="text-embedding-3-small")[:2] == (404, "model_not_found")
    assert refused(client, dimensions=3)[:2] == (400, "unsupported_parameter")
    assert refused(client, input=[])[0] == refused(client, input=["ab"] * 2049)[0] == 400
    assert letters.batches == [["A day."]]  # whose length was compared with dimensions


def test_tokenization_stops_at_the_first_text_too_long(url: str, letters: Letters) -> None:
    client = OpenAI(base_url=url, api_key=ANNE)
    texts = [*["a b"] * 40, "a " * 9, *["c d"] * 40]
    message = refused(client, input=texts)[2]
    assert "input.40" in message and letters.counted == texts[:41]


def test_embedding_model_name_is_that_of_the_option(letters: Letters) -> None:
    with listening(app_with(letters, "./folder")) as found:
        client = OpenAI(base_url=f"{found}/v1", api_key=ANNE)
        answer = client.embeddings.create(**{**DAY, "model": "./folder"})
        assert answer.model == "./folder" and len(answer.data) == 2
        status, _, message = refused(client)
    assert status == 404 and "./folder" in message


def test_server_without_an_embedder_names_the_flag() -> None:
    with listening(app_with(None)) as found:
        client = OpenAI(base_url=f"{found}/v1", api_key=ANNE)
        status, code, message = refused(client)
    assert (status, code) == (404, "model_not_found") and "--embedding-model" in message


def test_embedding_batches_alternate_between_tenants(url: str, letters: Letters) -> None:
    letters.free.clear()
    many = {"model": "letters", "input": ["anne"] * 200}
    with ThreadPoolExecutor(3) as pool:
        ask = [OpenAI(base_url=url, api_key=key).embeddings.create for key in (ANNE, ANNE, BOB)]
        first = [pool.submit(each, **many) for each in ask[:2]]
        while not letters.batches:
            time.sleep(0.01)
        short = pool.submit(ask[2], model="letters", input="bob")
        time.sleep(0.3)  # it stands in the queue
        letters.free.set()
        assert len(short.result().data) == 1
        assert all(len(each.result().data) == 200 for each in first)
    place = letters.batches.index(["bob"])
    assert place <= 2 < len(letters.batches) - 2 and max(map(len, letters.batches)) == 32


def test_embedding_batches_run_on_one_thread(letters: Letters) -> None:
    queue, free = EmbedderQueue(letters, "letters"), threading.Event()

    async def ask() -> None:
        await queue.embed("anne", ["A day."])
        async with create_task_group() as group:
            group.start_soon(to_thread.run_sync, free.wait, 20)
            await sleep(0.02)  # a thread that is idle has begun to wait
            await queue.embed("bob", ["Night!"])
            free.set()

    run(ask)
    assert len(letters.batches) == 2 and len(letters.threads) == 1


@pytest.mark.slow
def test_langchain_embeddings_match_minilm() -> None:
    OpenAIEmbeddings = pytest.importorskip("langchain_openai").OpenAIEmbeddings  # noqa: N806
    embedder = load_embedder("minilm")
    texts = ["The baker sells bread.", "Bread is sold by the baker.", "Ships sail at dawn."]
    with listening(app_with(embedder, "minilm")) as found:
        options: dict[str, Any] = {"model": "minilm", "base_url": f"{found}/v1", "api_key": ANNE}
        rows = OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_documents(texts)
        client = OpenAI(base_url=f"{found}/v1", api_key=ANNE)
        long = {"model": "minilm", "input": "bread " * 300}
        assert refused(client, **long)[1] == "context_length_exceeded"
    np.testing.assert_allclose(rows, embedder.embed_segments(texts), atol=1e-6)
    assert np.dot(rows[0], rows[1]) > 0.8 > 0.3 > np.dot(rows[0], rows[2])
