"""First load of a GGUF file by Larder and by transformers: CPU seconds, and equality to the bit.

    python benchmarks/gguf_load.py smollm2 gemma3-270m [--rounds 3] [--threads 1]

Each load is a process of its own, ways in turn; a round is one of each. What all of them import is
imported before the clock starts, with the code of the architecture, and is a row of its own. The
work is the same: a model in bfloat16 and a tokenizer, ready to generate. `first` converts the file
into an empty folder, `second` loads what was converted. `verified` is `larder.models.load` as
commands call it, with its comparison of logits, which transformers does not do. The way of
transformers then compares its tensors, and its tokens of a text of many scripts, with those that
were converted. CPU seconds of all threads, medians; one JSONL line each in results/gguf_load.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

OUT = Path("results/gguf_load.jsonl")
WAYS = ("first", "second", "verified", "transformers")
STEP = 7  # of code points in the text: a prime
SCRIPTS = (range(32, 0x3100, STEP), range(0x4E00, 0x9FA0, 97), range(0x1F300, 0x1F680, STEP))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="smollm2, gemma3-270m or a GGUF file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help="one load in this process")
    parser.add_argument("--converted", help="folder of an earlier conversion, for its code")
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, Path(given.models[0]), given.converted, given.threads)))
        return
    from _timing import environment, write

    write(OUT, [environment() | row for name in given.models for row in compare(name, given)])


def compare(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a model: each way's medians, and how many times as long transformers takes."""
    from larder.models import convert_gguf

    file = gguf_file(name)
    with tempfile.TemporaryDirectory() as home:
        os.environ["LARDER_HOME"] = home
        converted = convert_gguf(file)
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way in WAYS:
                options = ["--way", way, "--converted", str(converted)]
                options += ["--threads", str(given.threads)]
                runs[way].append(run_apart(file, options, home if way == "second" else None))
    rows = [{"model": name, "way": way, **medians(runs[way])} for way in WAYS]
    theirs = rows[-1]
    for row in rows:
        row["times_faster"] = round(theirs["load"] / row["load"], 2)
        row["times_faster_with_imports"] = round(theirs["process"] / row["process"], 2)
        print(json.dumps(row))
    return rows


def gguf_file(name: str) -> Path:
    """GGUF file of a packaged model, its parts joined, or the file itself."""
    from larder.models import PACKAGED_MODELS, gguf

    if name not in PACKAGED_MODELS:
        return Path(name)
    model = PACKAGED_MODELS[name]
    return model.files[0] if model.parts is None else gguf.join_parts(model.files, *model.parts)


def run_apart(file: Path, options: list[str], home: str | None) -> dict[str, Any]:
    """Result of a process, with an empty folder unless one is given."""
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | {"LARDER_HOME": home or empty}
        command = [sys.executable, __file__, str(file), *options]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the seconds, the least and the most of a load, other values as in the last."""
    seconds = ("imports", "weights", "tokenizer", "load", "process")
    row = {name: round(median(run[name] for run in runs), 2) for name in seconds}
    loads = sorted(run["load"] for run in runs)
    equal = {name: value for name, value in runs[-1].items() if name not in seconds}
    return row | {"least": round(loads[0], 2), "most": round(loads[-1], 2)} | equal


def measure(way: str, file: Path, converted: str, threads: int) -> dict[str, Any]:
    """CPU seconds of one load in this process."""
    import torch
    import transformers.integrations.gguf  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import larder.models.loader  # noqa: F401
    from larder.models import convert_gguf, load

    torch.set_num_threads(threads)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(converted))
    start = time.process_time()
    if way == "verified":
        loaded = load(str(file), dtype="bfloat16")
        module, tokenizer, read = loaded.decoder.module, loaded.tokenizer, time.process_time()
    else:
        source, options = (file.parent, {"gguf_file": file.name}), {"dtype": torch.bfloat16}
        if way != "transformers":
            source = convert_gguf(file), {}
        module = AutoModelForCausalLM.from_pretrained(source[0], **source[1], **options)
        read = time.process_time()
        tokenizer = AutoTokenizer.from_pretrained(source[0], **source[1])
    end = time.process_time()
    row = {"imports": start, "weights": read - start, "tokenizer": end - read}
    row |= {"load": end - start, "process": end}
    return row | (equality(module, tokenizer, converted) if way == "transformers" else {})


def equality(module: Any, tokenizer: Any, converted: str) -> dict[str, Any]:
    """How many tensors and tokens equal those of a converted folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = AutoModelForCausalLM.from_pretrained(converted, dtype="auto").state_dict()
    theirs = module.state_dict()
    equal = [name for name in theirs if torch.equal(theirs[name], ours[name])]
    text = wide_text()
    ids, wanted = AutoTokenizer.from_pretrained(converted)(text), tokenizer(text)
    return {
        "tensors": len(theirs),
        "equal_tensors": len(equal) if theirs.keys() == ours.keys() else 0,
        "tokens": len(wanted["input_ids"]),
        "equal_tokens": ids["input_ids"] == wanted["input_ids"],
    }


def wide_text() -> str:
    """The documentation, and characters of many scripts in lines of words."""
    documents = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    letters = [chr(code) for each in SCRIPTS for code in each]
    words = ["".join(letters[n : n + 1 + n % 5]) for n in range(0, len(letters), 3)]
    return "\n".join([*(one.read_text(encoding="utf-8") for one in documents), " ".join(words)])


if __name__ == "__main__":
    main()
