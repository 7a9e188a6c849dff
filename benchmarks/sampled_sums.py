"""Error of attention whose two sums are sampled (SubGen): where it comes from, beside random keys.

SubGen estimates the sum over values and the sum over keys by samples of their own. Of the outputs
of a text's last queries, the error relative to exact attention: of the estimate, of each sum with
the other one exact, of one sample for both sums, and of as many random entries. First and latest
entries are exact in all. The last column is the length of the largest output over the largest true.

    python benchmarks/sampled_sums.py
"""

from __future__ import annotations

import argparse

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from larder.core import LOG_COUNT, Entries, LayerScores, Plan
from larder.models import AttentionInputs, CausalAttention, SampleText, load
from larder.policy import Subgen

QUERIES, SINKS = 32, 4
COLUMNS = ("subgen", "values", "keys", "one", "random")


def sums_of(
    queries: Float[Tensor, "Q D"],
    keys: Float[Tensor, "S D"],
    values: Float[Tensor, "S D"],
    weights: Float[Tensor, " S"],
    factors: Float[Tensor, " S"],
) -> tuple[Float[Tensor, "Q D"], Float[Tensor, "Q 1"]]:
    """Sum over weighted values, and over weights."""
    powers = (queries @ keys.T).exp() * weights
    return powers @ (values * factors[:, None]), powers.sum(1, keepdim=True)


def sketched(
    part: Subgen, keys: Tensor, values: Tensor, spared: Bool[Tensor, " S"], quota: int
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Weight and factor of every entry under SubGen; 0 where it is left."""
    count, kept = len(keys), spared.clone()
    kept[(~spared).nonzero().flatten()[: quota - int(spared.sum())]] = True
    columns = {name: torch.zeros(count) for name in part.ledger.columns}
    scalars = {name: torch.zeros(1) for name in part.ledger.scalars}
    positions = torch.arange(count, dtype=torch.int32)
    entries = Entries(keys, values, positions, (0,), (count,), columns, scalars)
    scored = LayerScores(torch.zeros(count), spared, (count,))
    plan = part.compensate(Plan.from_mask(kept, (count,)), entries, scored)
    weights, factors = torch.zeros(count), torch.zeros(count)
    weights[plan.kept] = plan.columns[LOG_COUNT].exp()
    factors[plan.kept] = 1.0
    factors[plan.folds.targets] = plan.folds.value_weights
    return weights, factors


def one_sample(
    values: Tensor,
    spared: Bool[Tensor, " S"],
    quota: int,
    is_uniform: bool,
    source: torch.Generator,
) -> Float[Tensor, " S"]:
    """Weights of entries drawn alike, or by the squared lengths of values, for both sums."""
    rest, room = (~spared).nonzero().flatten(), quota - int(spared.sum())
    weights = spared.float()
    if is_uniform:
        weights[rest[torch.randperm(len(rest), generator=source)[:room]]] = 1.0
        return weights
    squares = values[rest].square().sum(1)
    draws = torch.bincount(
        torch.multinomial(squares, room, True, generator=source), minlength=len(rest)
    )
    weights[rest] = draws * squares.sum() / (room * squares)
    return weights


def head_errors(
    inputs: AttentionInputs, head: int, quota: int, seed: int
) -> tuple[list[float], float]:
    """Errors of one kv head, in the order of `COLUMNS`, and the growth of its largest output."""
    group = len(inputs.queries) // len(inputs.keys)
    own = inputs.queries[head * group : (head + 1) * group, -QUERIES:].float()
    queries = own.flatten(0, 1) * inputs.scaling
    keys, values = inputs.keys[head].float(), inputs.values[head].float()
    spared = torch.zeros(len(keys), dtype=torch.bool)
    spared[:SINKS], spared[-(quota // 4) :] = True, True
    ones, source = torch.ones(len(keys)), torch.Generator().manual_seed(seed)
    top, bottom = sums_of(queries, keys, values, ones, ones)
    weights, factors = sketched(Subgen(seed=seed), keys, values, spared, quota)
    drawn_top, drawn_bottom = sums_of(queries, keys, values, weights, factors)
    outs = [drawn_top / drawn_bottom, drawn_top / bottom, top / drawn_bottom]
    for is_uniform in (False, True):
        alike = one_sample(values, spared, quota, is_uniform, source)
        sums = sums_of(queries, keys, values, alike, ones)
        outs.append(sums[0] / sums[1])
    true = top / bottom
    errors = [float((out - true).norm() / true.norm()) for out in outs]
    return errors, float(outs[0].norm(dim=1).max() / true.norm(dim=1).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=4, help="layers at equal distances")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    loaded, recorded = load(options.model), dict[int, AttentionInputs]()
    loaded.decoder.forward_uncached(
        SampleText(loaded.tokenizer.encode).ids(options.tokens),
        CausalAttention(lambda shown: recorded.update({shown.layer: shown})),
    )
    print("budget layer", *COLUMNS, "largest")
    for share in (4, 8):
        for index in range(options.layers):
            layer = (2 * index + 1) * len(recorded) // (2 * options.layers)
            shown, quota = recorded[layer], options.tokens // share
            found = [
                head_errors(shown, head, quota, seed)
                for head in range(len(shown.keys))
                for seed in range(options.seeds)
            ]
            means = torch.tensor([errors for errors, _ in found]).mean(0).tolist()
            print(f"1/{share}", layer, *(f"{mean:.2f}" for mean in means), end=" ")
            print(f"{max(growth for _, growth in found):.1f}", flush=True)


if __name__ == "__main__":
    main()
