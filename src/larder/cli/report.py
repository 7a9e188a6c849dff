"""`larder report`: one page with tables, figures, commands and the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from larder.cli.failing import SCHEMA, print_document
from larder.cli.options import Output, command
from larder.cli.plot import Files, Policies, save
from larder.cli.showing import results as results_console


@command
def report(
    results: Files,
    options: Output,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of the page.  Default: the studies' names.")
    ] = None,
    policy: Policies = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Compare all policies with this one; give it several times.  "
            "Default: random, h2o and h2o_blockwise, where RESULTS have them.",
        ),
    ] = None,
) -> None:
    """Write one page about RESULTS that opens anywhere: nothing is loaded from elsewhere."""
    from larder.plots.report import render

    page = render(results, policy or (), title or "", against)
    save(out, page.encode())
    if options.json:
        print_document({"schema": SCHEMA, "report": str(out)})
        return
    results_console().print(str(out), soft_wrap=True)
