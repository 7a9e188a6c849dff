"""Figures of each family in each dtype: logits, greedy steps, policies and peak memory.

    PYTHONPATH=tests:src python -m architectures.figures [FAMILY ...]

measures families and writes `figures.json`, which the support table is generated from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import larder
from architectures.families import Family, Status, with_status
from larder.interop import LarderCache
from model_runs import some_ids
from tensor_memory import peak_bytes

FILE = Path(__file__).parent / "figures.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT, STEPS, LONG_PROMPT = 40, 64, 256  # tokens
BUDGET = 12  # tokens of the prompt
PROTECTED = "whole() > protect(sinks=2, recent=4)"
POLICIES = {
    "snapkv": f"{PROTECTED} > snapkv(window=4) > uniform()",
    "h2o": f"{PROTECTED} > column_mass() > uniform() > every_step()",
    "keydiff": f"{PROTECTED} > keydiff() > uniform()",
    "streaming_llm": f"{PROTECTED} > sinks_and_window(sinks=2) > uniform()",
}
# Largest difference from transformers, of logits over 64 steps relative to their spread: in
# bfloat16 the root mean square over a token's logits, as in the verification of a model.
LOGIT_BOUNDS = {"float32": 1e-4, "bfloat16": 0.15}
# Steps whose logits may differ by more in bfloat16: a token of which experts or a large sum turned
# out otherwise. The attention functions of transformers differ from each other in such steps too.
MOST_BEYOND = 1
# Families whose short regime ends before the long prompt.
SHORT = ("Phi-3 (long-rope)",)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Figures:
    """Measured figures of a family in one dtype.

    Args:
        logits: largest difference of logits under a full budget, relative to their spread, of all
            steps but those `beyond`.
        beyond: steps whose difference is above the bound of the dtype.
        equal_steps: greedy steps, of those over the tokens of transformers, with the same choice.
        tie_margin: largest margin of transformers' choice over ours among the other steps,
            relative to the spread: a near tie. Steps `beyond` are left out.
        policies: policies that ran and held fewer bytes than `DynamicCache` after the prompt.
        peak: peak bytes of prompt and two steps under a quarter of the cache, of those of
            transformers with `DynamicCache`; None where no long prompt fits.
    """

    logits: float
    beyond: int
    equal_steps: int
    tie_margin: float
    policies: int
    peak: float | None


@torch.no_grad()
def measured(family: Family, dtype: str, steps: int = STEPS, with_peak: bool = True) -> Figures:
    """Figures of a family, with its tiny random model."""
    model = family.model(DTYPES[dtype])
    own, ours = _step_logits(model, steps)
    spread = float(own.std())
    difference = ours - own
    steps_by = difference.abs().amax(-1) if dtype == "float32" else _root_mean_square(difference)
    steps_by = steps_by / spread
    within = steps_by <= LOGIT_BOUNDS[dtype]
    choices, tokens = ours.argmax(-1), own.argmax(-1)
    margins = own.gather(1, tokens[:, None])[:, 0] - own.gather(1, choices[:, None])[:, 0]
    return Figures(
        float(steps_by[within].amax()),
        int((~within).sum()),
        int((choices == tokens).sum()),
        float(margins[within].amax()) / spread,
        sum(_runs(model, policy) for policy in POLICIES.values()),
        _peak(model) if with_peak and family.name not in SHORT else None,
    )


def _step_logits(model: Any, steps: int) -> tuple[Tensor, Tensor]:
    """Float32 logits of greedy steps over the tokens of transformers: its own, and Larder's."""
    prompt = torch.tensor([some_ids(PROMPT)])
    options = {**GREEDY, "max_new_tokens": steps}
    out = model.generate(prompt, **options, output_logits=True, return_dict_in_generate=True)
    own = torch.cat(out.logits).float()
    chosen = out.sequences[:, PROMPT:-1].split(1, dim=1)
    cache = LarderCache(model, "full")
    parts = [model(part, past_key_values=cache).logits[0, -1:] for part in (prompt, *chosen)]
    return own, torch.cat(parts).float()


def _root_mean_square(difference: Tensor) -> Tensor:
    return difference.square().mean(-1).sqrt()


def _runs(model: Any, policy: str) -> bool:
    """True if a policy holds fewer bytes than transformers, and text is generated behind it."""
    prompt = torch.tensor([some_ids(PROMPT)])
    cache = LarderCache(model, policy, BUDGET)
    model(prompt, past_key_values=cache)
    whole = cache.attachment.decoder.spec.full_bytes(PROMPT)
    with larder.applied(model, policy, BUDGET):
        out = model.generate(prompt, max_new_tokens=4, **GREEDY)
    return 0 < cache.nbytes < whole and out.shape[1] == PROMPT + 4


def _peak(model: Any) -> float:
    """Peak bytes under a quarter of the cache, of those under `DynamicCache`."""
    prompt = torch.tensor([some_ids(LONG_PROMPT)])
    call: Callable[[], object] = lambda: model.generate(prompt, max_new_tokens=2, **GREEDY)  # noqa: E731
    plain = peak_bytes(call)
    with larder.applied(model, policy="keydiff", budget="25%", block=LONG_PROMPT // 8):
        return peak_bytes(call) / plain


def misses(found: Figures, dtype: str, steps: int = STEPS) -> list[str]:
    """Requirements of a supported family that its figures do not meet."""
    bound = LOGIT_BOUNDS[dtype]
    failed = []
    if found.beyond > (0 if dtype == "float32" else MOST_BEYOND):
        failed.append(f"logits of {found.beyond} steps differ by more than {bound:g} of the spread")
    if found.equal_steps < steps and (dtype == "float32" or found.tie_margin > bound):
        failed.append(f"{found.equal_steps} of {steps} steps equal, margin {found.tie_margin:.2g}")
    if found.policies < len(POLICIES):
        failed.append(f"{found.policies} of {len(POLICIES)} policies")
    if found.peak is not None and not found.peak < 1:
        failed.append(f"peak {found.peak:.2f} of DynamicCache's")
    return failed


def committed() -> dict[str, dict[str, Figures]]:
    """Figures of the file, by family and dtype."""
    saved = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return {
        name: {dtype: Figures(**own) for dtype, own in by_dtype.items()}
        for name, by_dtype in saved.items()
    }


def main(names: list[str]) -> None:
    """Measure families, all without names, and write the file as each is done."""
    for family in with_status(Status.SUPPORTED):
        if names and family.name not in names:
            continue
        found = {dtype: measured(family, dtype) for dtype in DTYPES}
        saved = committed() | {family.name: found}
        document = {
            name: {dtype: _rounded(own) for dtype, own in by_dtype.items()}
            for name, by_dtype in saved.items()
        }
        FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        failed = {dtype: misses(own, dtype) for dtype, own in found.items()}
        print(family.name, found, failed, flush=True)


def _rounded(figures: Figures) -> dict[str, float | None]:
    return {
        name: value
        if value is None
        else float(f"{value:.2g}")
        if isinstance(value, float)
        else value
        for name, value in asdict(figures).items()
    }


if __name__ == "__main__":
    main(sys.argv[1:])
