"""Sign test of Q-Filters: do keys that a filter scores high get more attention later?

Of each kv head, the rank correlation of the score of a token's key with the mean attention that all
later tokens of the document give it. Godey et al. (2025), arXiv:2503.02812, choose the sign of a
direction so that it is positive; it is so by construction for queries of the text that directions
are measured on, and has to be on others. First tokens do not count: they get attention as sinks.

    python benchmarks/filter_signs.py --corpus FOLDER --held-out SOURCE
"""

from __future__ import annotations

import argparse

import torch
from jaxtyping import Float
from learned_scores import corpus_options, texts
from torch import Tensor

from larder.engine import Engine
from larder.models import AttentionInputs, CausalAttention
from larder.training import rank_correlation, read_corpus, row_attention

ROWS = 128  # tokens whose attention is in memory at a time


def later_attention(inputs: AttentionInputs) -> Float[Tensor, "S K"]:
    """Mean attention that the later tokens of a text give each token, but for the last."""
    total = inputs.queries.shape[1]
    sums = torch.zeros(inputs.keys.shape[0], total)
    for some in torch.arange(total).split(ROWS):
        first, weights = int(some[0]), row_attention(inputs, int(some[0]), len(some))[1]
        own = torch.arange(first, first + len(some))
        weights[..., own - first, own] = 0.0  # what a token gives itself
        sums[:, : first + len(some)] += weights.mean(1).sum(1)
    later = torch.arange(total - 1, -1, -1)
    return (sums / later.clamp(min=1)).T[:-1]


def correlations(
    engine: Engine, filters: Float[Tensor, "L K D"], ids: tuple[int, ...], skipped: int
) -> Float[Tensor, "L K"]:
    """Rank correlation of each head of one text."""
    found = list[Tensor]()

    def show(inputs: AttentionInputs) -> None:
        scores = torch.einsum("ksd,kd->sk", inputs.keys.float(), filters[len(found)])
        attention = later_attention(inputs)
        found.append(rank_correlation(scores[skipped:-1], attention[skipped:]))

    engine.runtime.decoder.forward_uncached(ids, CausalAttention(show))
    return torch.stack(found)


def parse_args() -> argparse.Namespace:
    parser = corpus_options(__doc__, tokens=768, documents=8)
    parser.add_argument("--skipped", type=int, default=4, help="first tokens that do not count")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = parse_args()
    engine = Engine.load(args.model, policy="full", dtype=args.dtype)
    layers = engine.runtime.decoder.spec.managed
    measured = engine.runtime.calibrate(frozenset({"q_filters"}))["q_filters"]
    filters = torch.tensor(measured).view(len(layers), layers[0].kv_heads, -1)
    corpus, found = read_corpus(args.corpus, args.held_out), list[Tensor]()
    for document, ids in texts(engine, corpus, args.tokens, args.documents, args.seed):
        found.append(correlations(engine, filters, ids[: args.tokens], args.skipped))
        print(f"{document.name}: positive in {(found[-1] > 0).float().mean():.3f} of heads")
    mean = torch.stack(found).mean(0)
    print(f"mean over documents: positive in {(mean > 0).float().mean():.3f} of heads")
    print(f"mean correlation {mean.mean():.3f}, by layer {[f'{x:.2f}' for x in mean.mean(1)]}")


if __name__ == "__main__":
    main()
