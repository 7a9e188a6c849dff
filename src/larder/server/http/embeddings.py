"""OpenAI's embeddings of texts: `POST /v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse
from jaxtyping import Float32
from pydantic import Field

from larder.server.api_errors import invalid_request
from larder.server.embedder_queue import EmbedderQueue
from larder.server.http.app_state import AppState, app_state, tenant_of
from larder.server.http.json_body import JsonBody
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import Text, unknown_warning
from larder.server.request import ApiError

MAX_TEXTS = 2048
MAX_CHARACTERS = 1 << 18  # of a text, before its tokens are counted

router = APIRouter(tags=["text"], route_class=JsonRoute)

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class EmbeddingRequest(JsonBody):
    """Texts to embed."""

    model: Text
    input: Text | Texts | Ids | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Text | None = None

    @property
    def texts(self) -> list[str]:
        """The texts.

        Raises:
            ApiError: 400: token ids, or a text that is too long.
        """
        given = [self.input] if isinstance(self.input, str) else self.input
        texts = [each for each in given if isinstance(each, str)]
        if len(texts) < len(given):
            raise invalid_request(
                "input has token ids, and those of another model would be embedded as other "
                "words: send texts (LangChain: check_embedding_ctx_length=False).",
                "input",
            )
        for index, text in enumerate(texts):
            if len(text) > MAX_CHARACTERS:
                raise _too_long(index, f"{MAX_CHARACTERS} characters")
        return texts


@router.post("/v1/embeddings")
async def embeddings(http: HttpRequest, body: EmbeddingRequest) -> JSONResponse:
    """Embed texts."""
    queue = _checked_queue(app_state(http), body.model)
    texts, tenant = body.texts, tenant_of(http)
    counts = await queue.num_tokens(tenant, texts)
    limit = queue.embedder.max_tokens
    for index, count in enumerate(counts):
        if limit is not None and count > limit:
            raise _too_long(index, f"the {limit} tokens that {queue.name} reads")
    if body.dimensions is not None:
        [row] = await queue.embed(tenant, texts[:1])
        if body.dimensions != len(row):
            message = f"dimensions must be {len(row)} here, got {body.dimensions}: leave it out."
            raise invalid_request(message, "dimensions", "unsupported_parameter")
    rows = await queue.embed(tenant, texts)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(row, body.encoding_format)}
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    warnings = [unknown_warning(path) for path in body.unknown_fields]
    response = {"warnings": warnings} if warnings else {}
    head = {"object": "list", "model": queue.name}
    return JSONResponse({**head, "data": data, "usage": usage, **response})


def _checked_queue(state: AppState, model: str) -> EmbedderQueue:
    """Queue of the embedder. Raise ApiError 404 if the server has none, or another one."""
    queue = state.embedder
    if queue is not None and model == queue.name:
        return queue
    known = "none: start it with --embedding-model" if queue is None else repr(queue.name)
    raise ApiError(
        f"There is no embedding model {model[:200]!r} here; the server has {known}.",
        404,
        "model_not_found",
        "model",
    )


def _too_long(index: int, limit: str) -> ApiError:
    message = f"input.{index} has more than {limit}: split it."
    return ApiError(message, 400, "context_length_exceeded", "input")


def _encoded(row: Float32[np.ndarray, " D"], encoding: str) -> Any:
    if encoding == "float":
        return row.tolist()
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
