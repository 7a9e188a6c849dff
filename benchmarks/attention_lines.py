"""Reading along lines of attention (LoopServe): what is computed, covered and lost.

    python benchmarks/attention_lines.py FILE [--model smollm2] [--tokens 1024] [--block 512]
        [--continued 128] [--coverage .955 ...]

FILE is plain text. Printed for each coverage are the share of the visible pairs of queries and keys
on lines, least and mean of the attention that they cover, over all queries and not the sampled ones
alone, and the divergence of a continuation's next tokens, in nats, from those after exact reading.
A window of as many latest keys, with 4 first ones, stands beside: its covered attention at the same
share of pairs. JSONL goes to results/attention_lines.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import torch
from _timing import environment, write
from jaxtyping import Bool
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import AppendKind, Mode, OffloadSpec
from larder.models import AttentionInputs, BatchSegment, CausalAttention, Decoder, load
from larder.ops import head_lines
from larder.recall import Rewatch

OUT = Path("results/attention_lines.jsonl")
SINKS = 4


def main() -> None:
    options = _options()
    loaded = load(options.model)
    ids = tuple(loaded.tokenizer.encode(options.file.read_text(encoding="utf-8")))
    text, behind = ids[: options.tokens], ids[options.tokens :][: options.continued]
    exact = _log_probabilities(loaded.decoder, text, behind, options.block, 1.0)
    for coverage in options.coverage:
        near = _log_probabilities(loaded.decoder, text, behind, options.block, coverage)
        row = _covered(loaded.decoder, text, options.block, coverage)
        away = float((exact.exp() * (exact - near)).sum(-1).mean())
        row |= {"coverage": coverage, "tokens": len(text), "divergence": round(away, 5)}
        print(row, flush=True)
        settings = {"study": "attention_lines", "model": options.model, "block": options.block}
        write(OUT, [row | settings | {"environment": environment()}])


def _covered(
    decoder: Decoder, ids: tuple[int, ...], block: int, coverage: float
) -> dict[str, float]:
    """Means over layers, heads and blocks, of exact queries and keys."""
    pairs, shares, windows = list[float](), list[float](), list[float]()

    def show(inputs: AttentionInputs) -> None:
        indices = torch.arange(inputs.keys.shape[1])
        for first in range(0, len(indices), block):
            positions = indices[first : first + block]
            end = first + len(positions)
            groups = inputs.queries[:, first:end].unflatten(0, (len(inputs.keys), -1))
            for group, keys in zip(groups, inputs.keys[:, :end], strict=True):
                lines = head_lines(group, keys, positions, indices[:end], inputs.scaling, coverage)
                visible = positions[:, None] >= indices[:end]
                logits = group.float() @ keys.float().T * inputs.scaling
                weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
                for own, line in zip(weights, lines, strict=True):
                    mask = line.mask(positions, indices[:end])
                    pairs.append(float(mask.sum() / visible.sum()))
                    shares.append(float(own[mask].sum() / len(own)))
                    window = _window(visible, int(mask.sum()))
                    windows.append(float(own[window].sum() / len(own)))

    decoder.forward_uncached(ids, CausalAttention(show))
    return {
        "pairs": round(fmean(pairs), 4),
        "covered": round(fmean(shares), 4),
        "least": round(min(shares), 4),
        "window": round(fmean(windows), 4),
    }


def _window(visible: Bool[Tensor, "Q S"], pairs: int) -> Bool[Tensor, "Q S"]:
    """First keys, and as many latest ones of each query as make some number of pairs."""
    back = visible.sum(1, keepdim=True) - 1 - torch.arange(visible.shape[1])
    is_sink = torch.arange(visible.shape[1]) < SINKS
    low, high = 0, visible.shape[1]
    while low < high:
        width = (low + high) // 2
        low, high = (
            (width + 1, high)
            if int((visible & (is_sink | (back < width))).sum()) < pairs
            else (low, width)
        )
    return visible & (is_sink | (back < low))


def _log_probabilities(
    decoder: Decoder, text: tuple[int, ...], behind: tuple[int, ...], block: int, coverage: float
) -> Tensor:
    """Next tokens of a continuation, read exactly behind a text that was read along lines."""
    parking = OffloadSpec(Rewatch(tokens=64, dense=0, coverage=coverage))
    cache = SequenceCache(decoder.spec, "tiered", parking=parking)
    for first in range(0, len(text), block):
        ids = text[first : first + block]
        decoder.read([BatchSegment(cache, ids, append_kind=AppendKind.TEXT)], Mode.APPEND)
    segment = BatchSegment(cache, behind)
    logits = decoder.forward_logits([segment], Mode.SCRATCH, range(len(behind)))
    return logits.double().log_softmax(-1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Reading along lines of attention.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--continued", type=int, default=128)
    parser.add_argument("--coverage", type=float, nargs="+", default=[0.8, 0.955, 0.99])
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
