"""Calls of schemas and hostile bodies, and lm-eval's; run by `client_calls.py`."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MODEL, ADAPTED, KEY = "seed", "adapted", "none"
WORDS = ["bread", "salt", "plum"]
SCHEMAS = Path(__file__).parents[1] / "tests/engine/schema_features.json"
HEALTH_SECONDS = 1.0
HEADER_BYTES = 1 << 24  # of an endless header, before the client gives up
MIB = 1 << 20
TOLERANCE = 1e-4  # of log-likelihoods


def schemas(url: str) -> dict[str, Any]:
    """Answers by 32 schemas are valid under jsonschema, or cut; 9 schemas are refused."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from openai import BadRequestError, OpenAI

    found = json.loads(SCHEMAS.read_text())
    whole = 0
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:

        def asked(schema: Any) -> Any:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            messages: Any = [{"role": "user", "content": "Answer in JSON."}]
            given: Any = {"model": MODEL, "messages": messages, "response_format": form}
            return client.chat.completions.create(**given, max_tokens=32).choices[0]

        for schema in found["enforced"].values():
            choice = asked(schema)
            if choice.finish_reason == "stop":
                whole += 1
                kind = validator_for(schema, Draft202012Validator)
                checked = kind(schema, format_checker=kind.FORMAT_CHECKER)
                checked.validate(json.loads(choice.message.content))
        for name, schema in found["refused"].items():
            try:
                asked(schema)
            except BadRequestError:
                continue
            raise AssertionError(f"{name} was not refused")
    assert whole >= len(found["enforced"]) // 2, f"{whole} whole answers"
    return {"whole_answers": whole, "refused": len(found["refused"])}


def hostile(url: str) -> dict[str, Any]:
    """Large bodies, many answers and an endless header delay nobody."""
    from openai import APIStatusError, OpenAI

    with (
        OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
        _slowest_health_reply(url) as slowest,
    ):
        hello: Any = [{"role": "user", "content": "Hello"}]
        large: Any = [{"role": "user", "content": "x" * (60 * MIB)}]
        for given, status in (({"messages": large}, 413), ({"messages": hello, "n": 10**9}, 400)):
            try:
                client.chat.completions.create(model=MODEL, max_tokens=1, **given)
            except APIStatusError as error:
                assert error.status_code == status, error
                continue
            raise AssertionError(f"no {status}")
        sent = _endless_header(url)
        assert sent < HEADER_BYTES, "an endless header was taken"
    assert slowest.value < HEALTH_SECONDS, f"/health took {slowest.value:.2f} s"
    return {"health_seconds": round(slowest.value, 3), "header_bytes": sent}


@contextmanager
def _slowest_health_reply(url: str) -> Iterator[Any]:
    """Longest time of `/health` while the block runs, at every tenth of a second.

    A process of its own asks: here, writing a large body would hold it up.
    """
    processes = multiprocessing.get_context("spawn")
    slowest, has_begun, is_over = processes.Value("d", 0.0), processes.Event(), processes.Event()
    process = processes.Process(target=_watch_health, args=(url, slowest, has_begun, is_over))
    process.start()
    assert has_begun.wait(60)
    try:
        yield slowest
    finally:
        is_over.set()
        process.join()


def _watch_health(url: str, slowest: Any, has_begun: Any, is_over: Any) -> None:
    while not is_over.wait(0.1):
        started = time.monotonic()
        with urllib.request.urlopen(f"{url}/health", timeout=60) as reply:
            reply.read()
        if has_begun.is_set():
            slowest.value = max(slowest.value, time.monotonic() - started)
        has_begun.set()


