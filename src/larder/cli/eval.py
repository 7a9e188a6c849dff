"""`larder eval`: ask the questions that files carry, and score the answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from larder.cli.errors import INTERRUPTED_EXIT_CODE, print_document
from larder.cli.options import ModelOptions, command

TOO_FEW_FILES = 2  # files: half of all resamples draw one of them twice


@command
def evaluate(
    file: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Conversations with questions, or folders of them."),
    ],
    options: ModelOptions,
    against: Annotated[
        str | None,
        typer.Option(metavar="SPELLING", help="Compare with this policy, question by question."),
    ] = None,
    adversarial: Annotated[
        bool, typer.Option("--adversarial", help="Include LoCoMo's unanswerable questions.")
    ] = False,
) -> None:
    """Answer every question of FILE independently and score exact match and F1.

    Over several files, means have bootstrap intervals from resampling whole files; use three files
    or more.
    """
    from larder.cli.evaluation import evaluate_files, load_question_files
    from larder.session.files import Adversarial

    files = load_question_files(file, Adversarial.ASKED if adversarial else Adversarial.LEFT_OUT)
    evaluation = evaluate_files(options, against, files)
    if options.json:
        from larder.cli.json_documents import evaluation_document

        print_document(evaluation_document(evaluation))
    else:
        from larder.cli.evaluation import print_evaluation

        print_evaluation(evaluation)
    if evaluation.scored == TOO_FEW_FILES:
        print(
            "larder: an interval over two files only spans their two means: give three files or "
            "more.",
            file=sys.stderr,
        )
    if not evaluation.is_whole:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
