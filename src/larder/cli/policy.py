"""`larder policy`: list, show and cite parts and presets, from their docstrings."""

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

app = typer.Typer(
    cls=HelpGroup, add_completion=False, help="List, show and cite policies and their parts."
)


@app.command("list")
@command
def list_all(options: OutputOptions) -> None:
    """List every preset and every part, with its slot and its papers."""
    from larder.cli.part_docs import part_docs, preset_docs

    parts, presets = part_docs(), preset_docs()
    if options.json:
        print_document(
            {
                "schema": SCHEMA,
                "presets": [preset.record() for preset in presets],
                "parts": [asdict(part) for part in parts],
            }
        )
        return
    console = results_console()
    preset_table = make_table("preset", "sentence", texts=2)
    for preset in presets:
        preset_table.add_row(preset.name, preset.sentence)
    console.print(preset_table)
    console.print()
    part_table = make_table("part", "slot", "purpose", "papers", texts=4)
    for part in parts:
        papers = "; ".join(citation.short for citation in part.citations)
        part_table.add_row(part.name, part.slot, part.summary, papers or NO_PAPER)
    console.print(part_table)
    console.print(
        "\nlarder policy show NAME describes one, larder policy cite NAME prints its papers. "
        "A preset takes parts behind its name: kvzip > quantized(bits=4)."
    )


@app.command("show")
@command
def show(
    name: Annotated[
        str, typer.Argument(metavar="SPELLING_OR_NAME", help="A part, a preset or a sentence.")
    ],
    options: OutputOptions,
) -> None:
    """Show the parameters of a part, or the parts of a preset or a sentence.

    Some names are both: without parentheses they begin a sentence as the preset.
    """
    from larder.cli.part_docs import find_part, part_names, preset_doc, sentence_doc
    from larder.session.presets import PRESETS

    if set(name) & set(">(:"):
        sentence = sentence_doc(name)
        if options.json:
            print_document({"schema": SCHEMA, "name": name, "policy": asdict(sentence)})
        else:
            _show_preset(sentence, "a sentence")
        return
    preset = preset_doc(name) if name in PRESETS else None
    part = find_part(name) if name in part_names() or preset is None else None
    if options.json:
        document = {} if preset is None else {"preset": asdict(preset)}
        document |= {} if part is None else {"part": asdict(part)}
        print_document({"schema": SCHEMA, "name": name, **document})
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
        citations = [{"part": name, **asdict(citation)} for name, citation in cited]
        print_document({"schema": SCHEMA, "policy": policy, "citations": citations})
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


def _show_preset(page: PresetDoc, kind: str = "a preset") -> None:
    console = results_console()
    console.print(f"{page.name}, {kind}", soft_wrap=True)
    console.print(f"\n  {page.full}\n", soft_wrap=True)
    table = make_table("slot", "part", "purpose", texts=3)
    for part in page.parts:
        table.add_row(part.slot, part.name, part.summary)
    console.print(table)
    for clause in page.beyond_budget:
        console.print(f"Beyond the budget: {clause}.", soft_wrap=True)
    console.print("\nSizes that are open are filled in by --budget and --block.\n")


def _show_part(page: PartDoc) -> None:
    console = results_console()
    console.print(f"{page.name}, a {page.slot}: {page.summary}\n")
    table = make_table("parameter", "type", "default", "meaning", texts=4)
    for field in page.fields:
        table.add_row(field.name, field.kind, field.default, field.meaning)
    console.print(table if page.fields else "It takes no parameters.")
    for cited in page.citations or (NO_PAPER,):
        console.print(f"\n{cited}", soft_wrap=True)
