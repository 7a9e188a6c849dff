"""`larder serve`: an OpenAI-compatible server over one model."""

from __future__ import annotations

import gc
import os
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.errors import INTERRUPTED_EXIT_CODE, SCHEMA, print_document
from larder.cli.options import ModelOptions, command
from larder.cli.store_options import CodecName, KeyFile, check_codec
from larder.core.errors import DependencyError, InputError, UsageError
from larder.core.memory_budget import BudgetUnit, MemoryBudget

if TYPE_CHECKING:
    from larder.server.engine_client import EngineClient
    from larder.server.http.auth import Authenticator
    from larder.store.ledger import ByteBudgets

# What the extra `serve` brings, as modules.
REQUIRED_MODULES = ("fastapi", "msgspec", "prometheus_client", "pydantic", "starlette", "uvicorn")
API_KEYS_VARIABLE = "LARDER_API_KEYS"


@dataclass(frozen=True)
class ServeOptions(ModelOptions):
    """How a server is set up."""

    policy: Annotated[
        str,
        typer.Option(
            metavar="SPELLING",
            help="Of each conversation: a preset's name or a sentence of parts.",
        ),
    ] = "full"
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen at; 0 takes a free one.")
    ] = 8000
    kv_budget: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Of all caches where the model runs, never exceeded."),
    ] = "1GiB"
    host_budget: Annotated[
        str, typer.Option(metavar="BYTES", help="Of caches parked in host memory.")
    ] = "4GiB"
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where turns are written before their end is told: a folder or an fsspec "
            "address.  Default: $LARDER_HOME/store.",
        ),
    ] = None
    store_budget: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Of the store, index and all.  Default: no limit."),
    ] = None
    durability: Annotated[
        str,
        typer.Option(
            help="What is written before the end of an answer is told: none, its turn, snapshot "
            "for its turn and its cache, or strict for its turn, without which the request fails.",
        ),
    ] = "turn"
    eviction: Annotated[
        str,
        typer.Option(
            metavar="RULE", help="Who leaves first: lru, gdsf, marconi, continuum, kvflow."
        ),
    ] = "lru"
    codec: CodecName = "raw"
    key_file: KeyFile = None
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="API keys: lines of 'NAME KEY' or 'NAME KEY operator'.  "
            f"Default: ${API_KEYS_VARIABLE}; without keys only this machine is served.",
        ),
    ] = None
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Serve from replicas that Ray runs, on the machines of its cluster."
        ),
    ] = False
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray; each has budgets of its own.  Default: 2."),
    ] = None


@command
def serve(options: ServeOptions) -> None:
    """Serve many conversations at once to OpenAI's and other clients, and a page to look inside.

    Clients find it at http://HOST:PORT/v1, browsers at http://HOST:PORT/.
    """
    from larder.cli.serve_backends import local_hub, ray_hub

    _check_extra()
    if options.replicas is not None and not options.ray:
        raise UsageError("--replicas are Ray's: give --ray, too, or leave --replicas out.")
    check_store_options(options)
    door, bound = _access_control(options), _listening_socket(options)
    with bound, (ray_hub if options.ray else local_hub)(options) as hub:
        _run(options, hub, door, bound)


def _check_extra() -> None:
    """Raises: DependencyError: something of the extra is not installed."""
    lacking = [name for name in REQUIRED_MODULES if find_spec(name) is None]
    if lacking:
        raise DependencyError(
            f"'larder serve' needs {', '.join(lacking)}: pip install 'larder[serve]'."
        )


