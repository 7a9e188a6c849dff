"""`larder serve`: options, keys, quotas, and the address that it prints."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

import larder
from cli_results import Run, complaint, document
from larder.cli import serve
from larder.cli.errors import INTERRUPTED_EXIT_CODE
from larder.engine import runtime
from larder.models import calibration
from larder.session import load_weights
from larder.store import LocalFileSystem
from server_core import characters
from tiny_models import tiny

ASKED = {"messages": [{"role": "user", "content": "My cat is Mira."}], "max_tokens": 3}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Reply to a client from a server that is then interrupted."""
    replies: dict[str, Any] = {}

    async def talk(config: uvicorn.Config) -> None:
        transport = httpx2.ASGITransport(config.app)  # pyright: ignore[reportArgumentType]
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for name in ("/health", "/v1/models", "/metrics"):
                replies[name] = await client.get(name)
            if replies["/v1/models"].is_error:
                return
            [model] = replies["/v1/models"].json()["data"]
            body = {"model": model["id"], **ASKED}
            named = {"x-session-id": "about cats"}
            replies["chat"] = await client.post("/v1/chat/completions", json=body, headers=named)

    def run(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        replies["port"] = sockets[0].getsockname()[1]
        asyncio.run(talk(self.config))
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", run)
    return replies


@pytest.mark.extended
def test_server_runs_until_interrupted(run: Run, answered: dict[str, Any]) -> None:
    done = run("serve", "--port", "0", "--kv-budget", "64MiB")
    assert done.exit_code == INTERRUPTED_EXIT_CODE, done.exception
    assert (done.exit_code, done.stdout) == (INTERRUPTED_EXIT_CODE, "")
    assert f"at http://127.0.0.1:{answered['port']} " in done.stderr
    assert "beyond the budget: unlimited() keeps everything" in done.stderr
    [model] = answered["/v1/models"].json()["data"]
    assert model["kv_budget_tokens"] is None and len(model["kv_beyond_budget"]) == 1
    assert answered["/health"].json() == {"status": "ok"}
    assert 'larder_budget_bytes{tier="device"} 6.7108864e+07' in answered["/metrics"].text
    result = answered["chat"].json()
    assert result["usage"]["completion_tokens"] <= 3 and result["kv"]["lossless"]
    [kept] = document(run("cache", "list", "--json"))["sessions"]
    assert kept["session"] == "about cats"


@pytest.mark.parametrize(
    "method, policy",
    [
        ("trim", "whole() > trim() > uniform()"),
        ("lookahead_kv", "whole() > lookahead_kv() > uniform()"),
        ("aqua", "whole() > protect(sinks=1, recent=2) > keydiff() > uniform() > aqua()"),
        ("less", "whole() > protect(sinks=1, recent=2) > keydiff() > uniform() > less()"),
        ("lococo", "whole() > protect(sinks=1, recent=2) > keydiff() > uniform() > lococo()"),
        ("duo_attention", 'whole() > snapkv() > retrieval_heads(share=0.5, trial="gates")'),
    ],
)
def test_policies_without_their_weights_are_not_served(
    run: Run, answered: dict[str, Any], method: str, policy: str
) -> None:
    done = run("serve", "--port", "0", "--policy", policy, "--budget", "300")
    assert f"`larder train {method} --model seed`" in done.stderr
    assert done.exit_code == 1 and not {"chat", "/v1/models"} & answered.keys()


def test_models_with_windows_in_all_layers_need_no_weights() -> None:
    """No layer of theirs is under the budget, whose first one has the weights."""
    module = tiny("mistral")
    module.config.sliding_window = 9
    windowed = type(module)(module.config).eval()
    for policy in ("full", "kvzip"):
        engine = larder.Engine(windowed, characters().tokenizer, policy=policy)
        assert engine.loaded.decoder.spec.managed == ()
        load_weights(engine.runtime, engine.policy)


@pytest.mark.extended
def test_serving_address_is_printed_as_json(run: Run, answered: dict[str, Any]) -> None:
    policy = "blockwise() > column_mass() > uniform() > every_step()"
    result = document(run("serve", "--port", "0", "--json", "--policy", policy, "--budget", "64"))
    assert result["url"] == f"http://127.0.0.1:{answered['port']}"
    assert "column_mass" in result["policy"] and not answered["chat"].is_error
    assert result["beyond_budget"] == []
    [model] = answered["/v1/models"].json()["data"]
    assert (model["kv_budget_tokens"], model["kv_beyond_budget"]) == (64, [])


def test_public_host_requires_keys(run: Run, tmp_path: Path) -> None:
    message = complaint(run("serve", "--host", "0.0.0.0", "--port", "0"), 2)
    assert message.startswith("--host 0.0.0.0 is open") and "--keys FILE" in message
    keys = tmp_path / "keys"
    for content, why in (
        ("", "holds no key"),
        ("anne", "line 1: not 'NAME KEY'"),
        ("# mine\nanne short", "line 2: a key is 16"),
        ("an/ne sk-0123456789abcdef", "line 1: a name is"),
        ("anne sk-0123456789abcdef king", "line 1: not 'NAME KEY'"),
        ("anne sk-0123456789abcdef\nbob sk-0123456789abcdef", "line 2: this key"),
    ):
        keys.write_text(content)
        message = complaint(run("serve", "--port", "0", "--keys", keys), 1)
        assert why in message and "0123456789" not in message
    message = complaint(run("serve", "--keys", tmp_path / "none"), 1)
    assert "(No such file or directory): name a file with lines of 'NAME KEY'" in message


def test_keys_come_from_the_environment(
    run: Run, answered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARDER_API_KEYS", "anne sk-0123456789abcdef")
    run("serve", "--port", "0")
    assert answered["/v1/models"].status_code == 401


def test_invalid_options_are_refused_before_a_model_loads(run: Run) -> None:
    assert "64MBit' is not a number of bytes" in complaint(run("serve", "--kv-budget", "64MBit"), 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        message = complaint(run("serve", "--port", str(taken.getsockname()[1])), 1)
    assert "cannot be listened at (Address already in use): take another --port" in message
    message = complaint(run("serve", "--port", "0", "--policy", "exact_question"), 2)
    assert "needs the question before prefill" in message


@pytest.mark.parametrize(
    ("names", "reason"),
    [([" "], "' ' is no name: give one that"), (["a", "b", "a"], "a is given twice: give it once")],
)
def test_blank_or_repeated_served_names_are_refused(
    run: Run, names: list[str], reason: str
) -> None:
    options = [word for name in names for word in ("--served-model-name", name)]
    assert reason in complaint(run("serve", "--port", "0", *options), 2)


@pytest.mark.extended
def test_budget_without_room_for_an_answer_is_refused(run: Run) -> None:
    message = complaint(run("serve", "--port", "0", "--kv-budget", "1KiB"), 2)
    assert "--kv-budget gives the caches of seed 1,024 bytes, but two tokens take" in message


def test_contexts_of_another_model_are_checked_first(run: Run) -> None:
    for given, why in (
        (["lora"], "is not NAME=SENDER:START-STOP"),
        (["lora=seed:2-1"], "is START-STOP"),
        (["lora=seed:1-2"], "needs two models"),
        (["lora=seed:1-2", "lora=seed:0-1"], "is given twice"),
    ):
        options = [word for each in given for word in ("--reuse-contexts", each)]
        message = complaint(run("serve", "--port", "0", "--policy", "ape", *options), 2)
        assert why in message


def test_tenant_quotas_are_parsed_and_enforced(run: Run, answered: dict[str, Any]) -> None:
    for given, why in (
        (["gpu=1MiB"], "'gpu=1MiB' is not TIER=BYTES: take one of device, host, disk"),
        (["host"], "is not TIER=BYTES"),
        (["host=20%"], "'20%' is not a number of bytes"),
        (["disk=0"], "'0' is not a number of bytes: give the disk tier at least 1 byte"),
        (["host=1MiB", "host=2MiB"], "host=... is given twice"),
    ):
        options = [word for quota in given for word in ("--tenant-quota", quota)]
        assert why in complaint(run("serve", "--port", "0", *options), 2)
    run("serve", "--port", "0", "--tenant-quota", "device=64KiB")
    result = answered["chat"]
    assert result.status_code == 400
    assert result.json()["error"]["code"] == "kv_budget_exceeded"


def test_chat_templates_and_adapters_are_checked_before_a_model_loads(
    run: Run, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    message = complaint(run("serve", "--port", "0", "--chat-template", template), 1)
    assert "cannot be read (No such file or directory): name a file that has" in message
    template.write_bytes(b"\xff")
    message = complaint(run("serve", "--port", "0", "--chat-template", template), 1)
    assert "cannot be read (it is not UTF-8)" in message
    template.write_text("a\n{% for %}")
    message = complaint(run("serve", "--port", "0", "--chat-template", template), 1)
    assert "template.jinja, line 2, is no template" in message
    for nested in ("(" * 5000, "{% if a %}" * 120 + "{% endif %}" * 120, "1" * 5000):
        template.write_text(nested if nested[0] == "{" else f"{{{{ {nested} }}}}")
        message = complaint(run("serve", "--port", "0", "--chat-template", template), 1)
        assert "template.jinja cannot be compiled" in message
    template.write_text("é" * (1 << 17) + "x")
    message = complaint(run("serve", "--port", "0", "--chat-template", template), 1)
    assert "more than 256 KiB" in message
    message = complaint(run("serve", "--port", "0", "--adapter", "seed=folder"), 2)
    assert "the model itself has this name" in message
    for given in ("folder", "x=folder"):
        message = complaint(run("serve", "--port", "0", "--adapter", given), 1)
        assert "folder has no adapter_config.json: give a folder" in message
    message = complaint(run("serve", "--port", "0", "--ray", "--adapter", "x=folder"), 2)
    assert "does not go with --ray" in message


@pytest.mark.parametrize(
    ("option", "status", "message"),
    [
        ("--tool-call-parser", 2, "no tool call parser 'none': take one of hermes"),
        ("--reasoning-parser", 2, "no reasoning parser 'none': take one of deepseek_r1"),
        ("--embedding-model", 2, "No embedder named 'none'"),
    ],
)
def test_names_are_checked_before_a_model_loads(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str, status: int, message: str
) -> None:
    monkeypatch.setattr("larder.cli.question_run.load_model", None)  # fails where it is called
    assert message in complaint(run("serve", "--port", "0", option, "none"), status)


def test_store_that_cannot_be_written_is_refused_before_a_model_loads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("larder.cli.question_run.load_model", None)
    message = complaint(run("serve", "--port", "0", "--store", "s3:/bucket"), 2)
    assert (
        "--store 's3:/bucket' has no '://': write 's3://bucket', or './s3:/bucket' for a folder"
        in message
    )
    (tmp_path / "file").touch()
    message = complaint(run("serve", "--port", "0", "--store", tmp_path / "file" / "store"), 1)
    assert f"{tmp_path}/file/store cannot be written (Not a directory): let this user" in message

    def full(self: LocalFileSystem, path: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(LocalFileSystem, "create", full)  # it may have room again
    done = run("serve", "--port", "0", "--store", tmp_path / "store")
    assert isinstance(done.exception, TypeError)  # the model would be loaded
    assert "turns are not durable until the store takes them" in done.stderr
    assert "cannot be written (No space left on device): make room" in done.stderr


@pytest.mark.parametrize("policy", ["exact_question", "finch", "laq", "dapq"])
def test_policies_that_need_a_question_are_refused_before_a_model_loads(
    run: Run, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr("larder.cli.question_run.load_model", None)
    message = complaint(run("serve", "--port", "0", "--policy", policy), 2)
    assert (
        f"--policy {policy} needs the question before prefill" in message
        and "such as kvzip" in message
    )


def test_chat_template_replaces_the_tokenizers(
    run: Run, answered: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}The {{ m.role }} says this: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    run("serve", "--port", "0", "--chat-template", template)
    own = answered.pop("chat").json()["usage"]["prompt_tokens"]
    monkeypatch.setenv("LARDER_HOME", str(tmp_path / "other"))
    done = run("serve", "--port", "0")
    assert done.exit_code == INTERRUPTED_EXIT_CODE, done.stderr
    assert answered["chat"].json()["usage"]["prompt_tokens"] != own


@pytest.mark.parametrize("name", ["fastapi", "uvicorn", "prometheus_client", "msgspec"])
def test_missing_serve_extra_is_named(
    run: Run, answered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In one line, before a port or the model is opened."""
    opened: list[str] = []
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(serve, "local_engine_client", lambda options: opened.append("hub"))
    monkeypatch.setattr(serve, "_listening_socket", lambda options: opened.append("port"))
    message = complaint(run("serve", "--port", "0"), 1)
    assert message == f"'larder serve' needs {name}: pip install 'larder[serve]'."
    assert not (opened or answered)


def test_garbage_collection_skips_loaded_objects(
    run: Run, answered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a full collection goes through the model and all libraries while nobody is answered."""
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    run("serve", "--port", "0")
    assert frozen and answered["/health"].status_code == 200


def test_address_answers_while_the_model_loads(
    run: Run, answered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an orchestrator does not end a process that still measures its model."""
    seen: dict[str, httpx2.Response] = {}
    bind, opened, measure = serve._listening_socket, list[socket.socket](), calibration.calibrate

    def listening(options: serve.ServeOptions) -> socket.socket:
        opened.append(bind(options))
        return opened[-1]

    def slow(*given: Any) -> Any:
        with httpx2.Client(base_url=f"http://127.0.0.1:{opened[0].getsockname()[1]}") as client:
            for name in ("/health", "/live", "/v1/models"):
                seen[name] = client.get(name, timeout=20)
        return measure(*given)

    monkeypatch.setattr(serve, "_listening_socket", listening)
    monkeypatch.setattr(runtime, "calibrate", slow)
    run("serve", "--port", "0", "--policy", "squeeze_attention", "--budget", "64")
    assert {name: reply.status_code for name, reply in seen.items()} == {
        "/health": 503,
        "/live": 200,
        "/v1/models": 503,
    }
    assert seen["/health"].json()["stage"] == "Measuring the model: squeeze"
    assert answered["/health"].status_code == 200
