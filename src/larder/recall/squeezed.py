"""Squeezed index (Squeezed Attention): clusters of keys above one threshold of estimated attention.

Hooper et al., "Squeezed Attention: Accelerating Long Context Length LLM Inference" (2024),
arXiv:2411.09688, for a text that many questions are asked about. Keys of unit length are clustered,
5 clusters to 100 entries; a centroid is the mean of its keys as they are. The score of a cluster is
the attention to one of its entries as centroids estimate it: exp(q c_i) / sum_j n_j exp(q c_j).
Clusters above a threshold are attended to exactly. The threshold is one number for all layers
and heads, the quantile of the scores of the text's last 100 queries, so that heads of scattered
attention fetch many entries and others few. What the clusters do not hold is attended to exactly.

Scores, sizes in the denominator, and the quantile over entries are those of the released code.
Differences: k-means starts from evenly spaced entries and runs a fixed number of iterations.
Scores are means over the query heads of a kv head [inferred: the released model has as many kv
heads]. No more than `tokens` entries are fetched, the highest scores first. New entries become
clusters when there are `update` of them, at most half of `tokens`; the threshold is measured again
when there are twice as many as it was measured on. One level of clusters, where the paper has a
form with two. A question attends to everything, exactly, unless `union` is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

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
    """

    share: float = 0.05
    dropped: float = 0.7
    update: int = 1024
    iterations: int = 10

    observed: ClassVar[int] = 100
    measures_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise BadParameter(f"squeezed.share must be in (0, 1], got {self.share}.")
        if not 0 <= self.dropped < 1:
            raise BadParameter(f"squeezed.dropped must be in [0, 1), got {self.dropped}.")
        for name in ("update", "iterations"):
            if (value := getattr(self, name)) < 1:
                raise BadParameter(f"squeezed.{name} must be at least 1, got {value}.")
        if self.fetch is not FetchMode.IN_TURN:
            raise BadParameter(
                f"squeezed.fetch must be in_turn, got {self.fetch.value}: its threshold is "
                "measured over all layers before the first of them searches."
            )

    @property
    def update_tokens(self) -> int:
        """New entries of a head that become clusters."""
        return self.update if self.tokens is None else min(self.update, max(1, self.tokens // 2))

    def measure(self, indexes: Sequence[RecallIndex]) -> None:
        """Set one threshold: the quantile of the scores of all entries of all layers."""
        own = [index for index in indexes if isinstance(index, SqueezedIndex)]
        if not any(index.awaits_threshold for index in own):
            return
        scores = torch.cat([index.observed_scores.flatten() for index in own])
        counts = torch.cat([index.cluster_sizes.flatten() for index in own])
        threshold = weighted_quantile(scores, counts, self.dropped)
        for index in own:
            index.set_threshold(threshold)

    def index(self, layer: LayerSpec) -> SqueezedIndex:
        return SqueezedIndex(layer, self)


class SqueezedIndex(EntryIndex):
    """Index with the cluster of each entry, the centroids, and the scores of observed queries.

    `threshold` is 0 until it is measured: then every cluster may be fetched.
    """

    tables: ClassVar = {
        "made": None,
        "settled": None,
        "measured": None,
        "threshold": None,
        "centroids": 1,
        "sizes": 1,
        "scores": 1,
        "labels": 1,
    }

    def __init__(self, layer: LayerSpec, part: Squeezed) -> None:
        super().__init__(layer)
        self._part = part
        heads = layer.kv_heads
        self._made = torch.zeros(heads, dtype=torch.int64)  # clusters of each head
        self._settled = torch.zeros(heads, dtype=torch.int64)  # entries in clusters
        self._measured = torch.zeros(2, dtype=torch.int64)  # entries scored, and with a threshold
        self._threshold = torch.zeros(())
        self._centroids = torch.zeros(heads, 0, layer.head_dim)
        self._sizes = torch.zeros(heads, 0)
        self._scores = torch.zeros(heads, 0)
        self._labels = torch.zeros(heads, 0, dtype=torch.int32)

    @property
    def awaits_threshold(self) -> bool:
        """True if scores were computed since the threshold was set."""
        scored, measured = self._measured.tolist()
        return scored != measured

    @property
    def observed_scores(self) -> Float[Tensor, "K C"]:
        """Mean score of every cluster over the observed queries."""
        return self._scores

    @property
    def cluster_sizes(self) -> Float[Tensor, "K C"]:
        """Entries of every cluster."""
        return self._sizes

    def set_threshold(self, threshold: float) -> None:
        """Set the threshold that was measured over all layers."""
        self._threshold = torch.tensor(threshold)
        self._measured = self._measured[:1].repeat(2)

    def _digest(self, entries: Entries, known: tuple[int, ...], queries: Tensor | None) -> None:
        self._labels = grow_table(self._labels, max(entries.lengths))
        for head, now in enumerate(entries.lengths):
            done = int(self._settled[head])
            if now - done >= (self._part.update_tokens if done else 1):
                self._cluster(head, entries.keys_from(head, done).float(), done)
        settled = int(self._settled.sum())
        if queries is not None and settled >= max(1, 2 * int(self._measured[0])):
            self._scores = self._mean_scores(queries)
            self._measured[0] = settled

    def _cluster(self, head: int, keys: Float[Tensor, "S D"], first: int) -> None:
        """Cluster the entries of a head from `first` on."""
        old, count = int(self._made[head]), max(int(self._part.share * len(keys)), 1)
        iterations = self._part.iterations
        centers, labels = kmeans(normalize(keys, dim=-1), count, iterations, ClusterMetric.DISTANCE)
        for name in ("centroids", "sizes", "scores"):
            setattr(self, f"_{name}", grow_table(getattr(self, f"_{name}"), old + count))
        self._centroids[head, old : old + count] = update_centers(keys, labels, centers)
        self._sizes[head, old : old + count] = torch.bincount(labels, minlength=count).float()
        self._labels[head, first : first + len(keys)] = (labels + old).int()
        self._made[head], self._settled[head] = old + count, first + len(keys)

    def _mean_scores(self, queries: Float[Tensor, "H Q D"]) -> Float[Tensor, "K C"]:
        rows = [self._cluster_scores(row) for row in queries.unbind(1)]
        return torch.stack(rows).mean(0)

    def _cluster_scores(self, queries: Float[Tensor, "H D"]) -> Float[Tensor, "K C"]:
        """Estimated attention to an entry of every cluster, the mean of a group; 0 for none."""
        logits = group_queries(queries, self.layer) @ self._centroids.transpose(1, 2)
        logits = logits.mul_(self.layer.scaling).masked_fill_(self._sizes[:, None] == 0, -torch.inf)
        total = (logits + self._sizes.log()[:, None]).logsumexp(2, keepdim=True)
        return (logits - total).exp().nan_to_num_(0.0).mean(1)

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        scores = self._cluster_scores(queries)
        below = (scores <= self._threshold) & (self._threshold > 0)
        labels = self._labels[:, : max(self.counts)].long()
        each = scores.masked_fill_(below, -torch.inf).gather(1, labels)
        return self._found(each, count)

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        logits = self.logits(queries, entries)
        weights = mask_missing(logits, self.paged.known).softmax(1).nan_to_num_(0.0)
        return self._found(weights.view(self.layer.kv_heads, self.layer.group, -1).mean(1), count)

    def _found(self, scores: Float[Tensor, "K M"], count: int) -> RecallResult:
        """The best entries, those in no cluster before all others."""
        numbers = torch.arange(scores.shape[1])
        scores = scores.masked_fill(numbers >= self._settled[:, None], torch.inf)
        scores = mask_missing(scores, self.paged.known)
        pages = top_rows(scores, count)
        lacks = (pages < 0).all(1) & (torch.tensor(self.paged.known) > 0)
        if bool(lacks.any()):  # no cluster exceeds the threshold, but something must be found
            pages[lacks, 0] = 0
        return RecallResult(pages)

    def _table_length(self, name: str) -> int:
        return max(self.paged.known) if name == "labels" else int(self._made.max())


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