def _run(
    options: ServeOptions, hub: EngineClient, door: Authenticator, bound: socket.socket
) -> None:
    """Serve until a signal ends it."""
    import uvicorn

    from larder.cli.question_run import sampling_params
    from larder.core.settings import home
    from larder.server.http.app import create_app
    from larder.server.http.app_state import HttpSettings
    from larder.server.http.archive import Archive
    from larder.server.http.connections import ServerConfig
    from larder.store.encryption import encryption_for, read_key

    settings = HttpSettings(
        sampling=sampling_params(options), max_new_tokens=options.max_new_tokens
    )
    try:
        sealing = encryption_for(read_key(options.key_file), "archive")
        archive = Archive(home() / "server" / "archive.sqlite", sealing=sealing)
        app = create_app(hub, door, archive, settings)
        # Whatever is loaded stays: a full collection of garbage would go through the model and
        # all libraries, half a second in which nobody is answered.
        gc.collect()
        gc.freeze()
        _print_address(options, hub, bound)
        config = ServerConfig(app, timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[bound])
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _print_address(options: ServeOptions, hub: EngineClient, bound: socket.socket) -> None:
    from larder.session.capacity import beyond_budget_line

    [served] = hub.models()
    host, port = bound.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if options.json:
        address = {"url": url, "model": served.name, "policy": served.policy}
        print_document({"schema": SCHEMA, **address, "beyond_budget": list(served.beyond_budget)})
        sys.stdout.flush()
        return
    print(f"Serving {served.name} at {url} (Ctrl-C ends it)", file=sys.stderr)
    if served.beyond_budget:
        print(f"larder: {beyond_budget_line(served.beyond_budget)}", file=sys.stderr)


def _access_control(options: ServeOptions) -> Authenticator:
    """Who may ask.

    Raises:
        UsageError: everybody could, from anywhere.
    """
    from larder.server.http.auth import ApiKeyAuth, LoopbackAuth, is_loopback, load_keys, parse_keys

    if options.keys is not None:
        return ApiKeyAuth(load_keys(options.keys))
    if os.environ.get(API_KEYS_VARIABLE):
        return ApiKeyAuth(parse_keys(os.environ[API_KEYS_VARIABLE], f"${API_KEYS_VARIABLE}"))
    if not is_loopback(options.host):
        raise UsageError(
            f"--host {options.host} is open to other machines, but there are no API keys: give "
            "--keys FILE, or listen at 127.0.0.1."
        )
    return LoopbackAuth()


def _listening_socket(options: ServeOptions) -> socket.socket:
    """A socket that listens where the options say.

    Raises:
        InputError: it cannot.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"{options.host} port {options.port} cannot be listened at ({error}): take another "
            "--port or --host."
        ) from error


def tier_budgets(options: ServeOptions) -> ByteBudgets:
    """Raises: UsageError: an option is no number of bytes."""
    from larder.store.ledger import ByteBudgets, Tier

    return ByteBudgets(
        {
            Tier.DEVICE: _bytes("--kv-budget", options.kv_budget),
            Tier.HOST: _bytes("--host-budget", options.host_budget),
        }
    )


def store_budgets(options: ServeOptions) -> ByteBudgets:
    """Raises: UsageError: the option is no number of bytes."""
    from larder.store.ledger import ByteBudgets, Tier

    if options.store_budget is None:
        return ByteBudgets()
    return ByteBudgets({Tier.DISK: _bytes("--store-budget", options.store_budget)})


def check_store_options(options: ServeOptions) -> None:
    """Raises: UsageError, UnknownName: an option is none that there is."""
    from larder.server.persistence.base import Durability
    from larder.store.eviction.base import EVICTIONS

    tier_budgets(options)
    store_budgets(options)
    EVICTIONS.load(options.eviction)
    check_codec(options.codec)
    known = [each.value for each in Durability]
    if options.durability not in known:
        raise UsageError(
            f"--durability {options.durability!r} is not known: take one of {', '.join(known)}."
        )


def _bytes(option: str, text: str) -> int:
    """Raises: UsageError: the text is no number of bytes."""
    amount = MemoryBudget.parse(text, option)
    if amount.unit is not BudgetUnit.BYTES:
        raise UsageError(f"{option} {text!r} is not a number of bytes: write 512MiB or 2GiB.")
    return int(amount.number)
