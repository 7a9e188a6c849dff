"""What the server is: models, tokens, health, numbers, version, and its page."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

import larder
from larder.server.engine_client import EngineClient, ServedModel
from larder.server.http.app_state import app_state, principal_of
from larder.server.http.json_body import JsonBody
from larder.server.http.json_route import JsonRoute
from larder.server.http.middleware import ASSETS
from larder.server.http.protocol import Text
from larder.server.request import ApiError

router = APIRouter(tags=["about"], route_class=JsonRoute)
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class TokenizeRequest(JsonBody):
    """A text to take apart."""

    prompt: Text
    model: Text | None = None


class DetokenizeRequest(JsonBody):
    """Token ids to put together."""

    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 20, fail_fast=True)
    ]
    model: Text | None = None


@router.get("/health")
async def health(http: HttpRequest) -> JSONResponse:
    """Whether requests are taken, and what is wrong meanwhile."""
    desk = app_state(http)
    return await to_thread.run_sync(_health, desk.hub, limiter=desk.health_threads)


@router.get("/version")
def version() -> JSONResponse:
    """The version of Larder."""
    return JSONResponse({"version": larder.__version__})


@router.get("/metrics")
def metrics(http: HttpRequest, names: Literal["larder", "vllm"] = "larder") -> Response:
    """Numbers of all tenants together, for Prometheus and for operators only; with `names=vllm`
    those that vLLM has too, as it calls them."""
    if not principal_of(http).is_operator:
        raise ApiError(
            "This key is no operator's: write 'operator' behind it in the file of keys.",
            403,
            "forbidden",
        )
    desk = app_state(http)
    text = (
        desk.gauges.text()
        if names == "larder"
        else desk.gauges.text_as_vllm(desk.hub.models()[0].name)
    )
    return Response(text, media_type="text/plain; version=0.0.4")


@router.get("/v1/models")
def list_models(http: HttpRequest) -> JSONResponse:
    """List the models."""
    served = app_state(http).hub.models()
    return JSONResponse({"object": "list", "data": [_model(each) for each in served]})


@router.get("/v1/models/{name:path}")
def retrieve_model(http: HttpRequest, name: str) -> JSONResponse:
    """Tell of a model."""
    return JSONResponse(_model(app_state(http).check_model(name)))


@router.post("/tokenize")
def tokenize(http: HttpRequest, asked: TokenizeRequest) -> JSONResponse:
    """The tokens of a text."""
    desk = app_state(http)
    served, ids = desk.check_model(asked.model), desk.hub.tokenize(asked.prompt)
    told = {"count": len(ids), "max_model_len": served.context_tokens, "tokens": ids}
    return JSONResponse(told)


@router.post("/detokenize")
def detokenize(http: HttpRequest, asked: DetokenizeRequest) -> JSONResponse:
    """The text of tokens."""
    app_state(http).check_model(asked.model)
    return JSONResponse({"prompt": app_state(http).hub.detokenize(asked.tokens)})


@router.get("/", include_in_schema=False)
def page() -> Response:
    """Chat, sessions and what is kept of them, in a browser."""
    return _asset("page.html")


@router.get("/{name}.css", include_in_schema=False)
def style(name: str) -> Response:
    """How the page looks."""
    return _named(name, "css")


@router.get("/{name}.js", include_in_schema=False)
def script(name: str) -> Response:
    """What the page does."""
    return _named(name, "js")


def _health(hub: EngineClient) -> JSONResponse:
    if not hub.is_healthy():
        return JSONResponse({"status": "down"}, 503)
    problems = hub.problems()
    if problems:
        return JSONResponse({"status": "degraded", "problems": list(problems)})
    return JSONResponse({"status": "ok"})


def _named(name: str, ending: str) -> Response:
    if f"/{name}.{ending}" not in ASSETS:
        raise ApiError("There is no such file.", 404, "not_found")
    return _asset(f"{name}.{ending}")


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
