"""Orders of the contexts of many requests, by a tree of their lists, so that prefixes are shared.

Retrieved documents overlap between requests, but stand in another order in each. RAGBoost clusters
the lists of documents by average linkage: what all lists of a cluster have in common stands first
in each of them, behind what the larger cluster around it has in common, and the other documents
keep the order in which they were retrieved. Jiang et al., "RAGBoost: Efficient Retrieval-Augmented
Generation with Accuracy-Preserving Context Reuse" (2025), arXiv:2511.03475; the weight of positions
is that of the released code.

Larder keeps the given orders where the tree would share less of the texts, which the paper does not
exclude. In which order the requests are answered is decided by the tree of their tokens
(`larder.engine.batch`), where the paper groups them by the first branch of this tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

POSITION_WEIGHT = 0.001  # of differences of positions beside the share of common documents
MOST_LISTS = 2048  # clustered together; a matrix of that many takes 32 MiB

Ids = tuple[str, ...]


def shared_orders(lists: Sequence[Ids], sizes: Mapping[str, int]) -> list[Ids]:
    """Order of the documents of each list, so that lists share long prefixes.

    Args:
        lists: documents of each request, none of them twice in a list.
        sizes: characters of each document.

    Examples:
        >>> shared_orders([("a", "b"), ("c", "b")], {"a": 1, "b": 1, "c": 1})
        [('b', 'a'), ('b', 'c')]
    """
    found = list[Ids]()
    for start in range(0, len(lists), MOST_LISTS):
        given = list(lists[start : start + MOST_LISTS])
        arranged = _tree_orders(given)
        is_better = distinct_size(arranged, sizes) < distinct_size(given, sizes)
        found += arranged if is_better else given
    return found


def distinct_size(orders: Sequence[Ids], sizes: Mapping[str, int]) -> int:
    """Characters that are read where every prefix is read once."""
    prefixes, size = dict[tuple[int, str], int](), 0  # numbers of prefixes, by prefix and document
    for order in orders:
        prefix = 0
        for each in order:
            key = prefix, each
            if key not in prefixes:
                prefixes[key] = len(prefixes) + 1
                size += sizes[each]
            prefix = prefixes[key]
    return size


def average_linkage(distances: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pairs of clusters that are merged; the pair of number k becomes cluster N + k.

    Chains of nearest neighbors find the clusters of average linkage in any order that has parts
    before the whole. Of equal distances that to the cluster before in the chain counts, then that
    to the earliest.

    Args:
        distances: of each of N lists to each, symmetric.
    """
    count = len(distances)
    near = distances.astype(np.float64)
    np.fill_diagonal(near, np.inf)
    names, sizes = list(range(count)), np.ones(count)
    merges, chain = list[tuple[int, int]](), list[int]()
    while len(merges) < count - 1:
        if not chain:
            chain = [int(np.flatnonzero(sizes)[0])]
        last = chain[-1]
        nearest = int(near[last].argmin())
        if len(chain) > 1 and near[last, chain[-2]] <= near[last, nearest]:
            nearest = chain[-2]
        if len(chain) < 2 or nearest != chain[-2]:
            chain.append(nearest)
            continue
        one, other = sorted(chain[-2:])
        del chain[-2:]
        row = (sizes[one] * near[one] + sizes[other] * near[other]) / (sizes[one] + sizes[other])
        near[one], near[:, one] = row, row
        near[other], near[:, other], near[one, one] = np.inf, np.inf, np.inf
        sizes[one], sizes[other] = sizes[one] + sizes[other], 0
        merges.append((names[one], names[other]))
        names[one] = count + len(merges) - 1
    return merges


def _tree_orders(lists: Sequence[Ids]) -> list[Ids]:
    """Orders by the tree of the lists."""
    merges, count = average_linkage(_distances(lists)), len(lists)
    common, first = [set(each) for each in lists], list(range(count))
    for one, other in merges:
        common.append(common[one] & common[other])
        first.append(min(first[one], first[other]))
    prefixes = dict[int, Ids]()
    for node in reversed(range(len(common))):
        prefix, own = prefixes.get(node, ()), lists[first[node]]
        new = common[node].difference(prefix)
        prefix = (*prefix, *(each for each in own if each in new))
        prefixes[node] = prefix
        if node >= count:
            prefixes |= dict.fromkeys(merges[node - count], prefix)
    return [prefixes[index] for index in range(count)]


def _distances(lists: Sequence[Ids]) -> NDArray[np.float64]:
    """Distance of all pairs of lists of documents: little for many common ones at like positions.

    1 - common / length of the longer list + `POSITION_WEIGHT` times the mean difference of the
    positions of common documents.
    """
    count = len(lists)
    lengths = np.array([len(each) for each in lists])
    common, apart = np.zeros((count, count)), np.zeros((count, count))
    for rows, indices in _postings(lists):
        common[np.ix_(rows, rows)] += 1
        apart[np.ix_(rows, rows)] += abs(indices[:, None] - indices)
    longest = np.maximum(np.maximum(lengths[:, None], lengths), 1)
    return 1 - common / longest + POSITION_WEIGHT * apart / np.maximum(common, 1)


def _postings(lists: Sequence[Ids]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Numbers of the lists that have a document, and its indices in them, for each document."""
    found = dict[str, list[tuple[int, int]]]()
    for row, own in enumerate(lists):
        for index, each in enumerate(own):
            found.setdefault(each, []).append((row, index))
    for postings in found.values():
        rows, indices = zip(*postings, strict=True)
        yield np.array(rows), np.array(indices)
