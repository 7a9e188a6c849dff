"""Table of operations: placement, merge and endpoint of each."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from starlette.routing import Match

from larder.core import InputError, check_session_name
from larder.models import LoadedModel
from larder.server import (
    OPERATIONS,
    SESSION,
    Archive,
    Endpoint,
    EngineContext,
    HttpSettings,
    LoopbackAuth,
    Operation,
    Placement,
    create_app,
    operations_router,
)
from server.fake_engine_client import FakeHub
from server.http.running_server import listening
from server_engine_clients import hub_in


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_parameters_match_its_placement_and_merge(name: str) -> None:
    """Those on a session are routed by tenant and name, those of every replica are merged."""
    operation = OPERATIONS[name]
    names = [each.name for each in operation.parameters]
    assert (names[:2] == ["tenant", "name"]) == (operation.placement is Placement.SESSION)
    assert (operation.merge is not None) == (operation.placement is Placement.ALL)
    assert operation.name == name and operation.description.endswith(".")


@pytest.mark.extended
def test_each_endpoint_is_in_the_schema() -> None:
    app = create_app(FakeHub(), LoopbackAuth(), Archive(), HttpSettings())
    with listening(app) as url:
        paths = httpx2.get(f"{url}/openapi.json").json()["paths"]
    endpoints = [each.endpoint for each in OPERATIONS.values() if each.endpoint is not None]
    assert len(endpoints) > 10
    for endpoint in endpoints:
        route = paths[endpoint.path.replace(":path", "")][endpoint.method.lower()]
        assert route["operationId"].startswith(endpoint.name or endpoint.path.rpartition("/")[2])


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_endpoint_that_shadows_session_names_is_refused(method: str) -> None:
    def spans(context: EngineContext, tenant: str, name: str) -> None: ...

    hidden = Operation(spans, endpoint=Endpoint(method, f"{SESSION}/spans"))
    with pytest.raises(ValueError, match="names end with '/spans'"):
        operations_router([*OPERATIONS.values(), hidden])
    assert operations_router([Operation(spans, endpoint=Endpoint("POST", f"{SESSION}/spans"))])


@pytest.mark.parametrize("name", ["a", "a/kept", "a/spans"])
def test_endpoint_whose_path_ends_with_the_name_takes_every_session(name: str) -> None:
    def spans(context: EngineContext, tenant: str, name: str) -> None: ...

    own = Operation(spans, endpoint=Endpoint("GET", "/v1/spans/{name:path}"))
    router = operations_router([*OPERATIONS.values(), own])
    scope = {"type": "http", "method": "GET", "path": f"/v1/spans/{name}"}
    found = [(route, route.matches(scope)) for route in router.routes]
    [(route, scope)] = [(route, own) for route, (kind, own) in found if kind is Match.FULL]
    assert route.endpoint.__name__ == "spans" and scope["path_params"] == {"name": name}


def test_session_names_shadowed_by_an_endpoint_are_refused() -> None:
    endpoints = [each.endpoint for each in OPERATIONS.values() if each.endpoint is not None]
    methods = {each.method for each in endpoints if each.path == SESSION}
    below = [each for each in endpoints if each.path.startswith(f"{SESSION}/")]
    shadowing = [each.path.removeprefix(SESSION) for each in below if each.method in methods]
    assert shadowing == ["/kept"]
    for end in shadowing:
        with pytest.raises(InputError, match=f"nor end with '{end}', which are paths of the"):
            check_session_name(f"talk{end}")


def test_arguments_are_passed_by_position_with_their_defaults() -> None:
    assert OPERATIONS["remove"].arguments("a", "x") == ("a", "x", False)
    assert OPERATIONS["remove"].arguments("a", name="x", branches=True) == ("a", "x", True)
    with pytest.raises(TypeError):
        OPERATIONS["remove"].arguments("a")


def test_client_runs_operations_without_own_methods(small: LoadedModel, tmp_path: Path) -> None:
    def context_len(context: EngineContext, tenant: str, name: str) -> int:
        return context.core.context if context.core.sessions.has(tenant, name) else 0

    with hub_in(tmp_path, small) as hub:
        assert hub.call(Operation(context_len), "a", "x") == 0
        hub.open("a", "x")
        [served] = hub.models()
        assert hub.call(Operation(context_len), "a", name="x") == served.context_tokens
