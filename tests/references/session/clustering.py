"""k-means, silhouette and representatives, one number at a time."""

from __future__ import annotations

import itertools
import math

Row = list[float]


def distance(a: Row, b: Row) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def mean(rows: list[Row]) -> Row:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def cosine(a: Row, b: Row) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return dot / lengths if lengths else 0.0


def slow_centroids(rows: list[Row], labels: list[int]) -> list[Row]:
    return [
        mean([row for row, label in zip(rows, labels, strict=True) if label == episode])
        for episode in range(max(labels) + 1)
    ]


def best_labels(rows: list[Row], count: int) -> list[int]:
    """The partition with the least squared distance to its means, by trying every one."""
    best, least = [], math.inf
    for rest in itertools.product(range(count), repeat=len(rows) - 1):
        labels = first_seen([0, *rest])
        if max(labels) + 1 < count:
            continue
        centers = slow_centroids(rows, labels)
        spread = sum(distance(r, centers[e]) ** 2 for r, e in zip(rows, labels, strict=True))
        if spread < least - 1e-9:
            best, least = labels, spread
    return best


def first_seen(labels: list[int]) -> list[int]:
    """Number the episodes in the order of their first members."""
    seen: list[int] = []
    for label in labels:
        if label not in seen:
            seen.append(label)
    return [seen.index(label) for label in labels]


def slow_silhouette(rows: list[Row], labels: list[int]) -> float:
    scores = []
    for i, row in enumerate(rows):
        means = {}
        for episode in set(labels):
            others = [j for j in range(len(rows)) if labels[j] == episode and j != i]
            if others:
                means[episode] = sum(distance(row, rows[j]) for j in others) / len(others)
        own = means.pop(labels[i], None)
        nearest = min(means.values())
        scores.append(0.0 if own is None else (nearest - own) / max(nearest, own))
    return sum(scores) / len(scores)


def slow_representatives(rows: list[Row], labels: list[int], episode: int, count: int) -> list[int]:
    members = [i for i, label in enumerate(labels) if label == episode]
    center = mean([rows[i] for i in members])
    ranked = sorted(members, key=lambda i: (-round(cosine(rows[i], center), 6), i))
    return sorted(ranked[:count])
