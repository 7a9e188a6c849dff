"""Comparison of Triton's kernels over pages with torch, run under Triton's interpreter.

On a GPU the same comparisons run compiled: `python tests/interpreted_page_kernels.py cuda`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fake_device import KERNEL_LAUNCHES
from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder, LayerRunner, StackRunner, decoder_stack
from larder.ops import GroupReduction, SegmentTables, reference_paged_attention
from larder.ops import page_eviction as torch_eviction
from larder.ops import pages as torch_pages
from larder.ops.gpu import attention_kernel, decoder_layer, eviction_kernels, page_kernels
from model_runs import some_ids
from paged_evictions import StepSegments, step_segments
from paged_segments import PagedSegments, kept_indices, padded_places, some_segments
from tiny_models import tiny

LENGTHS = (70, 0, 33, 1)
GPU_KERNELS = decoder_stack.LayerKernels(
    decoder_layer.DeviceLayerRows, lambda tensors: tensors, decoder_layer.are_supported
)
CASES = (
    {"page_tokens": 16, "head_dim": 12, "queries": (3, 2)},
    {"page_tokens": 64, "head_dim": 64, "queries": (1, 1), "dtype": torch.bfloat16},
    {"page_tokens": 32, "head_dim": 16, "queries": (2, 40)},  # several programs, none cut
)


def on_device(segments: PagedSegments, device: str) -> PagedSegments:
    sides = (segments.keys, segments.values, segments.queries, segments.bias)
    tables = SegmentTables(*(own.to(device) for own in segments.tables))
    return PagedSegments(*(own.to(device) for own in sides), tables, segments.scaling)


def check_append(own: PagedSegments) -> None:
    kv_heads, head_dim = 2, own.keys.shape[2]
    entries = torch.randn(2, 3, kv_heads, head_dim, device=own.keys.device).to(own.keys.dtype)
    keys, values = entries.transpose(1, 2)  # as projections come, not contiguous
    slots = torch.tensor([9, 3, 40, 17, 21, 5], device=own.keys.device)
    pools = [(own.keys.clone(), own.values.clone()) for _ in range(2)]
    page_kernels.append_step(pools[0], slots, keys, values)
    torch_form(torch_pages.append_step, pools[1], slots, keys, values)
    for one, other in zip(*pools, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, own.keys)


def check_gather(own: PagedSegments) -> None:
    layout = *own.layout, own.starts, int(own.tables.lengths.sum())
    for stored in (own.keys, own.bias.unsqueeze(2)):
        got = page_kernels.gather_pages(stored, *layout)
        assert torch.equal(got, torch_form(torch_pages.gather_pages, stored, *layout))


def check_compact(own: PagedSegments) -> None:
    for kept in (0.98, 0.4, 0.0):
        padded, counts = (
            t.to(own.keys.device)
            for t in padded_places(kept_indices(own.tables.lengths.tolist(), kept))
        )
        table, (one, other) = own.tables.table, (own.keys.clone(), own.keys.clone())
        page_kernels.compact_pages(one, table, table, padded, counts)
        torch_form(torch_pages.compact_pages, other, table, table, padded, counts)
        starts = counts.long().cumsum(0) - counts
        layout = table, counts, starts, int(counts.sum())
        held = [torch_form(torch_pages.gather_pages, side, *layout) for side in (one, other)]
        assert torch.equal(*held), f"{kept} kept"


def check_eviction(device: str) -> None:
    """An entry of each segment, dropped or merged; with equal scores, and blocks of several."""
    long: dict[str, Any] = {
        "lengths": (200, 130, 64, 65, 1, 0, 70, 128),
        "page_tokens": 32,
        "head_dim": 40,
    }
    counts = {"counts": (199, 130, 63, 64, 1, 0, 69, 127)}
    long |= counts
    cases: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16}, long, {**long, "seed": 1}]
    for case in cases:
        for is_merging in (False, True):
            one = step_segments(**case).to(device)
            other = one.clone()
            for own, form in (
                (one, eviction_kernels.evict_lowest),
                (other, partial(twin_form, torch_eviction, torch_eviction.evict_lowest)),
            ):
                merging = own.merging if is_merging else None
                form(own.entries, own.mass, own.table, own.limits, merging)
            left = torch.minimum(one.limits.lengths, one.limits.counts)
            layout = one.table, left, left.long().cumsum(0) - left, int(left.sum())
            for mine, theirs in zip(_pools(one), _pools(other), strict=True):
                sides = [
                    twin_form(torch_pages, torch_pages.gather_pages, pool, *layout)
                    for pool in (mine, theirs)
                ]
                exactness = 0.01 if mine.dtype is torch.bfloat16 else 1e-5  # of merged values
                torch.testing.assert_close(*sides, atol=exactness, rtol=exactness)
            found, expected = one.merging.thresholds[1:], other.merging.thresholds[1:]
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0, equal_nan=True)


def check_lost_scores(device: str) -> None:
    """Scores that are NaN rank below all others, those of spared entries above."""
    one = step_segments().to(device)
    one.mass[one.table[3, :2].long()] = torch.nan  # the first of these entries is spared
    other = one.clone()
    other.mass.masked_fill_(other.mass.isnan(), -torch.inf)
    eviction_kernels.evict_lowest(one.entries, one.mass, one.table, one.limits)
    given = other.entries, other.mass, other.table, other.limits
    twin_form(torch_eviction, torch_eviction.evict_lowest, *given)
    first = one.entries.positions[one.table[3, 0].long(), 0]
    assert first < one.limits.firsts[3], "a spared entry was evicted"
    held = torch.minimum(one.limits.lengths, one.limits.counts)
    layout = one.table, held, held.long().cumsum(0) - held, int(held.sum())
    sides = [
        twin_form(
            torch_pages, torch_pages.gather_pages, own.entries.positions.unsqueeze(2), *layout
        )
        for own in (one, other)
    ]
    assert torch.equal(*sides)


def _pools(own: StepSegments) -> list[Tensor]:
    """Pools of the entries, with a row of numbers for each."""
    keys, values, *numbers, columns = own.entries
    return [keys, values, *(each.unsqueeze(2) for each in (*numbers, *columns))]


def check_mass(own: PagedSegments) -> None:
    for reduction in GroupReduction:
        for bias, softcap in ((None, None), (own.bias, 1.5)):
            stored = own.queries, own.keys, own.values, own.tables, own.scaling
            _, lse = reference_paged_attention(*stored, bias, softcap)
            asked = own.queries, own.keys, *own.layout, lse, own.scaling, reduction, bias, softcap
            one, other = own.bias.clone(), own.bias.clone()
            page_kernels.add_column_mass(one, *asked)
            torch_form(torch_pages.add_column_mass, other, *asked)
            torch.testing.assert_close(one[1:], other[1:], atol=1e-4, rtol=1e-4)


def check_attention(own: PagedSegments) -> None:
    scattered = own.queries.transpose(1, 2).contiguous().transpose(1, 2)  # as projections come
    stored = scattered, own.keys, own.values, own.tables, own.scaling
    tolerance = 0.02 if own.keys.dtype == torch.bfloat16 else 1e-5
    for bias, softcap in ((None, None), (own.bias, 1.5)):
        got = attention_kernel.paged_attention(*stored, bias, softcap)
        expected = reference_paged_attention(*stored, bias, softcap)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.float(), other, atol=tolerance, rtol=tolerance)


def check_launches(own: PagedSegments, step: StepSegments) -> None:
    """Launches of the functions that a decode step with evictions calls, as the fake device has."""
    counts: dict[str, int] = {}
    slots = torch.arange(own.keys.shape[1], own.keys.shape[1] + 2, device=own.keys.device)
    entries = torch.zeros(1, 2, own.keys.shape[2], device=own.keys.device).to(own.keys.dtype)
    queries = own.queries[:, :, :1].contiguous()
    lse = torch.zeros(queries.shape[:3], device=queries.device)
    pools, stored = (own.keys.clone(), own.values.clone()), (own.keys, own.values)
    mass = own.bias.clone(), queries, own.keys, *own.layout, lse, own.scaling
    evicted = step.entries, step.mass, step.table, step.limits, step.merging
    calls = (
        (page_kernels, "append_step", (pools, slots, entries, entries)),
        (page_kernels, "add_column_mass", mass),
        (eviction_kernels, "evict_lowest", evicted),
        (attention_kernel, "paged_attention", (queries, *stored, own.tables, own.scaling)),
    )
    for module, name, given in calls:
        launch = vars(module)["launch"]

        def counting(*args, launch=launch, name=name, **sizes):
            counts[name] = counts.get(name, 0) + 1
            launch(*args, **sizes)

        vars(module)["launch"] = counting
        vars(module)[name](*given)
        vars(module)["launch"] = launch
    assert counts == {name: KERNEL_LAUNCHES[name] for _, name, _ in calls}


def check_layers(device: str) -> None:
    """Steps of the decoder stack with Triton's kernels against the model's own layers."""
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        module = tiny(name, dtype=torch.bfloat16).to(device)
        with Decoder(module) as decoder:
            decoder.layer_runner = LayerRunner()
            expected = stepped(decoder)
            stack = StackRunner(decoder.body, decoder.spec)
            decoder.layer_runner = stack
            got = stepped(decoder)
            assert stack._stack is not None, f"{name} is not served"
        assert (got - expected).square().mean().sqrt() < 0.05 * expected.std(), name


def stepped(decoder: Decoder) -> Tensor:
    """Logits of three tokens of two texts behind a prompt."""
    caches = [SequenceCache(decoder.spec, "dense") for _ in range(2)]
    for seed, cache in enumerate(caches):
        decoder.read([BatchSegment(cache, some_ids(9 + seed, seed=seed))], Mode.APPEND)
    segments = [BatchSegment(cache, (5, 6, 7)) for cache in caches]
    return decoder.forward_logits(segments, Mode.APPEND, [0, 2, 3, 5])


def torch_form(form, *args):
    """The readable twin of a kernel over pages, also on a GPU."""
    return twin_form(torch_pages, form, *args)


def twin_form(module, form, *args):
    """The readable twin of a kernel, in its module, also on a GPU."""
    former, module._kernels = module._kernels, lambda pool: None
    try:
        return form(*args)
    finally:
        module._kernels = former


def main(device: str) -> None:
    cases = [on_device(some_segments(LENGTHS, **case), device) for case in CASES]
    # A segment of several pieces, whose parts are joined.
    cases.append(on_device(some_segments((700, 300), page_tokens=128, head_dim=16), device))
    checks = {
        "append": check_append,
        "gather": check_gather,
        "compact": check_compact,
        "mass": check_mass,
        "attention": check_attention,
    }
    for name, check in checks.items():
        for own in cases:
            check(own)
        print(name)
    check_eviction(device)
    check_lost_scores(device)
    print("eviction")
    check_launches(cases[1], step_segments().to(device))
    print("launches")
    decoder_stack._kernels_of = lambda device: GPU_KERNELS
    check_layers(device)
    print("layers")
    own = cases[0]
    one = page_kernels.gather_pages(own.keys, *own.layout, own.starts, sum(LENGTHS))
    if not torch.equal(
        one, torch_form(torch_pages.gather_pages, own.values, *own.layout, own.starts, sum(LENGTHS))
    ):
        print("noticed")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
