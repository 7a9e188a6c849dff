"""`larder train`: weights of a learned method for one model, and the labels for them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.console import make_table, results_console
from larder.cli.errors import SCHEMA, print_document
from larder.cli.options import OutputOptions, command
from larder.core.errors import UnknownName, UsageError
from larder.core.registry import unknown_name_message

if TYPE_CHECKING:
    from larder.models.learned_weights import Card, LearnedWeights
    from larder.models.loader import LoadedModel
    from larder.training.corpus import Corpus
    from larder.training.labels import LabelFile

LABELS = "labels"  # makes the label file alone
PREDICTIVE, KVTC = "predictive", "kvtc"  # codecs; read texts without labels
CARTRIDGE = "cartridge"  # stands for one text
TEST_TOKENS = 6000  # of each split
SLOTS = 256  # of a cartridge
MethodName = Annotated[
    str,
    typer.Argument(
        metavar="METHOD",
        help="kvzap, kvzap_mlp, fast_kvzip or locret; labels, which these begin with; trim, "
        "global_retention, attention_gate, aqua, duo_attention, lookahead_kv, less, lococo or "
        "restorekv, which need none; predictive or kvtc, for codecs of those names; or cartridge, "
        "for one FILE.",
    ),
]
CartridgeText = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="Text that a cartridge stands for, as FILE of `ask`."),
]


@dataclass(frozen=True)
class TrainOptions(OutputOptions):
    """Options of `larder train`."""

    model: Annotated[str, typer.Option(metavar="NAME_OR_PATH", help="As --model of `ask`.")] = (
        "seed"
    )
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Texts and transcripts; what stands in it is a source.  "
            "Default: the bundled text.",
        ),
    ] = None
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Source to test with alone.  Default: the last by name."
        ),
    ] = None
    tokens: Annotated[
        int,
        typer.Option(
            help="Labelled tokens, of all splits; without labels, tokens to train on at most."
        ),
    ] = 40_000
    passage_tokens: Annotated[int, typer.Option(help="Tokens that are read together.")] = 768
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take published weights (.safetensors) instead of training."
        ),
    ] = None
    test_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens to test a method without labels with, of each split; 0 for no test.  "
            "With --weights: tests them, and adds what is measured to their card.  "
            f"Default: {TEST_TOKENS}, of --weights none."
        ),
    ] = None
    slots: Annotated[
        int | None,
        typer.Option(help=f"Entries of a cartridge, of each layer and kv head.  Default: {SLOTS}."),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0
    device: Annotated[str, typer.Option(help="Device of the model.")] = "cpu"
    dtype: Annotated[str | None, typer.Option(help="As of `ask`.")] = None
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="LoRA adapter of the model, as of `ask`.")
    ] = None
    adapter_mode: Annotated[str, typer.Option(help="As of `ask`.")] = "merged"


@command
def train(method: MethodName, options: TrainOptions, file: CartridgeText = None) -> None:
    """Train the weights of METHOD for a model, and test them on documents that were left out.

    Labels are made once, and go on where they were interrupted. Weights are kept under LARDER_HOME
    by the model's fingerprint: take the device, dtype and adapter that the model will run with.
    """
    _check_known(method)
    _check_file(method, file)
    _check_test_tokens(method, options.test_tokens)
    _check_unused(method, options)
    loaded = _load(options)
    if method == LABELS:
        _print_labels(_labels(loaded, options), loaded, options)
    elif method in (PREDICTIVE, KVTC):
        _print_card(*_train_codec(method, loaded, options), options)
    elif file is not None:
        _print_card(*_train_cartridge(loaded, file, options), options)
    else:
        _print_card(*_train_weights(method, loaded, options), options)


def _check_known(method: str) -> None:
    from larder.training import METHODS, PASSAGE_METHODS

    known = [*METHODS.names(), *PASSAGE_METHODS.names(), LABELS, PREDICTIVE, KVTC, CARTRIDGE]
    if method not in known:
        raise UnknownName(unknown_name_message("method to train", method, known))


def _check_file(method: str, file: Path | None) -> None:
    """Raise UsageError if a cartridge has no text, or another method has one."""
    if method == CARTRIDGE and file is None:
        raise UsageError("A cartridge stands for one text: name its FILE.")
    if method != CARTRIDGE and file is not None:
        raise UsageError(
            f"{method} is trained on a corpus, not on {file}: give --corpus FOLDER, or train a "
            "cartridge."
        )


def _check_test_tokens(method: str, test_tokens: int | None) -> None:
    """Raise UsageError if the method is tested on the labels that it is trained on, or on none."""
    from larder.training import PASSAGE_METHODS

    if test_tokens is not None and method not in PASSAGE_METHODS:
        raise UsageError(
            f"--test-tokens is for methods without labels ({', '.join(PASSAGE_METHODS.names())}), "
            f"not for {method}: leave it out."
        )


def _check_unused(method: str, options: TrainOptions) -> None:
    """Raise UsageError if an option says nothing to the method."""
    if options.slots is not None and method != CARTRIDGE:
        raise UsageError(f"--slots is for a cartridge, not for {method}: leave it out.")
    if options.weights is not None and method in (LABELS, PREDICTIVE, KVTC, CARTRIDGE):
        raise UsageError(
            f"--weights takes published weights of a method with gates, not of {method}: leave it "
            "out."
        )


def _load(options: TrainOptions) -> LoadedModel:
    from larder.engine.progress_bar import progress_bar
    from larder.models.loader import load

    return load(
        options.model,
        options.device,
        options.dtype,
        adapter=options.adapter,
        adapter_mode=options.adapter_mode,
        stage=progress_bar,
    )


def _corpus(options: TrainOptions) -> Corpus:
    from larder.training.corpus import read_corpus

    return read_corpus(options.corpus, options.held_out)


def _labels(loaded: LoadedModel, options: TrainOptions) -> LabelFile:
    from larder.engine.progress_bar import progress_bar
    from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
    from larder.training.labels import LabelSettings, make_labels

    settings = LabelSettings(options.tokens, options.passage_tokens, options.seed)
    texts, adapter = _corpus(options), TokenizerAdapter(loaded.tokenizer)
    with progress_bar(f"Labelling with {options.model}", "tokens") as update:
        return make_labels(loaded.decoder, adapter, texts, settings, update)


def _train_weights(method: str, loaded: LoadedModel, options: TrainOptions) -> tuple[Card, Path]:
    """Card and file of weights of a method, published or trained."""
    from larder.models.learned_weights import learned_file
    from larder.training import PASSAGE_METHODS, adopt_published

    if options.weights is not None:
        learned = adopt_published(options.weights, method, loaded.decoder.spec)
        if options.test_tokens:
            learned = _tested_on_passages(method, loaded, options, learned)
    elif method in PASSAGE_METHODS:
        learned = _trained_on_passages(method, loaded, options)
    else:
        learned = _trained_on_labels(method, loaded, options)
    path = learned_file(loaded.decoder.spec.fingerprint, method)
    learned.save(path)
    return learned.card, path


def _trained_on_labels(method: str, loaded: LoadedModel, options: TrainOptions) -> LearnedWeights:
    from larder.engine.progress_bar import progress_bar
    from larder.training.base import METHODS, train

    labels = _labels(loaded, options)
    with progress_bar(f"Training {method}", "layers") as update:
        return train(METHODS.load(method)(), labels, loaded.decoder.spec, options.seed, update)


def _trained_on_passages(method: str, loaded: LoadedModel, options: TrainOptions) -> LearnedWeights:
    from larder.engine.progress_bar import progress_bar
    from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
    from larder.training.passage_method import PASSAGE_METHODS, PassageLimits, train_on_passages

    tested = TEST_TOKENS if options.test_tokens is None else options.test_tokens
    limits = PassageLimits(options.tokens, tested, options.passage_tokens, options.seed)
    texts, adapter = _corpus(options), TokenizerAdapter(loaded.tokenizer)
    with progress_bar(f"Training {method}", "steps") as update:
        part = PASSAGE_METHODS.load(method)()
        return train_on_passages(part, loaded.decoder, adapter, texts, limits, update)


def _tested_on_passages(
    method: str, loaded: LoadedModel, options: TrainOptions, learned: LearnedWeights
) -> LearnedWeights:
    """Weights with metrics on the documents that a training would leave out."""
    from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
    from larder.training.passage_method import PASSAGE_METHODS, PassageLimits, measure_on_passages

    limits = PassageLimits(
        test_tokens=options.test_tokens or 0,
        passage_tokens=options.passage_tokens,
        seed=options.seed,
    )
    part, adapter = PASSAGE_METHODS.load(method)(), TokenizerAdapter(loaded.tokenizer)
    return measure_on_passages(part, loaded.decoder, adapter, _corpus(options), limits, learned)


def _train_codec(method: str, loaded: LoadedModel, options: TrainOptions) -> tuple[Card, Path]:
    """Card and file of tables of a codec."""
    from larder.cache.table_file import CARD, tables_path
    from larder.engine.progress_bar import progress_bar
    from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
    from larder.training.kvtc import KvtcSettings, train_kvtc
    from larder.training.predictive import PredictiveSettings, train_predictive

    texts, adapter, seed = _corpus(options), TokenizerAdapter(loaded.tokenizer), options.seed
    with progress_bar(f"Reading with {options.model}", "tokens") as update:
        if method == KVTC:
            own = KvtcSettings(tokens=options.tokens, seed=seed)
            tables, card = train_kvtc(loaded.decoder, adapter, texts, own, update)
        else:
            settings = PredictiveSettings(tokens=options.tokens, seed=seed)
            tables, card = train_predictive(loaded.decoder, adapter, texts, settings, update)
    path = tables_path(loaded.decoder.spec.fingerprint, method)
    tables.save(path, {CARD: card.dumps()})
    _report_negative_r2(card)
    return card, path


def _report_negative_r2(card: Card) -> None:
    """Report on stderr tables that predict documents left out worse than a mean does."""
    shares = {
        name: number
        for name, number in card.metrics.items()
        if name.endswith(("keys_r2", "values_r2"))
    }
    if negative := {name: number for name, number in shares.items() if number < 0}:
        found = ", ".join(
            f"{name.replace('_', ' ')} {number:g}" for name, number in negative.items()
        )
        print(
            f"larder: {card.method} predicts documents left out worse than their mean ({found}), "
            "so that caches would be coded badly: train on texts like yours, --corpus FOLDER, or "
            "on more --tokens.",
            file=sys.stderr,
        )


def _train_cartridge(loaded: LoadedModel, file: Path, options: TrainOptions) -> tuple[Card, Path]:
    """Card and file of the cartridge of a text."""
    from larder.engine.engine import Engine
    from larder.engine.progress_bar import progress_bar
    from larder.models.cartridges import cartridge_path
    from larder.session.files import read_conversation
    from larder.training.cartridge import CartridgeSettings, train_cartridge

    slots = SLOTS if options.slots is None else options.slots
    settings = CartridgeSettings(slots=slots, seed=options.seed)
    conversation, engine = read_conversation(file), Engine(loaded, policy="full")
    with progress_bar(f"Training a cartridge of {file.name}", "steps") as update:
        learned, ids = train_cartridge(engine, conversation, settings, update)
    path = cartridge_path(loaded.decoder.spec.fingerprint, ids, slots)
    learned.save(path)
    return learned.card, path


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
        document = {"schema": SCHEMA, "model_fingerprint": fingerprint, "labels": labels.digest}
        print_document({**document, "splits": rows})
        return
    table = make_table("split", "documents", "passages", "tokens", texts=1)
    for name, counts in rows.items():
        table.add_row(name.replace("_", " "), *(str(count) for count in counts.values()))
    results_console().print(table)
