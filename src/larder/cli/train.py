"""`larder train`: weights of a learned method for one model, and the labels for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.console import make_table, results_console
from larder.cli.errors import SCHEMA, print_document
from larder.cli.options import OutputOptions, command
from larder.core.errors import UnknownName
from larder.core.family import unknown_name_message

if TYPE_CHECKING:
    from larder.models.learned_weights import Card, LearnedWeights
    from larder.models.loader import LoadedModel
    from larder.training.labels import LabelFile

LABELS = "labels"  # makes the label file alone
PREDICTIVE = "predictive"  # reads texts without labels


@command
def train(
    options: OutputOptions,
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="kvzap, kvzap_mlp, fast_kvzip or locret; labels, which these begin with; or "
            "predictive, for the codecs of that name.",
        ),
    ],
    model: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="As --model of `ask`.")
    ] = "seed",
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Texts and transcripts; what stands in it is a source.  "
            "Default: the bundled text.",
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Source to test with alone.  Default: the last by name."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Labelled tokens, of all splits.")] = 40_000,
    passage_tokens: Annotated[int, typer.Option(help="Tokens of a labelled text.")] = 768,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take published weights (.safetensors) instead of training."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="As of `ask`.")] = None,
) -> None:
    """Train the weights of METHOD for a model, and test them on documents that were left out.

    Labels are made once, and go on where they were interrupted. Weights are kept under LARDER_HOME
    by the model's fingerprint: take the device and dtype that the model will run with.
    """
    from larder.training.base import METHODS

    known = METHODS.names()
    others = [LABELS, PREDICTIVE]
    if method not in (*known, *others):
        raise UnknownName(unknown_name_message("method to train", method, [*known, *others]))
    loaded = _load(model, device, dtype)
    if method == PREDICTIVE:
        _train_predictive(loaded, model, corpus, held_out, tokens, seed, options)
        return
    if weights is not None and method != LABELS:
        from larder.training.base import adopt_published

        learned = adopt_published(weights, method, loaded.decoder.spec)
        _save_and_print(learned, method, loaded, options)
        return
    labels = _labels(loaded, model, corpus, held_out, tokens, passage_tokens, seed)
    if method == LABELS:
        _print_labels(labels, loaded, options)
    else:
        _save_and_print(_trained(method, labels, loaded, seed), method, loaded, options)


def _load(model: str, device: str, dtype: str | None) -> LoadedModel:
    from larder.engine.progress_bar import progress_bar
    from larder.models.loader import load

    return load(model, device, dtype, stage=progress_bar)


def _labels(
    loaded: LoadedModel,
    model: str,
    corpus: Path | None,
    held_out: str | None,
    tokens: int,
    passage_tokens: int,
    seed: int,
) -> LabelFile:
    from larder.engine.progress_bar import progress_bar
    from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
    from larder.training.corpus import read_corpus
    from larder.training.labels import LabelSettings, make_labels

    settings = LabelSettings(tokens, passage_tokens, seed)
    texts, adapter = read_corpus(corpus, held_out), TokenizerAdapter(loaded.tokenizer)
    with progress_bar(f"Labelling with {model}", "tokens") as update:
        return make_labels(loaded.decoder, adapter, texts, settings, update)


def _trained(method: str, labels: LabelFile, loaded: LoadedModel, seed: int) -> LearnedWeights:
    from larder.engine.progress_bar import progress_bar
    from larder.training.base import METHODS, train

    with progress_bar(f"Training {method}", "layers") as update:
        return train(METHODS.load(method)(), labels, loaded.decoder.spec, seed, update)


def _train_predictive(
    loaded: LoadedModel,
    model: str,
    corpus: Path | None,
    held_out: str | None,
    tokens: int,
    seed: int,
    options: OutputOptions,
) -> None:
    """Predictions across layers, fitted, saved and described."""
    from larder.cache.predictive_tables import predictive_path
    from larder.engine.progress_bar import progress_bar
    from larder.models.learned_weights import CARD
    from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
    from larder.training.corpus import read_corpus
    from larder.training.predictive import PredictiveSettings, train_predictive

    texts, adapter = read_corpus(corpus, held_out), TokenizerAdapter(loaded.tokenizer)
    settings = PredictiveSettings(tokens=tokens, seed=seed)
    with progress_bar(f"Reading with {model}", "tokens") as update:
        tables, card = train_predictive(loaded.decoder, adapter, texts, settings, update)
    path = predictive_path(loaded.decoder.spec.fingerprint)
    tables.save(path, {CARD: card.dumps()})
    _print_card(card, path, options)


def _save_and_print(
    learned: LearnedWeights, method: str, loaded: LoadedModel, options: OutputOptions
) -> None:
    from larder.models.learned_weights import learned_file

    path = learned_file(loaded.decoder.spec.fingerprint, method)
    learned.save(path)
    _print_card(learned.card, path, options)


def _print_card(card: Card, path: Path, options: OutputOptions) -> None:
    if options.json:
        print_document({"schema": SCHEMA, "file": str(path), "card": dict(vars(card))})
        return
    table = make_table("metric", card.method, texts=1)
    for name, number in card.metrics.items():
        table.add_row(name.replace("_", " "), f"{number:g}")
    console = results_console()
    console.print(table)
    console.print(f"\n{path}", soft_wrap=True)


def _print_labels(labels: LabelFile, loaded: LoadedModel, options: OutputOptions) -> None:
    from larder.training.corpus import CorpusSplit

    rows = {
        split.value: {
            "documents": len({shard.document for shard in labels.of_split(split)}),
            "passages": len(labels.of_split(split)),
            "tokens": labels.tokens(split),
        }
        for split in CorpusSplit
    }
    if options.json:
        fingerprint = loaded.decoder.spec.fingerprint
        told = {"schema": SCHEMA, "model_fingerprint": fingerprint, "labels": labels.digest}
        print_document({**told, "splits": rows})
        return
    table = make_table("split", "documents", "passages", "tokens", texts=1)
    for name, counts in rows.items():
        table.add_row(name.replace("_", " "), *(str(count) for count in counts.values()))
    results_console().print(table)
