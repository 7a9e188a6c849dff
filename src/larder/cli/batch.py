"""`larder batch`: requests of a file in OpenAI's batch format, answered offline."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.console import progress_console
from larder.cli.errors import INTERRUPTED_EXIT_CODE, print_document
from larder.cli.options import ModelOptions, command
from larder.core.errors import BadParameter, InputError, LarderError, UsageError
from larder.core.memory_budget import BudgetUnit, MemoryBudget

if TYPE_CHECKING:
    from larder.cli.batch_contexts import BatchContexts
    from larder.engine.batch import BatchRequest, BatchResult
    from larder.engine.engine import Engine

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens")
NEUTRAL_FIELDS = {"model", "user", "metadata", "store", "stream", "stop", *LENGTH_FIELDS}
CONTEXT_FIELDS = {"contexts", "context_order"}
FULL_POLICY = "full"


@command
def batch(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="Requests in OpenAI's batch format.")
    ],
    options: ModelOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of the results; requests that it has are skipped.  "
            "Default: FILE.results.jsonl.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of all caches, such as 2GiB.  Default: no limit."),
    ] = None,
) -> None:
    """Answer many requests offline: shared prefixes are read once, answers run together.

    An interrupted run goes on where it ended. A request that fails has its error in the results.
    """
    from larder.cli.batch_contexts import batch_contexts
    from larder.cli.question_run import open_engine

    if options.policy not in (None, FULL_POLICY) or options.budget or options.block:
        raise UsageError(
            "larder batch shares exact prefixes, so that it takes no --policy but full, no "
            "--budget and no --block: leave them out, or use larder serve."
        )
    max_bytes = _memory_bytes(memory)
    lines = _read_lines(file)
    results = ResultFile(out or file.with_suffix(".results.jsonl"))
    engine = open_engine(_full(options))
    done = results.names()
    # Orders are those of the whole file, also where an interrupted run goes on.
    pairs = zip(lines, batch_contexts(lines), strict=True)
    left = [(line, contexts) for line, contexts in pairs if line["custom_id"] not in done]
    read_tokens = _run(engine, left, options, max_bytes, results)
    _print_summary(len(lines), len(left), read_tokens, results, options)


def _print_summary(
    num_requests: int,
    num_answered: int,
    read_tokens: int,
    results: ResultFile,
    options: ModelOptions,
) -> None:
    if options.json:
        print_document(
            {
                "schema": 1,
                "requests": num_requests,
                "skipped": num_requests - num_answered,
                "failed": results.num_failed,
                "prompt_tokens": results.num_prompt_tokens,
                "read_tokens": read_tokens,
                "results": str(results.path),
            }
        )
        return
    progress_console().print(
        f"{num_answered} requests, {results.num_failed} failed; read {read_tokens:,} of "
        f"{results.num_prompt_tokens:,} prompt tokens; results in {results.path}"
    )


class ResultFile:
    """Lines of results, one per request, appended as they are complete.

    A line that was cut by an interruption is removed, and its request answered again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failed = self.num_prompt_tokens = 0

    def names(self) -> set[str]:
        """Names of the requests that have a result.

        Raises:
            InputError: the file holds something else.
        """
        if not self.path.exists():
            return set()
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self.path.write_bytes(whole)
        try:
            return {json.loads(line)["custom_id"] for line in whole.splitlines()}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.path} holds no results of a batch: name another file with --out."
            ) from error

    def add(self, name: str, response: dict[str, Any] | None, error: Any) -> None:
        """Append the result of a request."""
        line = {"id": f"batch_req_{name}", "custom_id": name, "response": response, "error": error}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def fail(self, name: str, error: LarderError) -> None:
        """Append the error of a request."""
        self.num_failed += 1
        message = {"message": str(error), "type": "invalid_request_error", "param": None}
        response = {"status_code": 400, "request_id": name, "body": {"error": message}}
        self.add(name, response, {"code": "invalid_request", "message": str(error)})


