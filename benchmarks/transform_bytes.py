"""Bytes of a transform-coded cache by part of a coded entry, and bits of its components.

A document is read and scored once, and held at one budget. Bits of components are those of their
codes in bit planes, or the code lengths of the range coder's tables; positions, index and exact
entries are counted as they are stored. What payloads hold beside these is overhead: names of codes
and heads of groups, or states of the range coder, and rounding.

    python benchmarks/transform_bytes.py --corpus FOLDER --model smollm2 --budget 1/8 --figure FILE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transform_fidelity import BUDGETS, POLICIES, documents

from larder.cache import ComponentBatch, SequenceCache, TransformedTier, TransformLayer
from larder.core import LAST_TIER, Coder
from larder.engine import Engine
from larder.ops import CLASSES_PER_OCTAVE, ESCAPE, MIDDLE, classes_of, plane_coder
from larder.ops.symbol_model import symbol_model
from larder.session import Policy
from larder_bench.plots.style import PAGE, SOFT, figure_style
from larder_bench.scoring.recorded_scores import COMPARED_BYTES, RecordedText

PARTS = "keys", "values", "tiers", "overhead", "positions", "index", "means", "exact"
FOLLOWING = 2  # tokens behind the document, which nothing looks at


def bits_of_components(tier: TransformedTier) -> tuple[np.ndarray, int]:
    """Sum over the entries of the bits of each component, and the number of entries."""
    batch = tier.batch()
    steps = tier.step * 2.0 ** batch.tiers.numpy().astype(np.float64)
    around = tier.means.numbers[batch.heads] if len(tier.means.codes) else 0.0
    symbols = np.rint((batch.components - around).numpy() / steps[:, None]).astype(np.int64)
    bits = {Coder.PLANES: plane_bits, Coder.ENTROPY: range_coder_bits}[tier.spec.coder]
    return bits(tier, batch, symbols), len(symbols)


def plane_bits(tier: TransformedTier, batch: ComponentBatch, symbols: np.ndarray) -> np.ndarray:
    """Bits of each component in bit planes."""
    total = np.zeros(symbols.shape[1])
    for _, block in batch.blocks(tier.spec.block):
        total += plane_coder.component_bits(
            symbols[block].astype(np.int32), batch.tiers[block].numpy()
        )
    return total


def range_coder_bits(
    tier: TransformedTier, batch: ComponentBatch, symbols: np.ndarray
) -> np.ndarray:
    """Bits of each component by the range coder's tables."""
    model, heads = symbol_model(), batch.heads.numpy()
    bases = np.stack(
        [classes_of(d.flatten().numpy(), tier.step) for d in tier.tables.deviation.unbind(1)]
    )
    rows = bases[heads] - CLASSES_PER_OCTAVE * batch.tiers.numpy().astype(np.int64)[:, None]
    rows = rows.clip(0, len(model.raw_bits) - 1)
    codes = (symbols >> model.raw_bits[rows].astype(np.int64)) + MIDDLE
    codes = np.where((codes < 0) | (codes >= ESCAPE), ESCAPE, codes)
    return model.costs[rows, codes].sum(0, dtype=np.float64)


def tier_bits(tier: TransformedTier) -> int:
    """Bits of the tiers of all entries."""
    batch = tier.batch()
    if tier.spec.coder is Coder.PLANES:
        sizes = [len(batch.tiers[block]) for _, block in batch.blocks(tier.spec.block)]
        return plane_coder.TIER_PLANES * 8 * sum(-(-size // 8) for size in sizes)
    tiers = batch.tiers.abs()
    return 2 * len(tiers) + int((tiers == LAST_TIER).sum())


def shares(cache: SequenceCache) -> dict[str, float]:
    """Bytes of each part of a cache, exact entries in bfloat16."""
    parts = dict.fromkeys(PARTS, 0.0)
    for store in cache.layers:
        assert isinstance(store, TransformLayer)
        tier, dim = store.tier, store.layer.head_dim
        bits, _ = bits_of_components(tier)
        parts["keys"] += bits[:dim].sum() / 8
        parts["values"] += bits[dim:].sum() / 8
        parts["tiers"] += tier_bits(tier) / 8
        parts["index"] += tier.index.nbytes
        parts["means"] += tier.means.codes.nbytes + tier.means.scales.nbytes
        spans = [(s + 7) // 8 or 4 * n for _, n, _, s, _ in tier.index.tolist()]
        parts["positions"] += sum(spans)
        exact = sum(store.full_precision_lengths)
        parts["exact"] += exact * (2 * dim * COMPARED_BYTES + 4)
        parts["overhead"] += len(tier.payload)
    known = ("keys", "values", "tiers", "positions")
    parts["overhead"] -= sum(parts[name] for name in known)
    return parts


def draw(bits: np.ndarray, parts: dict[str, float], path: Path) -> None:
    """Bits by component on the left, parts of the bytes on the right."""
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure(figsize=(PAGE, 2.1), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        dim = len(bits) // 2
        for name, own, color in (
            ("keys", bits[:dim], "#2b6cb0"),
            ("values", bits[dim:], "#c05621"),
        ):
            left.plot(range(1, dim + 1), own, color=color, label=name)
        left.set_title("Bits of a component")
        left.set_xlabel("component, largest deviation first")
        left.set_ylim(0)
        left.legend(frameon=False)
        names = sorted(parts, key=parts.__getitem__)
        sizes = [100 * parts[name] / sum(parts.values()) for name in names]
        right.barh(names, sizes, color=SOFT)
        for index, size in enumerate(sizes):
            right.text(size + 0.8, index, f"{size:.1f}", va="center")
        right.set_title("Share of the bytes, %")
        right.set_xlim(0, 1.18 * max(sizes))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="How a transform-coded cache spends its bytes.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--budget", default="1/8", choices=list(BUDGETS))
    parser.add_argument("--policy", default="larder", help="name in transform_fidelity.py")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    engine = Engine.load(options.model, policy="full", dtype="bfloat16")
    sentence = POLICIES.get(options.policy, options.policy)
    ids = documents(options.corpus, engine, 1, options.tokens + FOLLOWING)[0]
    text = RecordedText.of(engine, ids, FOLLOWING)
    tokens = int(options.tokens * BUDGETS[options.budget])
    cache = text.held(Policy.parse(sentence), tokens)
    sums, counts = zip(*(bits_of_components(store.tier) for store in cache.layers), strict=True)
    bits, parts = sum(sums) / sum(counts), shares(cache)
    print(json.dumps({name: round(size) for name, size in parts.items()}))
    print(json.dumps({"entries": sum(counts), "bits": [round(float(b), 2) for b in bits]}))
    if options.figure is not None:
        draw(bits, parts, options.figure)


if __name__ == "__main__":
    main()
