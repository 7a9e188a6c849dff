"""`larder plot`: figures from result files; nothing is measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.console import results_console
from larder.cli.errors import SCHEMA, print_document
from larder.cli.options import OutputOptions, command
from larder_bench.cli.bench_options import check_extra

if TYPE_CHECKING:
    from larder_bench.plots.style import Drawing, ImageFormat


Files = Annotated[
    list[Path],
    typer.Argument(metavar="RESULTS...", help="JSONL files of 'larder bench', or folders of them."),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only this policy; give it several times.  Default: all."),
]
FigureNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIGURE",
        help="quality, grid, memory, latency, budgets, similarity, prompt_curve, clusters, "
        "recall or eviction, with parameters as in 'quality(score=\"f1\")'; give it several "
        "times.  Default: all that RESULTS suffice for.",
    ),
]


@command
def plot(
    results: Files,
    options: OutputOptions,
    figure: FigureNames = None,
    policy: Policies = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the figures, created if missing.")
    ] = Path("figures"),
    format: Annotated[
        str, typer.Option(metavar="FORMATS", help="svg, png, or both separated by a comma.")
    ] = "svg,png",
) -> None:
    """Draw figures from RESULTS; no model is loaded, and equal results give equal SVG files."""
    check_extra("plot")
    from larder.core import InputError
    from larder_bench.plots.figure_selection import (
        draw_all,
        draw_figures,
        load_results,
        parse_figure,
    )

    formats = _formats(format)
    figures = [parse_figure(spelling) for spelling in figure or ()]
    loaded, styles = load_results(results, policy or ())
    drawings = draw_figures(figures, loaded, styles) if figures else draw_all(loaded, styles)
    if not drawings:
        raise InputError(
            "The results suffice for no figure: 'larder report' shows what is in them."
        )
    written = [
        (one, _save_drawing(drawings, index, out, formats)) for index, one in enumerate(drawings)
    ]
    if options.json:
        documents = [
            {"figure": one.name, "title": one.title, "caption": one.caption, "files": files}
            for one, files in written
        ]
        print_document({"schema": SCHEMA, "figures": documents})
        return
    console = results_console()
    for _, files in written:
        for file in files:
            console.print(file, soft_wrap=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, creating its folder if missing.

    Raises:
        InputError: it cannot be written.
    """
    from larder.core import InputError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): name another place with --out."
        ) from error


def _save_drawing(
    drawings: list[Drawing], number: int, out: Path, formats: list[ImageFormat]
) -> list[str]:
    """Save one drawing and return its files; a repeated name gets a number."""
    name = drawings[number].name
    before = sum(other.name == name for other in drawings[:number])
    stem = f"{name}-{before + 1}" if before else name
    files = [out / f"{stem}.{form.value}" for form in formats]
    for file, form in zip(files, formats, strict=True):
        write_file(file, drawings[number].save(form))
    return [str(file) for file in files]


def _formats(text: str) -> list[ImageFormat]:
    from larder.core import UsageError
    from larder_bench.plots.style import ImageFormat

    known = {form.value: form for form in ImageFormat}
    names = list(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"--format takes {' and '.join(known)}, got {', '.join(map(repr, unknown))}."
        )
    return [known[name] for name in names]


@command
def report(
    results: Files,
    options: OutputOptions,
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML file to write.")] = Path(
        "report.html"
    ),
    title: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Title of the page.  Default: the studies' names."),
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
    """Write one self-contained HTML page about RESULTS."""
    check_extra("report")
    from larder_bench.plots.report import render_report

    page = render_report(results, policy or (), title or "", against)
    write_file(out, page.encode())
    if options.json:
        print_document({"schema": SCHEMA, "report": str(out)})
        return
    results_console().print(str(out), soft_wrap=True)
