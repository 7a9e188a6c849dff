"""Endpoints about the server: models, tokenizer, health, metrics, version, and its web page."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

import larder
from larder.server.engine_client import EngineClient
from larder.server.http.app_state import app_state, principal_of
from larder.server.http.json_body import JsonBody
from larder.server.http.json_route import JsonRoute
from larder.server.http.middleware import ASSETS
from larder.server.http.protocol import Text
from larder.server.request import ApiError
from larder.server.session_info import ServedModel

router = APIRouter(tags=["about"], route_class=JsonRoute)
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class TokenizeRequest(JsonBody):
    """Text to tokenize."""

    prompt: Text
    model: Text | None = None


class DetokenizeRequest(JsonBody):
    """Token ids to detokenize."""

    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 20, fail_fast=True)
    ]
    model: Text | None = None


@router.get("/health")
async def health(http: HttpRequest) -> JSONResponse:
    """Health of the server, with its current problems."""
    state = app_state(http)
    return await to_thread.run_sync(_health, state.client, limiter=state.health_threads)


@router.get("/live")
async def live() -> JSONResponse:
    """Liveness of the process: 200 as long as it answers, also while the server starts."""
    return JSONResponse({"status": "ok"})


@router.get("/version")
def version() -> JSONResponse:
    """The version of Larder."""
    return JSONResponse({"version": larder.__version__})


@router.get("/metrics")
def metrics(http: HttpRequest, names: Literal["larder", "vllm"] = "larder") -> Response:
    """Prometheus metrics of all tenants together, for operators only; `names=vllm` gives those that
    vLLM has too, under its names."""
    if not principal_of(http).is_operator:
        raise ApiError(
            "This key is not an operator's: append 'operator' to its line in the file of keys.",
            403,
            "forbidden",
        )
    state = app_state(http)
    text = (
        state.metrics.text()
        if names == "larder"
        else state.metrics.text_as_vllm(state.client.models()[0].name)
    )
    return Response(text, media_type="text/plain; version=0.0.4")


@router.get("/v1/models")
def list_models(http: HttpRequest) -> JSONResponse:
    """List the models."""
    served = app_state(http).client.models()
    return JSONResponse({"object": "list", "data": [_model(each) for each in served]})


@router.get("/v1/models/{name:path}")
def retrieve_model(http: HttpRequest, name: str) -> JSONResponse:
    """Retrieve a model."""
    return JSONResponse(_model(app_state(http).check_model(name)))


@router.post("/tokenize")
def tokenize(http: HttpRequest, body: TokenizeRequest) -> JSONResponse:
    """Token ids of a text."""
    state = app_state(http)
    served, ids = state.check_model(body.model), state.client.tokenize(body.prompt)
    fields = {"count": len(ids), "max_model_len": served.context_tokens, "tokens": ids}
    return JSONResponse(fields)


@router.post("/detokenize")
def detokenize(http: HttpRequest, body: DetokenizeRequest) -> JSONResponse:
    """Text of token ids."""
    app_state(http).check_model(body.model)
    return JSONResponse({"prompt": app_state(http).client.detokenize(body.tokens)})


@router.get("/tokenizer_info")
def tokenizer_info(http: HttpRequest) -> JSONResponse:
    """Texts of the special tokens, and the chat template: what lm-eval's remote tokenizer asks."""
    return JSONResponse(dict(app_state(http).client.tokenizer_info()))


@router.get("/", include_in_schema=False)
def page() -> Response:
    """Web page with a chat, the sessions and their cached positions."""
    return _asset("page.html")


@router.get("/{name}.css", include_in_schema=False)
@router.get("/{name}.js", include_in_schema=False)
def asset(http: HttpRequest) -> Response:
    """Style sheet or script of the page."""
    if http.url.path not in ASSETS:
        raise ApiError("There is no such file.", 404, "not_found")
    return _asset(http.url.path.removeprefix("/"))


def _health(client: EngineClient) -> JSONResponse:
    if not client.is_healthy():
        return JSONResponse({"status": "down"}, 503)
    problems = client.problems()
    if problems:
        return JSONResponse({"status": "degraded", "problems": list(problems)})
    return JSONResponse({"status": "ok"})


def _asset(name: str) -> Response:
    content = files("larder.server.page").joinpath(name).read_bytes()
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY, "cache-control": "no-cache"}
    kind = MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)


def _model(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": int(served.made),
        "owned_by": "larder",
        "max_model_len": served.context_tokens,
        "kv_policy": served.policy,
        "kv_budget_tokens": served.budget_tokens,
        "kv_beyond_budget": list(served.beyond_budget),
    }
