"""Decode steps on a GPU against what reading weights and cache once takes, batch 1 to 64.

    python benchmarks/gpu_step.py                        random weights in the shape of Qwen3-0.6B
    python benchmarks/gpu_step.py --device cpu --tiny    every path in seconds, no figures of a GPU

Caches hold random entries, in ragged ones half to one and a half of a quarter per head. Cases:
`eager` and `graph` are Larder over pages, step by step and captured; `DynamicCache` is transformers
with sdpa; `StaticCache` is transformers compiled, at the batch sizes of `--compiled`; `kvpress` is
its KnormPress at a quarter, where it is installed. Medians in milliseconds, in brackets times the
limit, which is bytes over the bandwidth of a copy measured first. Without a GPU it exits with 2.
`--check` only looks for the GPU and compares logits; `--profile` lists the kernels of one step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from larder.cache import PageArena, SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, CudaGraphCapture, DecodeGraphs, Decoder
from larder.ops import PAGE_TOKENS, AttentionBackend
from larder_bench.profiling.eager_capture import EagerCapture
from larder_bench.profiling.synthetic_cache import random_cache
from larder_bench.random_models import open_model

KEPT = 4  # a quarter of the entries
ROOM = 64  # tokens that a random cache has room for
LARGEST_DIFFERENCE = 0.5  # of logits in bfloat16, in a model with random weights
TOKEN = 7
Step = Callable[[], object]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(step: Step, device: torch.device, steps: int) -> float:
    """Median of a step, behind two to warm up."""
    times: list[float] = []
    for _ in range(steps + 2):
        wait(device)
        started = time.perf_counter()
        step()
        wait(device)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def bandwidth(device: torch.device, mebibytes: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(mebibytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / milliseconds(lambda: target.copy_(source), device, 9) * 1000


def weight_bytes(model: Any) -> int:
    """Bytes that a step reads of the weights: all, but embeddings that are not the head's too."""
    table = model.get_input_embeddings().weight
    total = sum(weight.nbytes for weight in model.parameters())  # tied ones come once
    return total - (0 if model.config.tie_word_embeddings else table.nbytes)