def _endless_header(url: str) -> int:
    """Bytes of a header that were sent before the server closed the connection."""
    place, sent, part = urlsplit(url), 0, b"a" * 65_536
    assert place.hostname is not None and place.port is not None
    with (
        socket.create_connection((place.hostname, place.port), timeout=30) as connection,
        suppress(OSError),
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        while sent < HEADER_BYTES:
            connection.sendall(part)
            sent += len(part)
    return sent


def other_prompts(url: str) -> dict[str, Any]:
    """The same words with other tools, variables or adapter share no more than their beginnings."""
    from openai import NotFoundError, OpenAI

    def tool(name: str) -> Any:
        return {"type": "function", "function": {"name": name, "description": "Count. " * 9}}

    words = f"{uuid.uuid4().hex}: what do I have?"
    forms: dict[str, tuple[Any, Any]] = {
        "tools": ({"tools": [tool("zero")]}, {"tools": [tool("apple")]}),
        "variables": tuple(
            {"extra_body": {"chat_template_kwargs": {"topic": each}}} for each in ("z", "apple")
        ),
        "adapter": ({"model": MODEL}, {"model": ADAPTED}),
    }
    cached = dict[str, int]()
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:

        def num_cached(name: str, more: Any) -> tuple[int, int]:
            given: Any = {"model": MODEL, "messages": [_user(f"{name} {words}")]} | more
            usage = client.chat.completions.create(**given, max_tokens=2, temperature=0).usage
            return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens

        for name, (one, other) in forms.items():
            num_cached(name, one)
            again, tokens = num_cached(name, one)
            assert again > tokens // 2, f"{name}: {again} of {tokens} tokens cached"
            try:
                cached[name] = num_cached(name, other)[0]
            except NotFoundError:  # a server without the adapter
                continue
            # Beginnings are shared by tokens; the words stand behind what differs.
            assert cached[name] < tokens // 2, f"{name}: {cached[name]} of {tokens} tokens cached"
    return {"cached_tokens_of_others": cached}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def lm_evaluation(url: str) -> dict[str, Any]:
    """Choices, a generation and rolling log-likelihoods of local tasks, batch 1 and 8.

    Returns:
        `likelihoods`: context, continuation, log-likelihood and whether it is the greedy one.
    """
    os.environ.setdefault("OPENAI_API_KEY", KEY)
    one, eight = (_lm_eval_results(url, size) for size in (1, 8))
    assert one.keys() == eight.keys() and len(one) > 12
    for key, value in one.items():
        if isinstance(value, str):
            assert value == eight[key], key
        else:
            assert abs(value[0] - eight[key][0]) < TOLERANCE, key
    scored = [
        [context, continuation, *value]
        for (context, continuation), value in one.items()
        if not isinstance(value, str)
    ]
    return {"likelihoods": scored}


def _lm_eval_results(url: str, batch_size: int) -> dict[tuple[str, str], Any]:
    """Log-likelihood and greediness by context and continuation, or generated text."""
    from lm_eval import simple_evaluate

    texts = ["I have bread and salt.", "The cat sat on the mat.", "One, two, three, four"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "documents.jsonl")
        documents = [{"text": text, "choices": WORDS, "gold": 0, "said": "x"} for text in texts]
        file.write_text("\n".join(map(json.dumps, documents)))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
        data |= {"test_split": "test", "doc_to_text": "{{text}}"}
        until = {"until": ["."], "max_gen_toks": 6, "do_sample": False}
        tasks: list[Any] = [
            data
            | {
                "task": "local_choices",
                "output_type": "multiple_choice",
                "doc_to_choice": "choices",
                "doc_to_target": "gold",
                "metric_list": [{"metric": "acc"}],
            },
            data
            | {
                "task": "local_rolling",
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}],
            },
            data
            | {
                "task": "local_generation",
                "output_type": "generate_until",
                "doc_to_target": "said",
                "generation_kwargs": until,
                "metric_list": [{"metric": "exact_match"}],
            },
        ]
        found = simple_evaluate(
            model="local-completions",
            model_args={
                "base_url": f"{url}/v1/completions",
                "model": MODEL,
                "tokenizer_backend": "remote",
                "num_concurrent": 1,
            },
            tasks=tasks,
            batch_size=batch_size,
            bootstrap_iters=0,
        )
        assert found is not None
        return dict(_answers(found["samples"]))


def _answers(samples: dict[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Answers of the samples of all tasks."""
    for task, result in samples.items():
        for sample in result:
            for place, [answer] in enumerate(sample["resps"]):
                arguments = sample["arguments"][place]
                if task == "local_rolling":
                    yield ("", arguments[0]), (_number(answer), True)
                elif task == "local_choices":
                    value, is_greedy = answer
                    yield (arguments[0], arguments[1]), (float(value), str(is_greedy) == "True")
                else:
                    yield (arguments[0], task), str(answer)


def _number(answer: Any) -> float:
    """Log-likelihood of a rolling answer, with or without its greediness."""
    return float(answer[0] if isinstance(answer, list | tuple) else answer)
