"""`larder policy`: what parts and presets there are, generated from their files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.console import make_table, results_console
from larder.cli.errors import SCHEMA, print_document
from larder.cli.options import HelpGroup, OutputOptions, command

if TYPE_CHECKING:
    from larder.cli.part_docs import Citation, PartDoc, PresetDoc

NO_PAPER = "no paper"

app = typer.Typer(cls=HelpGroup, help="List, show and cite policies and their parts.")


@app.command("list")
@command
def list_all(options: OutputOptions) -> None:
    """List every preset and every part, with its slot and its papers."""
    from larder.cli.part_docs import part_docs, preset_docs

    parts, presets = part_docs(), preset_docs()
    if options.json:
        listed = [preset.record() for preset in presets]
        told = {"presets": listed, "parts": [asdict(part) for part in parts]}
        print_document({"schema": SCHEMA, **told})
        return
    console = results_console()
    short = make_table("preset", "sentence", texts=2)
    for preset in presets:
        short.add_row(preset.name, preset.sentence)
    console.print(short)
    console.print()
    long = make_table("part", "slot", "what it is for", "papers", texts=4)
    for part in parts:
        papers = "; ".join(citation.short for citation in part.citations)
        long.add_row(part.name, part.slot, part.summary, papers or NO_PAPER)
    console.print(long)
    console.print(
        "\nlarder policy show NAME tells more about one, larder policy cite NAME its papers."
    )


@app.command("show")
@command
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a part or preset.")],
    options: OutputOptions,
) -> None:
    """Show what a part takes and what a preset stands for; some names are both."""
    from larder.cli.part_docs import find_part, part_names, preset_doc
    from larder.session.presets import PRESETS

    preset = preset_doc(name) if name in PRESETS else None
    part = find_part(name) if name in part_names() or preset is None else None
    if options.json:
        told = {} if preset is None else {"preset": asdict(preset)}
        told |= {} if part is None else {"part": asdict(part)}
        print_document({"schema": SCHEMA, "name": name, **told})
        return
    if preset is not None:
        _show_preset(preset)
    if part is not None:
        _show_part(part)


@app.command("cite")
@command
def cite(
    policy: Annotated[
        str, typer.Argument(metavar="SPELLING_OR_NAME", help="A part, a preset or a sentence.")
    ],
    options: OutputOptions,
) -> None:
    """Print the papers behind a part, a preset or a whole sentence."""
    cited = _cited(policy)
    if options.json:
        told = [{"part": name, **asdict(citation)} for name, citation in cited]
        print_document({"schema": SCHEMA, "policy": policy, "citations": told})
        return
    console = results_console()
    if not cited:
        console.print(f"{policy}: {NO_PAPER}", soft_wrap=True)
    by_paper: dict[str, list[str]] = {}
    for name, citation in cited:
        by_paper.setdefault(str(citation), []).append(name)
    for paper, names in by_paper.items():
        console.print(f"{', '.join(names)}: {paper}", soft_wrap=True)


def _cited(text: str) -> list[tuple[str, Citation]]:
    from larder.cli.part_docs import find_part, part_names, parts_of
    from larder.session.policy import Policy
    from larder.session.presets import PRESETS

    is_part = text in part_names() and text not in PRESETS
    pages = (find_part(text),) if is_part else parts_of(Policy.parse(text))
    return [(page.name, citation) for page in pages for citation in page.citations]


def _show_preset(page: PresetDoc) -> None:
    console = results_console()
    console.print(f"{page.name}, a preset")
    console.print(f"\n  {page.full}\n", soft_wrap=True)
    made = make_table("slot", "part", "what it is for", texts=3)
    for part in page.parts:
        made.add_row(part.slot, part.name, part.summary)
    console.print(made)
    for clause in page.beyond_budget:
        console.print(f"Beyond the budget: {clause}.", soft_wrap=True)
    console.print("\nSizes that are open are filled in by --budget and --block.\n")


def _show_part(page: PartDoc) -> None:
    console = results_console()
    console.print(f"{page.name}, a {page.slot}: {page.summary}\n")
    made = make_table("parameter", "type", "default", "meaning", texts=4)
    for field in page.fields:
        made.add_row(field.name, field.kind, field.default, field.meaning)
    console.print(made if page.fields else "It takes no parameters.")
    for cited in page.citations or (NO_PAPER,):
        console.print(f"\n{cited}", soft_wrap=True)