def use_arena(decoder: Decoder, rows: int, entries: int, page_tokens: int) -> int:
    """Give the decoder an arena for caches of that size, and return the pages of a head."""
    width = -(-(3 * entries // 2 + 2 * ROOM) // page_tokens)
    heads = max(layer.kv_heads for layer in decoder.spec.layers)
    # The CPU's own kernel reads tables on the host, which no graph can repeat.
    backend = AttentionBackend.GATHERED if decoder.spec.device.type == "cpu" else None
    decoder.use_pages(PageArena(decoder.spec, rows * heads * width, page_tokens, backend))
    return width


def eager_step(decoder: Decoder, caches: list[SequenceCache]) -> Step:
    def step() -> Tensor:
        segments = [BatchSegment(cache, (TOKEN,)) for cache in caches]
        return decoder.forward_logits(segments, Mode.APPEND, range(len(caches)))

    return step


def larder_times(
    decoder: Decoder, form: str, rows: int, entries: int, options: argparse.Namespace
) -> dict[str, float]:
    """Times of steps over pages, eager and captured, and the bytes of the caches."""
    device = decoder.spec.device
    width = use_arena(decoder, rows, entries, options.page_tokens)
    caches = [random_cache(decoder, form, entries) for _ in range(rows)]
    capture = CudaGraphCapture() if device.type == "cuda" else EagerCapture()
    graphs = DecodeGraphs(decoder, capture, width, (rows,))
    held = sum(
        sum(own) * layer.bytes_per_token(decoder.spec.dtype) // layer.kv_heads
        for cache in caches
        for layer, own in zip(decoder.spec.layers, cache.lengths(), strict=True)
    )
    ids = (TOKEN,) * rows
    if options.profile:
        graphs.step(caches, ids)
        print_kernels(lambda: graphs.step(caches, ids))
    return {
        "bytes": held,
        "eager": milliseconds(eager_step(decoder, caches), device, options.steps),
        "graph": milliseconds(lambda: graphs.step(caches, ids), device, options.steps),
    }


def dynamic_step(model: Any, cache: DynamicCache, rows: int, position: int) -> Step:
    device = model.device
    tokens = torch.full((rows, 1), TOKEN, device=device)
    positions = torch.full((rows, 1), position, device=device)

    @torch.no_grad()
    def step() -> None:
        model(tokens, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        cache.crop(-1)

    return step


@torch.no_grad()
def compiled_step(model: Any, rows: int, entries: int) -> Step:
    """Compiled steps of transformers over a StaticCache, each at the next place of the cache."""
    device = model.device
    cache = StaticCache(config=model.config, max_cache_len=entries + ROOM)
    ids = torch.randint(3, model.config.vocab_size, (rows, entries), device=device)
    model(ids, past_key_values=cache, logits_to_keep=1)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
    tokens = torch.full((rows, 1), TOKEN, device=device)
    positions = iter(range(entries, entries + ROOM))

    @torch.no_grad()
    def step() -> None:
        at = torch.full((rows, 1), next(positions), device=device)
        compiled(tokens, position_ids=at, past_key_values=cache, logits_to_keep=1)

    return step


def print_kernels(step: Step) -> None:
    """Print the kernels of a step that take the most time of the GPU."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    table = seen.key_averages().table(
        sort_by="cuda_time_total", row_limit=14, max_name_column_width=60
    )
    print(table)


def random_dynamic_cache(decoder: Decoder, rows: int, entries: int) -> DynamicCache:
    cache, spec = DynamicCache(config=decoder.module.config), decoder.spec
    for layer in spec.layers:
        shape = 2, rows, layer.kv_heads, entries, layer.head_dim
        keys, values = torch.randn(shape, dtype=spec.dtype, device=spec.device)
        cache.update(keys, values, layer.index)
    return cache


@torch.no_grad()
def pressed_cache(model: Any, rows: int, entries: int) -> DynamicCache:
    """Cache that kvpress leaves of a random prompt, the same for each row."""
    from kvpress import KnormPress  # an extra of larder that holds transformers back

    ids = torch.randint(3, model.config.vocab_size, (1, entries), device=model.device)
    cache = DynamicCache(config=model.config)
    with KnormPress(compression_ratio=1 - 1 / KEPT)(model):
        positions = torch.arange(
            entries, device=model.device
        )  # which later transformers do not pass
        model(ids, past_key_values=cache, logits_to_keep=1, cache_position=positions)
    cache.batch_repeat_interleave(rows)
    return cache


def peer_times(
    decoder: Decoder, rows: int, entries: int, options: argparse.Namespace
) -> dict[str, float]:
    """Times of transformers, and of kvpress where it is installed."""
    model, device = decoder.module, decoder.spec.device
    cache = random_dynamic_cache(decoder, rows, entries)
    step = dynamic_step(model, cache, rows, entries)
    times = {"DynamicCache": milliseconds(step, device, options.steps)}
    if rows in options.compiled:
        step = compiled_step(model, rows, entries)
        times["StaticCache"] = milliseconds(step, device, options.steps)
    if find_spec("kvpress") is not None:
        step = dynamic_step(model, pressed_cache(model, rows, entries), rows, entries)
        times["kvpress"] = milliseconds(step, device, options.steps)
    return times


@torch.no_grad()
def largest_difference(decoder: Decoder, page_tokens: int) -> float:
    """Largest difference of logits between the model itself and steps over pages, captured too."""
    device, words = decoder.spec.device, min(decoder.vocab_size, 4096)
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(3, words, (300,), generator=source).tolist()
    own = decoder.module(torch.tensor([ids], device=device), use_cache=False).logits[0].float()
    width = use_arena(decoder, 2, len(ids), page_tokens)
    capture = CudaGraphCapture() if device.type == "cuda" else EagerCapture()
    graphs = DecodeGraphs(decoder, capture, width, (2,))
    caches = [SequenceCache(decoder.spec, "dense") for _ in range(2)]
    parts: list[Tensor] = []
    for cache in caches:
        parts.append(
            decoder.forward_logits([BatchSegment(cache, tuple(ids[:280]))], Mode.APPEND, [279])
        )
    found = [float((part[0] - own[279]).abs().max()) for part in parts]
    for index in range(280, 300):
        segments = [BatchSegment(cache, (ids[index],)) for cache in caches]
        if index < 290:
            got = decoder.forward_logits(segments, Mode.APPEND, range(2))
        else:
            got = graphs.step(caches, (ids[index],) * 2)
        found.append(float((got - own[index]).abs().max()))
    return max(found)


def print_row(
    rows: int, whole: dict[str, float], quarter: dict[str, float], limits: tuple[float, float]
) -> None:
    full, less = limits
    kinds = [("full", full, whole), ("quarter", less, quarter)]
    for name, limit, times in kinds:
        cells = [
            f"{case} {taken:8.3f} ({taken / limit:6.2f})"
            for case, taken in times.items()
            if case != "bytes"
        ]
        print(f"{rows:3} rows  {name:8} limit {limit:8.3f}  " + "  ".join(cells), flush=True)


def measure(decoder: Decoder, options: argparse.Namespace) -> None:
    """Print the table, a batch size after the other, while the time lasts."""
    device, started = decoder.spec.device, time.monotonic()
    speed = bandwidth(device, 16 if options.tiny else 1024)
    weights = weight_bytes(decoder.module)
    print(f"copy {speed / 1e9:.1f} GB/s, weights {weights / 1e6:.1f} MB", flush=True)
    if find_spec("kvpress") is None:
        print("kvpress is not installed: its column is left out.")
    for rows in options.rows:
        if time.monotonic() - started > options.seconds:
            print(f"{rows} rows and more were not measured: {options.seconds} seconds are over.")
            return
        whole = larder_times(decoder, "dense", rows, options.entries, options)
        quarter = larder_times(decoder, "ragged", rows, options.entries // KEPT, options)
        peers = peer_times(decoder, rows, options.entries, options)
        whole |= {name: peers[name] for name in ("DynamicCache", "StaticCache") if name in peers}
        quarter |= {name: peers[name] for name in ("kvpress",) if name in peers}
        limits = [1000 * (weights + times["bytes"]) / speed for times in (whole, quarter)]
        print_row(rows, whole, quarter, (limits[0], limits[1]))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--entries", type=int, default=1024, help="of a head before steps")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--compiled", type=int, nargs="*", default=[1, 8], help="of StaticCache")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=400.0, help="no further batch after it")
    parser.add_argument("--page-tokens", type=int, default=PAGE_TOKENS)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try every path")
    parser.add_argument("--check", action="store_true", help="compare logits and stop")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.model, options.entries, options.rows = "random:qwen3-tiny", 64, [1, 2]
        options.compiled = [1]
        options.steps, options.page_tokens = 3, 16
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print(
            "No GPU that torch can use was found, so nothing was measured: run this on a machine "
            "with one, or try its paths by --device cpu --tiny.",
            file=sys.stderr,
        )
        return 2
    decoder = open_model(options.model, options.device, options.dtype).decoder
    decoder.share()
    device = decoder.spec.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, not a GPU"
    print(f"{name}, torch {torch.__version__}, {options.model}, {options.dtype}", flush=True)
    difference = largest_difference(decoder, options.page_tokens)
    print(f"largest difference of logits {difference:.4f}", flush=True)
    if not difference <= LARGEST_DIFFERENCE:
        print(f"Logits differ by more than {LARGEST_DIFFERENCE}: no times.", file=sys.stderr)
        return 1
    if not options.check:
        measure(decoder, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
