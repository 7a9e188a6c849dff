"""`larder serve`: an OpenAI-compatible server over one model."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.engine_clients import local_engine_client, ray_engine_client
from larder.cli.errors import INTERRUPTED_EXIT_CODE
from larder.cli.options import ModelOptions, command
from larder.cli.store_options import DEFAULT_CODEC, CodecName, KeyFile, ResumeDeadline, check_codec
from larder.core.errors import DependencyError, InputError, UsageError
from larder.core.home import home

if TYPE_CHECKING:
    from larder.server.embedder_queue import EmbedderQueue
    from larder.server.engine_client import EngineClient
    from larder.server.http.app_state import HttpSettings
    from larder.server.http.auth import Authenticator

# What the extra `serve` brings, as modules.
REQUIRED_MODULES = ("fastapi", "msgspec", "prometheus_client", "pydantic", "starlette", "uvicorn")
API_KEYS_VARIABLE = "LARDER_API_KEYS"


@dataclass(frozen=True)
class ServeOptions(ModelOptions):
    """Options of `larder serve`: model, address, byte budgets, store, access, replicas."""

    policy: Annotated[
        str,
        typer.Option(
            metavar="SPELLING", help="Policy of each session: a preset or a sentence of parts."
        ),
    ] = "full"
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="TOKENS",
            help="Longest text with its answer.  Default: what the model reads.",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Most tokens of a prompt that are read between two tokens of other answers, under "
            "policies without eviction.  Default: 512.",
        ),
    ] = None
    inter_token_latency: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MS",
            help="Milliseconds between two tokens of an answer while prompts of others are read: "
            "chunks are sized for it under policies without eviction, and blocks are interrupted "
            "between layers under all; 0 for whole chunks and blocks.",
        ),
    ] = 1000
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of the model in requests; may be repeated, answers have the first.  "
            "Default: --model.",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How the model writes tool calls, by vLLM's names: hermes, llama3_json, mistral "
            "or pythonic.  Default: as its chat template shows.",
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Chat template in place of the tokenizer's, in Jinja; it runs in the sandbox that "
            "all templates run in.",
        ),
    ] = None
    adapter: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FOLDER",
            help="LoRA adapter, as peft saves it.  With NAME requests choose it by their field "
            "model, and the option may be repeated; without, it is applied to the model.",
        ),
    ] = None
    reuse_contexts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SENDER:START-STOP",
            help="Contexts that SENDER read serve NAME, layers START to STOP - 1 computed again.",
        ),
    ] = None
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient",
            help="Ignore fields and parts of schemas that are not supported, and name them in "
            "warnings of the answer, instead of refusing the request.",
        ),
    ] = False
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How the model marks its reasoning, by vLLM's names: deepseek_r1 or qwen3.  "
            "Default: reasoning is content.",
        ),
    ] = None
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen at; 0 takes a free one.")
    ] = 8000
    kv_budget: Annotated[
        str, typer.Option(metavar="BYTES", help="Limit of all caches on the device of the model.")
    ] = "1GiB"
    host_budget: Annotated[
        str, typer.Option(metavar="BYTES", help="Limit of caches offloaded to host memory.")
    ] = "4GiB"
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Session store: a folder or an fsspec address.  Default: $LARDER_HOME/store.",
        ),
    ] = None
    store_budget: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Limit of the store, index included.  Default: none."),
    ] = None
    tenant_quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER=BYTES",
            help="Limit of each tenant in a tier: device, host or disk; may be repeated.  "
            "Default: none.",
        ),
    ] = None
    durability: Annotated[
        str,
        typer.Option(
            help="Written before an answer ends: none; turn, its messages; snapshot, its messages "
            "and cache; strict, its messages, and a failed write fails the request."
        ),
    ] = "turn"
    eviction: Annotated[
        str,
        typer.Option(
            metavar="RULE", help="Eviction of sessions: lru, gdsf, marconi, continuum, kvflow."
        ),
    ] = "lru"
    scheduling_policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Order of a tenant's requests of one priority: priority, by arrival; "
            "program_fcfs, sessions with a cache in memory first, then by the first arrival of "
            "their agent run (kv_program).",
        ),
    ] = "priority"
    response_category: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:RULES",
            help="Category of the cache of answers by meaning, such as "
            "faq:threshold=0.95,ttl=3600,quota=1000; may be repeated.  Default: none.",
        ),
    ] = None
    embedding_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Embedder of /v1/embeddings, on the CPU: minilm, qwen3, or a model of these or of "
            "sentence-transformers by folder or name.  Default: none.",
        ),
    ] = None
    codec: CodecName = DEFAULT_CODEC
    resume_deadline: ResumeDeadline = None
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
        bool, typer.Option("--ray", help="Serve from replicas on the machines of a Ray cluster.")
    ] = False
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --ray: their number; each has its own budgets.  Default: 2."
        ),
    ] = None


@command
def serve(options: ServeOptions) -> None:
    """Serve sessions over HTTP, compatible with OpenAI clients, with an inspection page.

    The API is at http://HOST:PORT/v1, the page at http://HOST:PORT/.

    Flags of vllm serve, and what to give here, where they differ:

    MODEL                         --model MODEL
    --api-key                     --keys
    --gpu-memory-utilization      --kv-budget, as --kv-cache-memory-bytes
    --swap-space                  --host-budget, as --kv-offloading-size
    --kv-transfer-config          --store
    --kv-cache-dtype              --policy with a part that quantizes
    --data-parallel-size          --ray --replicas
    --max-num-batched-tokens      --prefill-chunk, or --inter-token-latency
    --lora-modules NAME=PATH      --adapter NAME=FOLDER, without --enable-lora
    --override-generation-config  --temperature, --top-p, --top-k
    --runner pooling              --embedding-model NAME, beside the model
    --revision, --load-format     --model with a local folder or a .gguf file
    --uds, --ssl-keyfile          a proxy, as for --allowed-origins, --root-path
    --enable-prefix-caching       always on, as is --enable-auto-tool-choice
    --max-num-seqs                memory decides
    --tensor-parallel-size        none, nor --quantization, --speculative-config

    Any other flag of vllm serve is refused with what to give in its place.
    """
    from larder.cli.served_models import check_model_files, check_policy
    from larder.server.persistence.sweeper import limit_memory

    _check_extra()
    if options.replicas is not None and not options.ray:
        raise UsageError("--replicas needs --ray: add --ray, or leave --replicas out.")
    check_policy(options)
    check_store_options(options)
    check_model_files(options)
    authenticator, bound = _access_control(options), _listening_socket(options)
    limit_memory()
    with bound:
        _serve(options, authenticator, bound)


def _serve(options: ServeOptions, authenticator: Authenticator, bound: socket.socket) -> None:
    """Engine client and HTTP server on a bound socket; `/health` says meanwhile what is done."""
    from larder.engine.runtime import delayed_bar
    from larder.server.http.startup import StartupServer, StartupStatus

    settings, status = _http_settings(options), StartupStatus(delayed_bar)
    with StartupServer(bound, authenticator, settings, status) as startup:
        embedder = _embedder_queue(options.embedding_model)
        engine_client = ray_engine_client if options.ray else local_engine_client
        with engine_client(options, status.stage) as client:
            _run(options, client, authenticator, bound, embedder, settings, startup.close)


def _embedder_queue(name: str | None) -> EmbedderQueue | None:
    """Queue of the embedder of `--embedding-model`; None without one."""
    if name is None:
        return None
    from larder.server.embedder_queue import EmbedderQueue
    from larder.session.embedders.base import load_embedder

    return EmbedderQueue(load_embedder(name), name)


def _check_extra() -> None:
    """Raise DependencyError if a package of the extra `serve` is not installed."""
    missing = [name for name in REQUIRED_MODULES if find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"'larder serve' needs {', '.join(missing)}: pip install 'larder[serve]'."
        )


def _run(
    options: ServeOptions,
    client: EngineClient,
    authenticator: Authenticator,
    bound: socket.socket,
    embedder: EmbedderQueue | None,
    settings: HttpSettings,
    take_over: Callable[[], None],
) -> None:
    """HTTP server on a bound socket, until a signal ends it.

    Args:
        take_over: ends what answers on the socket until then.
    """
    import uvicorn

    from larder.cli.served_models import print_address
    from larder.server.http.app import create_app
    from larder.server.http.archive import Archive
    from larder.server.http.connections import ServerConfig
    from larder.store.encryption import encryption_for, read_key

    try:
        encryption = encryption_for(read_key(options.key_file), "archive")
        archive = Archive(home() / "server" / "archive.sqlite", sealing=encryption)
        app = create_app(client, authenticator, archive, settings, embedder)
        # Loaded objects live as long as the process: a full garbage collection would walk the
        # model and all libraries, and stall every request for half a second.
        gc.collect()
        gc.freeze()
        gc.enable()
        take_over()
        print_address(client.models()[0], bound, is_document=options.json)
        config = ServerConfig(app, timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[bound])
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _http_settings(options: ServeOptions) -> HttpSettings:
    from larder.cli.question_run import sampling_params
    from larder.server.http.app_state import HttpSettings, Unsupported

    return HttpSettings(
        sampling=sampling_params(options),
        max_new_tokens=options.max_new_tokens,
        unsupported=Unsupported.IGNORED if options.lenient else Unsupported.REFUSED,
    )


def _access_control(options: ServeOptions) -> Authenticator:
    """Authenticator from API keys; without keys, loopback clients only.

    Raises:
        UsageError: the host is reachable from other machines and there are no API keys.
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
    """Listening socket at `--host` and `--port`.

    Raises:
        InputError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number is not None and number > 0 else str(error)
        raise InputError(
            f"{options.host} port {options.port} cannot be listened at ({reason}): take another "
            "--port or --host."
        ) from error


def check_store_options(options: ServeOptions) -> None:
    """Validation of budgets, eviction, scheduling, codec and durability before a model loads.

    Raises:
        UsageError, UnknownName: an option has an invalid or unknown value.
    """
    from larder.cli.engine_clients import check_choice, disk_budget, memory_budgets
    from larder.server.persistence.base import Durability
    from larder.server.request_queue import SchedulingPolicy
    from larder.server.response_cache import ResponseCategory
    from larder.store.eviction.base import EVICTIONS

    memory_budgets(options.kv_budget, options.host_budget, options.tenant_quota or ())
    disk_budget(options.store_budget, options.tenant_quota or ())
    EVICTIONS.load(options.eviction)
    check_codec(options.codec, options.resume_deadline)
    check_choice("--durability", options.durability, Durability)
    dict(map(ResponseCategory.parse, options.response_category or ()))
    check_choice("--scheduling-policy", options.scheduling_policy, SchedulingPolicy)
