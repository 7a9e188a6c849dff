"""Squeezed index (Squeezed Attention): clusters of keys above one threshold of estimated attention.

Hooper et al., "Squeezed Attention: Accelerating Long Context Length LLM Inference" (2024),
arXiv:2411.09688, for a text that many questions are asked about. Keys of unit length are clustered,
5 clusters to 100 entries; a centroid is the mean of its keys as they are. The score of a cluster is
the attention to one of its entries as centroids estimate it: exp(q c_i) / sum_j n_j exp(q c_j).
Clusters above a threshold are attended to exactly. The threshold is one number for all layers
and heads, the quantile of the scores of the text's last 100 queries, so that heads of scattered
attention fetch many entries and others few. What the clusters do not hold is attended to exactly.

The lookup is hierarchical: the clusters are clustered again, 1 coarse cluster to 100 entries, a
coarse centroid is the mean of its centroids, and a lower threshold of its own rules out coarse
clusters first. The centroids of the others alone are compared with the query, and alone count in
the denominator of their scores. `coarse=0` is the lookup of one level.

Scores, sizes in the denominator, and both quantiles over entries are those of the released code,
which measures the fine threshold with all clusters in the denominator. Differences: k-means starts
from evenly spaced entries and runs a fixed number of iterations. Scores are means over the query
heads of a kv head [inferred: the released model has as many kv heads]. No more than `tokens`
entries are fetched, the highest scores first. New entries become clusters when there are `update`
of them, at most half of `tokens`; the threshold is measured again when there are twice as many as
it was measured on. The share that the coarse threshold drops is inferred. A question attends to
everything, exactly, unless `union` is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import normalize

from larder.core.arguments import require, require_at_least
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import FetchMode, RecallIndex, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import top_rows
from larder.recall._index_base import (
    EntryIndex,
    EntryRecall,
    group_queries,
    grow_table,
    mask_missing,
)
from larder.recall._kmeans import ClusterMetric, kmeans, update_centers


@dataclass(frozen=True)
class Squeezed(EntryRecall):
    """Entries of all clusters whose score exceeds one threshold.

    Args:
        share: clusters per entry, in (0, 1].
        dropped: share of the entries that the threshold leaves out on the text's last queries, in
            [0, 1); 0 leaves out none.
        update: new entries that become clusters of their own.
        iterations: k-means iterations.
        coarse: coarse clusters per entry, in [0, share); 0 for clusters of one level.
        coarse_dropped: share of the entries that the threshold of coarse clusters leaves out, in
            [0, 1).
    """

    share: float = 0.05
    dropped: float = 0.7
    update: int = 1024
    iterations: int = 10
    coarse: float = 0.01
    coarse_dropped: float = 0.5

    observed: ClassVar[int] = 100
    measures_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.share <= 1, "squeezed.share", "in (0, 1]", self.share)
        if not 0 <= self.coarse < self.share:
            raise BadParameter(
                f"squeezed.coarse must be 0 or more and below share={self.share}, got "
                f"{self.coarse}."
            )
        for name in ("dropped", "coarse_dropped"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise BadParameter(f"squeezed.{name} must be in [0, 1), got {value}.")
        require_at_least(1, "squeezed", update=self.update, iterations=self.iterations)
        if self.fetch is not FetchMode.IN_TURN:
            raise BadParameter(
                f"squeezed.fetch must be in_turn, got {self.fetch.value}: its threshold is "
                "measured over all layers before the first of them searches."
            )

    @property
    def update_tokens(self) -> int:
        """New entries of a head that become clusters."""
        return self.update if self.tokens is None else min(self.update, max(1, self.tokens // 2))

    def awaits_measurement(self, indexes: Sequence[RecallIndex]) -> bool:
        return any(each.awaits_threshold for each in indexes if isinstance(each, SqueezedIndex))

    def measure(self, indexes: Sequence[RecallIndex]) -> None:
        """Set one threshold per level: a quantile of the scores of all entries of all layers."""
        if not self.awaits_measurement(indexes):
            return
        squeezed = [index for index in indexes if isinstance(index, SqueezedIndex)]
        coarse = weighted_quantile(
            torch.cat([index.observed_coarse_scores.flatten() for index in squeezed]),
            torch.cat([index.coarse_sizes.flatten() for index in squeezed]),
            self.coarse_dropped,
        )
        fine = weighted_quantile(
            torch.cat([index.observed_scores.flatten() for index in squeezed]),
            torch.cat([index.cluster_sizes.flatten() for index in squeezed]),
            self.dropped,
        )
        for index in squeezed:
            index.set_thresholds(fine, coarse)

    def index(self, layer: LayerSpec) -> SqueezedIndex:
        return SqueezedIndex(layer, self)


class SqueezedIndex(EntryIndex):
    """Index with the cluster of each entry, the centroids, and the scores of observed queries.

    Clusters have coarse clusters in turn. Thresholds are 0 until they are measured, and where
    nothing is to be left out: then every cluster may be fetched.
    """

    tables: ClassVar = {
        "made": None,
        "settled": None,
        "measured": None,
        "threshold": None,
        "coarse_threshold": None,
        "centroids": 1,
        "sizes": 1,
        "scores": 1,
        "labels": 1,
        "coarse_made": None,
        "coarse_centroids": 1,
        "coarse_sizes": 1,
        "coarse_scores": 1,
        "coarse_labels": 1,
    }

    def __init__(self, layer: LayerSpec, part: Squeezed) -> None:
        super().__init__(layer)
        self._part = part
        heads = layer.kv_heads
        self._made = torch.zeros(heads, dtype=torch.int64)  # clusters of each head
        self._settled = torch.zeros(heads, dtype=torch.int64)  # entries in clusters
        self._measured = torch.zeros(2, dtype=torch.int64)  # entries scored, and with a threshold
        self._threshold, self._coarse_threshold = torch.zeros(()), torch.zeros(())
        self._centroids = torch.zeros(heads, 0, layer.head_dim)
        self._sizes = torch.zeros(heads, 0)
        self._scores = torch.zeros(heads, 0)
        self._labels = torch.zeros(heads, 0, dtype=torch.int32)  # of entries
        self._coarse_made = torch.zeros(heads, dtype=torch.int64)
        self._coarse_centroids = torch.zeros(heads, 0, layer.head_dim)
        self._coarse_sizes = torch.zeros(heads, 0)
        self._coarse_scores = torch.zeros(heads, 0)
        self._coarse_labels = torch.zeros(heads, 0, dtype=torch.int32)  # of clusters

    @property
    def awaits_threshold(self) -> bool:
        """True if scores were computed since the threshold was set."""
        scored, measured = self._measured.tolist()
        return scored != measured

    @property
    def observed_scores(self) -> Float[Tensor, "K C"]:
        """Mean score of every cluster over the observed queries."""
        return self._used("scores")

    @property
    def cluster_sizes(self) -> Float[Tensor, "K C"]:
        """Entries of every cluster."""
        return self._used("sizes")

    @property
    def observed_coarse_scores(self) -> Float[Tensor, "K G"]:
        """Mean score of every coarse cluster over the observed queries."""
        return self._used("coarse_scores")

    @property
    def coarse_sizes(self) -> Float[Tensor, "K G"]:
        """Entries of every coarse cluster."""
        return self._used("coarse_sizes")

    def set_thresholds(self, fine: float, coarse: float) -> None:
        """Set the thresholds of both levels, which were measured over all layers."""
        self._threshold, self._coarse_threshold = torch.tensor(fine), torch.tensor(coarse)
        self._measured = self._measured[:1].repeat(2)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._labels = grow_table(self._labels, max(entries.lengths))
        for head, now in enumerate(entries.lengths):
            done = int(self._settled[head])
            if now - done >= (self._part.update_tokens if done else 1):
                self._cluster(head, entries.keys_from(head, done).float(), done)
        settled = int(self._settled.sum())
        if queries is not None and settled >= max(1, 2 * int(self._measured[0])):
            self._scores = self._mean_scores(queries, self._used("centroids"), self.cluster_sizes)
            self._coarse_scores = self._mean_scores(
                queries, self._used("coarse_centroids"), self.coarse_sizes
            )
            self._measured[0] = settled

    def _cluster(self, head: int, keys: Float[Tensor, "S D"], first: int) -> None:
        """Cluster the entries of a head from `first` on."""
        centroids, sizes, labels = self._kmeans(keys, int(self._part.share * len(keys)))
        old, count = int(self._made[head]), len(sizes)
        for name in ("centroids", "sizes", "scores", "coarse_labels"):
            setattr(self, f"_{name}", grow_table(getattr(self, f"_{name}"), old + count))
        self._centroids[head, old : old + count] = centroids
        self._sizes[head, old : old + count] = sizes
        self._labels[head, first : first + len(keys)] = (labels + old).int()
        self._made[head], self._settled[head] = old + count, first + len(keys)
        if self._part.coarse:
            self._cluster_again(head, centroids, sizes, int(self._part.coarse * len(keys)))

    def _cluster_again(
        self, head: int, centroids: Float[Tensor, "C D"], sizes: Float[Tensor, " C"], count: int
    ) -> None:
        """Cluster the newest clusters of a head."""
        coarse, _, labels = self._kmeans(centroids, count)
        old, count_before = int(self._coarse_made[head]), int(self._made[head])
        for name in ("coarse_centroids", "coarse_sizes", "coarse_scores"):
            setattr(self, f"_{name}", grow_table(getattr(self, f"_{name}"), old + len(coarse)))
        self._coarse_centroids[head, old : old + len(coarse)] = coarse
        self._coarse_sizes[head].index_add_(0, labels + old, sizes)
        self._coarse_labels[head, count_before - len(labels) : count_before] = (labels + old).int()
        self._coarse_made[head] = old + len(coarse)

    def _kmeans(
        self, points: Float[Tensor, "S D"], count: int
    ) -> tuple[Float[Tensor, "C D"], Float[Tensor, " C"], Int64[Tensor, " S"]]:
        """Mean and number of the points of each cluster, and the cluster of each point."""
        count, iterations = max(count, 1), self._part.iterations
        ends = normalize(points, dim=-1)
        centers, labels = kmeans(ends, count, iterations, ClusterMetric.DISTANCE)
        sizes = torch.bincount(labels, minlength=count).float()
        return update_centers(points, labels, centers), sizes, labels

    def _mean_scores(
        self,
        queries: Float[Tensor, "H Q D"],
        centroids: Float[Tensor, "K C D"],
        sizes: Float[Tensor, "K C"],
    ) -> Float[Tensor, "K C"]:
        rows = [self._cluster_scores(row, centroids, sizes) for row in queries.unbind(1)]
        return torch.stack(rows).mean(0)

    def _cluster_scores(
        self,
        queries: Float[Tensor, "H D"],
        centroids: Float[Tensor, "K C D"],
        sizes: Float[Tensor, "K C"],
    ) -> Float[Tensor, "K C"]:
        """Estimated attention to an entry of every cluster, the mean of a group; 0 for none."""
        logits = group_queries(queries, self.layer) @ centroids.transpose(1, 2)
        logits = logits.mul_(self.layer.scaling).masked_fill_(sizes[:, None] == 0, -torch.inf)
        total = (logits + sizes.log()[:, None]).logsumexp(2, keepdim=True)
        return (logits - total).exp().nan_to_num_(0.0).mean(1)

    def _surviving_sizes(self, queries: Float[Tensor, "H D"]) -> Float[Tensor, "K C"]:
        """Sizes of the clusters whose coarse cluster exceeds its threshold; 0 for the others."""
        if not bool(self._coarse_threshold > 0):
            return self.cluster_sizes
        centroids, sizes = self._used("coarse_centroids"), self.coarse_sizes
        stays = self._cluster_scores(queries, centroids, sizes) > self._coarse_threshold
        return self.cluster_sizes * stays.gather(1, self._used("coarse_labels").long())

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        sizes = self._surviving_sizes(queries)
        scores = self._cluster_scores(queries, self._used("centroids"), sizes)
        below = (sizes == 0) | ((scores <= self._threshold) & (self._threshold > 0))
        labels = self._labels[:, : max(self.counts)].long()
        each = scores.masked_fill_(below, -torch.inf).gather(1, labels)
        return self._found(each, count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        logits = self.logits(queries, entries)
        weights = mask_missing(logits, self.paged.indexed).softmax(1).nan_to_num_(0.0)
        return self._found(weights.view(self.layer.kv_heads, self.layer.group, -1).mean(1), count)

    def _found(self, scores: Float[Tensor, "K M"], count: int) -> RecallResult:
        """The best entries, those in no cluster before all others."""
        numbers = torch.arange(scores.shape[1])
        scores = scores.masked_fill(numbers >= self._settled[:, None], torch.inf)
        scores = mask_missing(scores, self.paged.indexed)
        pages = top_rows(scores, count)
        lacks = (pages < 0).all(1) & (torch.tensor(self.paged.indexed) > 0)
        if bool(lacks.any()):  # no cluster exceeds the threshold, but something must be found
            pages[lacks, 0] = 0
        return RecallResult(pages)

    def _used(self, name: str) -> Tensor:
        """Table without its slack, so that rounding does not depend on it."""
        table: Tensor = getattr(self, f"_{name}")
        return table[:, : self._table_length(name)]

    def _table_length(self, name: str) -> int:
        if name == "labels":
            return max(self.paged.indexed)
        is_coarse = name.startswith("coarse") and name != "coarse_labels"
        return int((self._coarse_made if is_coarse else self._made).max())


def weighted_quantile(
    scores: Float[Tensor, " C"], counts: Float[Tensor, " C"], share: float
) -> float:
    """Largest score that leaves out, together with all lower ones, at most a share of entries.

    0 if that is none.

    Args:
        counts: entries with each score.
    """
    order = scores.sort(stable=True)
    left_out = counts[order.indices].double().cumsum(0)
    room = share * float(counts.sum())
    fits = int((left_out <= room).sum())
    while fits and fits < len(scores) and order.values[fits] == order.values[fits - 1]:
        fits -= 1  # entries of equal scores leave together
    has_entries = fits > 0 and float(left_out[fits - 1]) > 0
    return float(order.values[fits - 1]) if has_entries else 0.0


Part = Squeezed