def _run(
    engine: Engine,
    lines: Sequence[tuple[Mapping[str, Any], BatchContexts]],
    options: ModelOptions,
    max_bytes: int | None,
    results: ResultFile,
) -> int:
    """Answer requests; the number of prompt tokens that were read."""
    from larder.engine.batch import BatchRunner

    urls = {line["custom_id"]: line["url"] for line, _ in lines}

    def note(result: BatchResult) -> None:
        name = result.request.name
        body = _body(result, urls[name], engine.loaded.name)
        results.add(name, {"status_code": 200, "request_id": name, "body": body}, None)

    requests = list[Any]()
    for line, contexts in lines:
        try:
            requests.append(_request(engine, line, contexts, options))
        except LarderError as error:
            results.fail(line["custom_id"], error)
    results.num_prompt_tokens = sum(len(each.ids) for each in requests)
    runner = BatchRunner(
        engine.loaded.decoder,
        engine.tokenizer.decode,
        engine.stop_ids,
        max_bytes,
        note,
        lambda request, error: results.fail(request.name, error),
    )
    try:
        runner.run(requests)
    except KeyboardInterrupt:
        print("larder: interrupted; the same command goes on with the rest.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    return runner.num_read_tokens


def _request(
    engine: Engine, line: Mapping[str, Any], contexts: BatchContexts, options: ModelOptions
) -> BatchRequest:
    """Request of a line.

    Args:
        contexts: texts in front of its first message of the user.

    Raises:
        InputError: a field is missing, unknown or of the wrong type.
        BadParameter: a value is out of range.
    """
    from larder.engine.batch import BatchRequest
    from larder.engine.generate import StoppingCriteria
    from larder.engine.sampler import SamplingParams

    body, is_chat = line["body"], line["url"] == CHAT_URL
    field = "messages" if is_chat else "prompt"
    sampling = {each.name for each in fields(SamplingParams)} - {"logit_bias"}
    known = NEUTRAL_FIELDS | sampling | {field} | (CONTEXT_FIELDS if is_chat else set[str]())
    if unknown := sorted(name for name in body.keys() - known if body[name] is not None):
        raise InputError(f"{', '.join(unknown)} is not supported in a batch: leave it out.")
    if field not in body:
        raise InputError(f"The body has no {field}: give it.")
    if is_chat:
        ids = _chat_ids(engine, body[field], contexts.text())
    else:
        ids = _text_ids(engine, body[field])
    given = {name: body[name] for name in sampling if body.get(name) is not None}
    defaults = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
    }
    lengths = [body[name] for name in LENGTH_FIELDS if body.get(name) is not None]
    longest = lengths[0] if lengths else options.max_new_tokens
    if type(longest) is not int:
        raise BadParameter(f"max_tokens must be a number of tokens, got {longest!r}.")
    StoppingCriteria(longest)
    return BatchRequest(
        line["custom_id"],
        ids,
        SamplingParams(**{**defaults, **given}),
        longest,
        _stop_strings(body.get("stop")),
    )


def _chat_ids(engine: Engine, messages: Any, opening: str) -> tuple[int, ...]:
    """Tokens of messages behind a text in front of the first one of the user."""
    from larder.session.files import conversation_of
    from larder.session.transcript.chat_template import TemplateMessage

    for number, message in enumerate(messages if isinstance(messages, list) else (), start=1):
        if isinstance(message, dict) and message.get("contexts"):
            raise InputError(
                f"Message {number} has contexts, but a batch reads those of the body alone: send "
                "them in the text of the message."
            )
    parsed = conversation_of(messages).messages
    turns = [TemplateMessage(each.role, each.content) for each in parsed]
    if opening:
        first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
        if first is None:
            raise InputError("Contexts stand in front of a message of the user: send one.")
        turns[first] = replace(turns[first], content=opening + turns[first].content)
    return engine.tokenizer.encode(engine.tokenizer.render_messages(turns))


def _text_ids(engine: Engine, prompt: Any) -> tuple[int, ...]:
    from larder.session.files.json_fields import valid_unicode

    if not isinstance(prompt, str) or not prompt:
        raise InputError(f"prompt must be a text, got {prompt!r}.")
    return engine.tokenizer.encode(valid_unicode(prompt, "prompt"))


def _stop_strings(stop: Any) -> tuple[str, ...]:
    """Stop strings. Raise InputError if `stop` is neither a text nor a list of texts."""
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise InputError(f"stop must be a text or a list of texts, got {stop!r:.80}.")
    return tuple(stops)


def _body(result: BatchResult, url: str, model: str) -> dict[str, Any]:
    """Body of a response, as the server sends it."""
    read, new = len(result.request.ids), len(result.ids)
    is_chat = url == CHAT_URL
    message = {"message": {"role": "assistant", "content": result.text}}
    choice = message if is_chat else {"text": result.text}
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{result.request.name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": result.reason}],
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        },
    }


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Requests of a file, checked line by line.

    Raises:
        InputError: the file cannot be read, or a line is no request.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): name a .jsonl file.") from error
    lines = list(_numbered(path, text, _checked_line))
    names = Counter(line["custom_id"] for line in lines)
    if twice := [name for name, count in names.items() if count > 1]:
        raise InputError(f"{path} has the custom_id {twice[0]!r} twice: give each its own.")
    if not lines:
        raise InputError(f"{path} holds no requests: write one JSON object per line.")
    return lines


def _object_of(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"not JSON ({error}); write a request as one JSON object.") from error


def _numbered(
    path: Path, text: str, check: Callable[[Any], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield check(_object_of(line))
        except (ValueError, InputError) as error:
            raise InputError(f"{path}, line {number}: {error}") from error


def _checked_line(line: Any) -> dict[str, Any]:
    """The line. Raise InputError if it is no request in OpenAI's batch format."""
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        raise InputError("a request is an object with a custom_id: write it so.")
    if line.get("method", "POST") != "POST" or line.get("url") not in (CHAT_URL, TEXT_URL):
        raise InputError(f"url must be {CHAT_URL} or {TEXT_URL}, with the method POST.")
    if not isinstance(line.get("body"), dict):
        raise InputError("a request has a body, as the endpoint takes it.")
    return line


def _memory_bytes(memory: str | None) -> int | None:
    """Bytes of `--memory`. Raise UsageError if it is not a number of bytes."""
    if memory is None:
        return None
    amount = MemoryBudget.parse(memory, "--memory")
    if amount.unit is not BudgetUnit.BYTES:
        raise UsageError(f"--memory must be bytes, such as 2GiB, got {memory}.")
    return int(amount.number)


def _full(options: ModelOptions) -> ModelOptions:
    return replace(options, policy=FULL_POLICY)
