"""`larder plot`: figures from result files; nothing is measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.failing import SCHEMA, print_document
from larder.cli.options import Output, command
from larder.cli.showing import results as results_console

if TYPE_CHECKING:
    from larder.plots.style import Drawing, Format

Files = Annotated[
    list[Path],
    typer.Argument(metavar="RESULTS...", help="JSONL files of 'larder bench', or folders of them."),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only this policy; give it several times.  Default: all."),
]


@command
def plot(
    results: Files,
    options: Output,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE",
            help="quality, grid, memory, latency, budgets, similarity, prompt_curve, clusters, "
            "recall or eviction, with parameters as in 'quality(score=\"f1\")'; give it several "
            "times.  Default: all that RESULTS suffice for.",
        ),
    ] = None,
    policy: Policies = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where figures go, made if there is none.")
    ] = Path("figures"),
    format: Annotated[
        str, typer.Option(metavar="FORMATS", help="svg, png, or both with a comma between.")
    ] = "svg,png",
) -> None:
    """Draw figures from RESULTS; no model is loaded, and equal results give equal SVG files."""
    from larder.core.errors import InputError
    from larder.plots.drawing import draw, draw_all, figure_of, read

    formats = _formats(format)
    wanted = [figure_of(spelling) for spelling in figure or ()]
    found, looks = read(results, policy or ())
    drawings = draw(wanted, found, looks) if wanted else draw_all(found, looks)
    if not drawings:
        raise InputError("The results suffice for no figure: 'larder report' says what is in them.")
    written = [(one, _save(drawings, number, out, formats)) for number, one in enumerate(drawings)]
    if options.json:
        told = [
            {"figure": one.name, "title": one.title, "caption": one.caption, "files": files}
            for one, files in written
        ]
        print_document({"schema": SCHEMA, "figures": told})
        return
    console = results_console()
    for _, files in written:
        for file in files:
            console.print(file, soft_wrap=True)


def save(path: Path, content: bytes) -> None:
    """Write a file, in a folder that is made if there is none.

    Raises:
        InputError: it cannot be written.
    """
    from larder.core.errors import InputError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): name another place with --out."
        ) from error


def _save(drawings: list[Drawing], number: int, out: Path, formats: list[Format]) -> list[str]:
    """The files of one drawing; of two with one name the second has a number."""
    name = drawings[number].name
    before = sum(other.name == name for other in drawings[:number])
    stem = f"{name}-{before + 1}" if before else name
    files = [out / f"{stem}.{form.value}" for form in formats]
    for file, form in zip(files, formats, strict=True):
        save(file, drawings[number].save(form))
    return [str(file) for file in files]


def _formats(text: str) -> list[Format]:
    from larder.core.errors import UsageError
    from larder.plots.style import Format

    known = {form.value: form for form in Format}
    names = list(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"--format takes {' and '.join(known)}, got {', '.join(map(repr, unknown))}."
        )
    return [known[name] for name in names]
