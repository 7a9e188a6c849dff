"""Average linkage and orders of RAGBoost by slow loops over the lists themselves."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

Ids = tuple[str, ...]
Matrix = Sequence[Sequence[float]]


def distance(one: Ids, other: Ids) -> float:
    common = [each for each in one if each in other]
    if not common:
        return 1.0
    apart = fmean(abs(one.index(each) - other.index(each)) for each in common)
    return 1 - len(common) / max(len(one), len(other)) + 0.001 * apart


def mean_distance(near: Matrix, one: set[int], other: set[int]) -> float:
    """Average-link distance of two clusters, from all pairs of their lists."""
    return fmean(float(near[a][b]) for a in one for b in other)


def merge_heights(near: Matrix) -> list[float]:
    """Distances at which the nearest clusters are merged, one pair after the other."""
    clusters, heights = [{number} for number in range(len(near))], list[float]()
    while len(clusters) > 1:
        pairs = [(a, b) for a in range(len(clusters)) for b in range(a)]
        one, other = min(pairs, key=lambda p: mean_distance(near, clusters[p[0]], clusters[p[1]]))
        heights.append(mean_distance(near, clusters[one], clusters[other]))
        clusters[other] |= clusters[one]
        del clusters[one]
    return heights


def orders(lists: Sequence[Ids], merges: Sequence[tuple[int, int]]) -> list[Ids]:
    """Order of each list below the clusters of a tree, from the largest to the list itself."""
    members = [{number} for number in range(len(lists))]
    members += ({0} for _ in merges)
    for number, (one, other) in enumerate(merges, len(lists)):
        members[number] = members[one] | members[other]
    found = list[Ids]()
    for own in range(len(lists)):
        order = list[str]()
        above = sorted((c for c in members if own in c), key=len, reverse=True)
        for cluster in above:
            first = lists[min(cluster)]
            order += [
                each
                for each in first
                if each not in order and all(each in lists[number] for number in cluster)
            ]
        found.append(tuple(order))
    return found


def read_once(found: Sequence[Ids], sizes: dict[str, int]) -> int:
    """Characters of all lists but those that stand behind the same beginning in an earlier one."""
    count = 0
    for number, order in enumerate(found):
        for index, each in enumerate(order):
            beginning = order[: index + 1]
            if all(other[: index + 1] != beginning for other in found[:number]):
                count += sizes[each]
    return count
