"""Samples of what was rejected, which estimate its attention without bias (SubGen).

Zandieh et al., "SubGen: Token Generation in Sublinear Time and Memory" (2024), arXiv:2402.06082.
Attention to many entries is a sum over values divided by a sum over keys, and each is estimated by
its own samples. Keys form clusters: a key joins one whose center lies within a radius of it, or
opens one; of n keys of a cluster t samples stand for n / t each. Values are drawn with
probabilities proportional to |v|^2; of s draws each stands for mu / (s |v|^2), where mu is the sum
of |v|^2. We know the method from its paper at second hand, and have read no code.

Latest and first entries, whatever is protected, stay exact; of scorer and budget only the number of
entries per head is taken. Of the room beside the protected ones a share is for draws of values. The
radius counts in root mean square distances of the head's keys from their mean, and is widened until
the samples of all clusters fit. Inferred: a key joins the first center within the radius, the
center of a cluster whose first key left is the earliest sample of it, and clusters join like keys
when the radius is wider than before. Samples are systematic draws, in which every key is as likely
as any other, and every value as its square says, as in the paper's reservoirs.

A key sample weighs n / t in attention. A value sample that is no key sample weighs e^-14, which
nearly takes it out of the sum over keys, and its value is as much larger; in float16, where no
number exceeds 65,504, it weighs as little as that allows, and the sum over keys is a little too
large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import ScoreError
from larder.core.observation import Entries, LayerScores
from larder.core.part import LOG_COUNT, Ledger
from larder.core.plan import Folds, Plan
from larder.core.types import Packed
from larder.policy.compensation._token_merge import kept_mask, rejected_indices
from larder.policy.compensation.base import Compensation

CLUSTER, DRAWS, MASS = "subgen_cluster", "subgen_draws", "subgen_mass"
WIDENING = 1.25  # of the radius, until samples fit
OUTSIDE = 14.0  # -ln of the weight of a value sample among keys, where its value has room for it


@dataclass(frozen=True)
class Subgen(Compensation):
    """SubGen's samples of keys and values.

    Args:
        delta: radius of a cluster, above 0.
        samples: of each cluster.
        share: of the room that is for draws of values, in (0, 1).
        seed: another seed draws other samples.
    """

    delta: float = 0.5
    samples: int = 2
    share: float = 0.5
    seed: int = 0
    ledger = Ledger(columns=(LOG_COUNT, CLUSTER, DRAWS), scalars=(MASS,))

    def __post_init__(self) -> None:
        require(0 < self.delta < math.inf, "subgen.delta", "above 0", self.delta)
        require(self.samples >= 1, "subgen.samples", "at least 1", self.samples)
        require(0 < self.share < 1, "subgen.share", "in (0, 1)", self.share)

    @property
    def merges_apart(self) -> bool:
        return True

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        """A plan of its own, with no more entries of any head than the one given."""
        if not len(rejected_indices(plan, entries)):
            return plan
        stays = kept_mask(plan, entries).cpu()
        spared = stays & scored.protected.cpu()
        columns = {name: entries.column(name).cpu() for name in self.ledger.columns}
        masses = list[float](entries.scalars[MASS].nan_to_num(0.0).tolist())  # pyright: ignore
        factors, first = torch.ones(len(stays)), 0
        for head, (held, quota) in enumerate(zip(entries.lengths, plan.lengths, strict=True)):
            span = slice(first, first + held)
            if held > quota:
                free = first + (~spared[span]).nonzero().flatten()
                sketch = self._sketch(entries, head, free - first, columns, free, masses[head])
                drawn = sketch.drawn(quota - (held - len(free)))
                rows = free[drawn.chosen]
                stays[span] = spared[span]
                stays[rows] = True
                for name, column in drawn.columns.items():
                    columns[name][rows] = column
                factors[rows], masses[head] = drawn.factors, drawn.mass
            first += held
        kept = Plan.from_mask(stays, entries.lengths)
        samples = kept.kept[~spared[kept.kept]]
        device = plan.kept.device
        folds = Folds(samples, samples, torch.ones(len(samples)), factors[samples])
        return replace(
            plan,
            kept=kept.kept.to(device),
            lengths=kept.lengths,
            folds=Folds(*(part.to(device) for part in vars(folds).values())),
            columns={name: column[kept.kept].to(device) for name, column in columns.items()},
            scalars={**plan.scalars, MASS: torch.tensor(masses, device=device)},
        )

    def _sketch(
        self,
        entries: Entries,
        head: int,
        free: Int64[Tensor, " F"],
        columns: dict[str, Packed],
        packed: Int64[Tensor, " F"],
        mass: float,
    ) -> Sketch:
        """Sketch of the unprotected entries of a head.

        Args:
            free: their numbers in the head.
            packed: their indices among all entries.
        """
        rows = free.to(entries.keys.device)
        last = int(entries.head_positions(head)[-1])
        return Sketch(
            self,
            entries.head_keys(head)[rows].float().cpu(),
            entries.head_values(head)[rows].double().square().sum(1).cpu(),
            columns[CLUSTER][packed].long(),
            columns[DRAWS][packed].long(),
            columns[LOG_COUNT][packed].double().exp(),
            mass,
            torch.Generator().manual_seed(draw_seed(self.seed, last)),
            torch.finfo(entries.values.dtype).max / 2,
        )


@dataclass(frozen=True)
class Samples:
    """Samples of one head.

    Args:
        chosen: mask of the unprotected entries that are samples.
        columns: new numbers of their columns.
        factors: what their values are multiplied by.
        mass: sum of |v|^2 over all entries so far.
    """

    chosen: Bool[Tensor, " F"]
    columns: dict[str, Tensor]
    factors: Float[Tensor, " N"]
    mass: float


@dataclass(frozen=True)
class Sketch:
    """Unprotected entries of one head: new ones, and samples of former ones.

    Args:
        squares: squared lengths of the values as they are held.
        clusters, draws: cluster of a key sample from 1 on, and number of draws of a value sample;
            0 and 0 for a new entry.
        weights: of each in attention; 1 for a new entry.
        mass: sum of |v|^2 over all former entries.
        largest: number that a value may have.
    """

    part: Subgen
    keys: Float[Tensor, "F D"]
    squares: Float[Tensor, " F"]
    clusters: Int64[Tensor, " F"]
    draws: Int64[Tensor, " F"]
    weights: Float[Tensor, " F"]
    mass: float
    source: torch.Generator
    largest: float

    def drawn(self, room: int) -> Samples:
        """At most `room` samples of keys and values; none where there is room for one alone."""
        values = max(int(self.part.share * room), 1) if room > 1 else 0
        is_new = (self.clusters == 0) & (self.draws == 0)
        squares, mass = self._value_masses(is_new)
        draws = systematic(squares, values, self._uniform(1))
        clusters, keys = self._key_samples(is_new, room - values if values else 0)
        # A held value is v a / b, with a of the sum over values and b, the weight, of that over
        # keys; a draw multiplies a by mass / (draws * its share of the mass).
        drawn = torch.where(draws > 0, draws * mass / max(values, 1) / squares, 0.0) * self.weights
        lengths = drawn * self.squares.sqrt()
        outside = min(OUTSIDE, math.log(self.largest / max(float(lengths.max()), 1.0)))
        weights = torch.where(keys > 0, keys, math.exp(-outside))
        chosen = (draws > 0) | (keys > 0)
        columns = {LOG_COUNT: weights.log(), CLUSTER: clusters * (keys > 0), DRAWS: draws}
        return Samples(
            chosen,
            {name: column[chosen].float() for name, column in columns.items()},
            (drawn / weights)[chosen].float(),
            mass,
        )

    def _value_masses(self, is_new: Bool[Tensor, " F"]) -> tuple[Float[Tensor, " F"], float]:
        """Sum of |v|^2 that each entry stands for, and their sum."""
        each = self.mass / max(int(self.draws.sum()), 1)
        masses = torch.where(is_new, self.squares * self.weights, self.draws * each)
        return masses, float(masses.sum())

    def _key_samples(
        self, is_new: Bool[Tensor, " F"], room: int
    ) -> tuple[Int64[Tensor, " F"], Float[Tensor, " F"]]:
        """Cluster of each entry, from 1 on, and the keys that it stands for; 0 where it is left."""
        clusters, keys = torch.zeros_like(self.clusters), torch.zeros_like(self.weights)
        numbers = torch.nonzero(is_new | (self.clusters > 0)).flatten()
        if len(numbers) and room:
            samples = min(self.part.samples, room)
            former = self.clusters[numbers]
            labels = fitting_clusters(self.keys[numbers], former, self.part.delta, samples, room)
            clusters[numbers] = labels + 1
            offsets = self._uniform(int(labels.max()) + 1)
            keys[numbers] = cluster_samples(labels, self.weights[numbers], samples, offsets)
        return clusters, keys

    def _uniform(self, count: int) -> Float[Tensor, " N"]:
        return torch.rand(count, generator=self.source, dtype=torch.float64)


def draw_seed(seed: int, last: int) -> int:
    """Seed of the samples of a plan, different for each position in the 32 bits that count."""
    return (seed * 2_654_435_761 + last * 40_503) % (1 << 32)


def fitting_clusters(
    keys: Float[Tensor, "N D"], former: Int64[Tensor, " N"], delta: float, samples: int, room: int
) -> Int64[Tensor, " N"]:
    """Cluster of each key, with the least widened radius at which all samples fit.

    Args:
        former: cluster of former samples, from 1 on; 0 for new keys.

    Raises:
        ScoreError: a key is not finite.
    """
    radius = delta * float((keys - keys.mean(0)).square().sum(1).mean().sqrt())
    if not math.isfinite(radius):
        raise ScoreError(
            "subgen cannot cluster keys that are not finite numbers: load the model in float32 or "
            "bfloat16, or take drop()."
        )
    radius = max(radius, torch.finfo(torch.float32).tiny)
    while True:
        labels = clusters_within(keys, former, radius, room)
        if labels is not None and int(labels.bincount().clamp(max=samples).sum()) <= room:
            return labels
        radius *= WIDENING


def clusters_within(
    keys: Float[Tensor, "N D"], former: Int64[Tensor, " N"], radius: float, most: int
) -> Int64[Tensor, " N"] | None:
    """Cluster of each key: that of the first center within the radius; None for more than `most`.

    Former samples follow the earliest one of their cluster.
    """
    leaders = torch.arange(len(keys))
    for label in range(1, int(former.max()) + 1):
        members = torch.nonzero(former == label).flatten()
        leaders[members] = members[:1].expand(len(members))
    is_leader = leaders == torch.arange(len(keys))
    order = torch.cat([(is_leader & (former > 0)).nonzero(), (former == 0).nonzero()]).flatten()
    left, labels = order, torch.full((len(keys),), -1)
    for cluster in range(most + 1):
        if not len(left):
            return labels[leaders]
        near = (keys[left] - keys[left[0]]).square().sum(1) <= radius * radius
        near[0] = True
        labels[left[near]] = cluster
        left = left[~near]
    return None


def cluster_samples(
    labels: Int64[Tensor, " N"], weights: Tensor, samples: int, offsets: Tensor
) -> Tensor:
    """Keys that each entry stands for: `samples` of a cluster share its weight; 0 for the others.

    A cluster of no more entries than that keeps all with their own weights.
    """
    order = torch.argsort(labels, stable=True)
    out = torch.zeros_like(weights)
    sizes = list[int](torch.bincount(labels).tolist())  # pyright: ignore
    for cluster, rows in enumerate(torch.split(order, sizes)):
        if len(rows) <= samples:
            out[rows] = weights[rows]
        else:
            counts = systematic(weights[rows], samples, offsets[cluster])
            out[rows] = counts * weights[rows].sum() / samples
    return out


def systematic(
    weights: Float[Tensor, " N"], draws: int, offset: Float[Tensor, "*"]
) -> Int64[Tensor, " N"]:
    """Number of draws of each row: its share of the weights, rounded up or down at random."""
    total = weights.sum()
    if not draws or total <= 0:
        return torch.zeros(len(weights), dtype=torch.int64)
    shares = weights.cumsum(0) * (draws / total)
    shares[int(weights.nonzero()[-1]) :] = draws  # whatever was rounded
    marks = (shares + offset).floor().long()
    return torch.diff(marks, prepend=torch.zeros(1, dtype=torch.int64))


Part = Subgen
