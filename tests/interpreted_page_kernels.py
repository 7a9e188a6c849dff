"""Comparison of Triton's kernels over pages with torch, run under Triton's interpreter.

On a GPU the same comparisons run compiled: `python tests/interpreted_page_kernels.py cuda`.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder, LayerRunner, StackRunner, decoder_stack
from larder.ops import GroupReduction, SegmentTables, reference_paged_attention
from larder.ops import pages as torch_pages
from larder.ops.gpu import attention_kernel, decoder_layer, page_kernels
from model_runs import some_ids
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
    """The readable twin, also on a GPU."""
    former, torch_pages._kernels = torch_pages._kernels, lambda pool: None
    try:
        return form(*args)
    finally:
        torch_pages._kernels = former


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
