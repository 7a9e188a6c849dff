"""Budgets as bounds: entries, bytes and process memory while long conversations are read.

    python benchmarks/bound.py FOLDER_OR_FILE... [--policies snapkv,epicache] [--memory]

Every conversation is read at budgets of 512, 1024 and 2048 in blocks of 512. The peak number of
entries (in every layer of every pass) is compared with the bound L x K x (M + M_block), times the
number of caches built together; counted bytes are compared with bytes of the tensors. With
`--memory`, 8K, 16K and 32K tokens are read in separate processes, and the memory above the loaded
model is compared. One JSONL line per case in results/bound.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _timing import environment, write
from torch.nn import Parameter

import larder.cli
from larder import Engine, read_conversation
from larder.session import find_files

BUDGETS, BLOCK = (512, 1024, 2048), 512
LENGTHS = (8192, 16384, 32768)
OUT = Path("results/bound.jsonl")
MIB = 1 << 20
DEMO = Path(larder.cli.__path__[0]) / "demo" / "conversation.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--policies", default="snapkv")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_child(*json.loads(options.child))))
        return
    broken = _entries(options)
    if options.memory:
        _memory()
    if broken:
        sys.exit(f"{broken} cases exceed their bound or miscount their bytes.")


def _entries(options: argparse.Namespace) -> int:
    """Read every file with every budget; return the number of cases that exceed their bound."""
    broken = 0
    base = Engine.load(policy="full")
    for path in find_files(options.paths or [DEMO]):
        conversation = read_conversation(path)
        for policy in options.policies.split(","):
            for budget in BUDGETS:
                engine = base.under(policy, str(budget), BLOCK)
                for name in engine.policy.session.embedders():
                    engine.runtime.embedder(name)  # stays loaded between prefills
                before = _storages()
                memory = engine.read(conversation)
                after = _storages()
                figures, spec = memory.figures, base.loaded.decoder.spec
                heads = sum(layer.kv_heads for layer in spec.managed)
                bound = heads * (budget + BLOCK)
                held = sum(size for place, size in after.items() if place not in before)
                row = {
                    "file": path.stem,
                    "policy": policy,
                    "budget_tokens": budget,
                    "context_tokens": figures.context_tokens,
                    "peak_entries": figures.peak_entries,
                    "bound": bound,
                    "within": figures.peak_entries <= bound,
                    "counted_bytes": memory.caches.nbytes,
                    "tensor_bytes": held,
                }
                print(
                    f"{path.stem:32} {policy:10} M {budget:5} context {figures.context_tokens:6} "
                    f"peak {figures.peak_entries:6} of {bound:6} entries, "
                    f"bytes counted {memory.caches.nbytes} held {held}"
                )
                write(OUT, [row | environment()])
                broken += not row["within"] or memory.caches.nbytes != held
    return broken


def _storages() -> dict[int, int]:
    """Bytes of every tensor storage in this process, each counted once."""
    gc.collect()
    tensors = (item for item in gc.get_objects() if type(item) in (torch.Tensor, Parameter))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _memory() -> None:
    """Measure resident memory above the loaded model, for growing inputs."""
    for policy in ("full", "snapkv", 'patched(prompt="summarize")'):
        for tokens in LENGTHS:
            job = json.dumps([policy, tokens])
            done = subprocess.run(
                [sys.executable, __file__, "--child", job],
                capture_output=True,
                text=True,
                check=True,
            )
            row = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{policy:30} {tokens:6} tokens: highest {row['peak_bytes'] / MIB:8.1f} MiB, "
                f"afterwards {row['above_model_bytes'] / MIB:7.1f} MiB above the loaded model"
            )
            write(OUT, [row | environment()])


def _child(policy: str, tokens: int) -> dict[str, Any]:
    from larder import Policy
    from larder.cache import SequenceCache
    from larder.prefill import PeakMemoryMeter, PrefillReader, PrefillSequence, no_progress

    base = Engine.load(policy="full")
    sentence = "full" if policy == "full" else f"blockwise(tokens={BLOCK}) > "
    if policy != "full":
        name = "snapkv()" if policy == "snapkv" else policy
        sentence += f"{name} > pooled(tokens=1024)"
    chosen, decoder = Policy.parse(sentence), base.loaded.decoder
    ids = tuple(6 + (i * 7919) % 4000 for i in range(tokens))
    form = "dense" if policy == "full" else "ragged"
    size = chosen.budget.tokens or 0
    layers = tuple(layer.index for layer in decoder.spec.managed)
    quotas = chosen.planner.quotas(size, tokens, layers, {})
    prompts = {"summarize": base.tokenizer.encode_question("Summarize the text.")}
    warm = PrefillSequence(SequenceCache(decoder.spec, form), prompts)
    chosen.schedule.read(
        PrefillReader(decoder, chosen.planner, size, quotas, PeakMemoryMeter()),
        [warm],
        ids[: 4 * BLOCK],
        no_progress,
    )
    del warm
    gc.collect()
    before = _resident()
    lane = PrefillSequence(SequenceCache(decoder.spec, form), prompts)
    reader = PrefillReader(decoder, chosen.planner, size, quotas, PeakMemoryMeter())
    chosen.schedule.read(reader, [lane], ids, no_progress)
    gc.collect()
    return {
        "policy": policy,
        "tokens": tokens,
        "above_model_bytes": _resident() - before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "counted_bytes": lane.cache.nbytes,
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
