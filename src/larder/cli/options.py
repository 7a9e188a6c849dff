"""Options that commands share, the decorator `command`, and the group of sub-commands.

A command takes one parameter of an options class; `command` turns its fields into options.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from larder.cli.errors import FileAccessError, Interrupted, print_error
from larder.core.errors import LarderError, MissingWeights


@dataclass(frozen=True)
class OutputOptions:
    """Output of results and errors."""

    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Print an error's traceback.")] = False


@dataclass(frozen=True)
class ModelOptions(OutputOptions):
    """Options of every command that runs a model."""

    model: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="Hugging Face name, local folder, .gguf file, or a name of 'larder model list'.",
        ),
    ] = "seed"
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="SPELLING",
            help="A name or sentence; see 'larder policy list'.  "
            "Default: epicache_pooled; for a document, larder or kvzip.",
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of each cache: 512 (tokens per kv head), 20% or 1/5 of the context "
            "(20% min 64: at least 64 tokens), or 64MiB; each episode has its own cache.  "
            "Default: the policy's, else 20%, at least 128.",
        ),
    ] = None
    block: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens read between two plans.  Default: the smaller of 512 and the budget.",
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, mps.")] = (
        "cpu"
    )
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or auto.  Default: that of the weights where the CPU "
            "is fast at it, else float32."
        ),
    ] = None
    pages: Annotated[
        str,
        typer.Option(
            help="on holds caches in pages of one arena, off does not.  Default: auto, on for CUDA."
        ),
    ] = "auto"
    adapter: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="LoRA adapter of the model, as peft saves it."),
    ] = None
    adapter_mode: Annotated[
        str, typer.Option(help="merged into the weights, or live beside them.")
    ] = "merged"
    seed: Annotated[int, typer.Option(help="Random seed of sampling.")] = 0
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0
    top_k: Annotated[
        int, typer.Option(help="Sample among the K most likely tokens; 0 for all.")
    ] = 0
    top_p: Annotated[float, typer.Option(help="Sample within this share of probability.")] = 1.0


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator for commands: flattens the options class, and turns errors into exit codes."""
    signature = inspect.signature(function, eval_str=True)
    [slot] = [p for p in signature.parameters.values() if _is_options(p.annotation)]
    shared = _parameters(slot.annotation)

    @wraps(function)
    def run(**arguments: Any) -> None:
        options = slot.annotation(**{p.name: arguments.pop(p.name) for p in shared})
        try:
            function(**arguments, **{slot.name: options})
        except MissingWeights as error:
            _exit_with_error(_with_model_named(error, options), options)
        except LarderError as error:
            _exit_with_error(error, options)
        except OSError as error:
            if error.filename is None:
                raise  # of stdout
            _exit_with_error(FileAccessError.of(error), options)
        except KeyboardInterrupt:
            _exit_with_error(Interrupted("interrupted before the first result."), options)

    others = [p for p in signature.parameters.values() if p is not slot]
    run.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*others, *shared)]
    )
    run.__annotations__ = {p.name: p.annotation for p in (*others, *shared)}
    run.__doc__ = _unwrapped(function.__doc__ or "")
    return run


def _unwrapped(docstring: str) -> str:
    """Docstring with a line for each paragraph, which the terminal wraps; tables stay."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(one if "  " in one else one.replace("\n", " ") for one in paragraphs)


def _exit_with_error(error: LarderError, options: OutputOptions) -> None:
    print_error(error, options.json)
    if options.debug:
        raise error
    raise typer.Exit(error.exit_code)


def _with_model_named(error: MissingWeights, options: OutputOptions) -> MissingWeights:
    """Error whose `larder train` trains the model that the command runs, as it runs it."""
    if not isinstance(options, ModelOptions):
        return error
    own, plain = vars(options), vars(ModelOptions())
    words = ["--model", options.model]
    for name in ("device", "dtype", "adapter", "adapter_mode"):
        given = own[name] if isinstance(own[name], list) else [own[name]]  # adapters of a server
        for value in given if own[name] != plain[name] else ():
            words += [f"--{name.replace('_', '-')}", value]
    loading = shlex.join(words)
    message = re.sub("`larder train [^`]+", lambda found: f"{found[0]} {loading}", str(error))
    return MissingWeights(message).with_traceback(error.__traceback__)


def _is_options(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OutputOptions)


def _parameters(kind: type[OutputOptions]) -> list[inspect.Parameter]:
    """Parameters from the fields of an options class; those of `OutputOptions` come last."""
    hints = get_type_hints(kind, include_extras=True)
    base = {f.name for f in fields(OutputOptions)}
    ordered = sorted(fields(kind), key=lambda f: f.name in base)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in ordered
    ]


class HelpGroup(TyperGroup):
    """Group of commands that prints its help if no command is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, `--help` if there are none."""
        return super().parse_args(ctx, args or ["--help"])
