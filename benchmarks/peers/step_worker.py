"""Decode steps of one engine, for `decode_steps.py`: cases by name, timed when it asks.

Started as `PYTHON step_worker.py ENGINE MODEL ROWS...` by a Python that has the engine. It prints
the names of its cases, then answers each line `CASE STEPS` by the CPU seconds of that many steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

ENTRIES, KEPT, TOKEN, ROOM = 1024, 4, 7, 256
Step = Callable[[], object]


def batched_step(model: Any, cache: Any, rows: int) -> Step:
    """Step of transformers over a batch, which takes the new entries out again."""
    import torch

    tokens, positions = torch.full((rows, 1), TOKEN), torch.full((rows, 1), ENTRIES)

    @torch.no_grad()
    def step() -> None:
        model(tokens, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        cache.crop(-1)

    return step


def random_dynamic_cache(model: Any, rows: int) -> Any:
    import torch
    from transformers import DynamicCache

    config, cache = model.config, DynamicCache(config=model.config)
    size = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        shape = 2, rows, config.num_key_value_heads, ENTRIES, size
        cache.update(*torch.randn(shape, dtype=model.dtype), layer)
    return cache


def own_model(folder: str, attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": attention, "dtype": torch.bfloat16}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def larder_cases(folder: str, rows: list[int]) -> dict[str, Step]:
    from larder.core import Mode
    from larder.models import BatchSegment, load
    from larder_bench.profiling.synthetic_cache import random_cache

    decoder, cases = load(folder, dtype="bfloat16").decoder, dict[str, Step]()
    kinds = {"larder full": ("dense", ENTRIES), "larder quarter": ("ragged", ENTRIES // KEPT)}
    for count in rows:
        for name, size in kinds.items():
            caches = [random_cache(decoder, *size) for _ in range(count)]
            for cache in caches:
                cache.allocate(ROOM)

            def step(caches: Any = caches) -> None:
                segments = [BatchSegment(cache, (TOKEN,)) for cache in caches]
                decoder.forward_logits(segments, Mode.APPEND, range(len(caches)))

            cases[f"{name} {count}"] = step
    return cases


def transformers_cases(folder: str, rows: list[int]) -> dict[str, Step]:
    cases = dict[str, Step]()
    for attention in ("eager", "sdpa"):
        model = own_model(folder, attention)
        for count in rows:
            cache = random_dynamic_cache(model, count)
            cases[f"transformers {attention} {count}"] = batched_step(model, cache, count)
    return cases


def static_cases(folder: str, rows: list[int]) -> dict[str, Step]:
    """Compiled steps over a StaticCache."""
    import torch
    from transformers import StaticCache

    cases = dict[str, Step]()
    for count in rows:
        model = own_model(folder, "sdpa")
        cache = StaticCache(config=model.config, max_cache_len=ENTRIES + ROOM)
        with torch.no_grad():
            model(torch.full((count, ENTRIES), TOKEN), past_key_values=cache, logits_to_keep=1)
        compiled: Any = torch.compile(model, fullgraph=True, dynamic=False)
        positions = iter(range(ENTRIES, ENTRIES + ROOM))

        @torch.no_grad()
        def step(
            compiled: Any = compiled,
            cache: Any = cache,
            positions: Any = positions,
            count: int = count,
        ) -> None:
            tokens, at = torch.full((count, 1), TOKEN), torch.full((count, 1), next(positions))
            compiled(tokens, position_ids=at, past_key_values=cache, logits_to_keep=1)

        cases[f"transformers StaticCache compiled {count}"] = step
    return cases


def kvpress_cases(folder: str, rows: list[int]) -> dict[str, Step]:
    """KeyDiff at a quarter, of one prompt for all rows."""
    import torch
    from kvpress import KeyDiffPress
    from transformers import DynamicCache

    model, cases = own_model(folder, "sdpa"), dict[str, Step]()
    ids = torch.randint(3, model.config.vocab_size, (1, ENTRIES))
    for count in rows:
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), KeyDiffPress(compression_ratio=1 - 1 / KEPT)(model):
            positions = torch.arange(ENTRIES)
            model(ids, past_key_values=cache, logits_to_keep=1, cache_position=positions)
        assert cache.layers[0].keys.shape[2] == ENTRIES // KEPT
        cache.batch_repeat_interleave(count)
        cases[f"kvpress quarter {count}"] = batched_step(model, cache, count)
    return cases


def llama_cpp_cases(file: str, rows: list[int]) -> dict[str, Step]:
    """Steps of llama.cpp on a GGUF file, whose sequences grow by a token each."""
    from cyllama.llama import llama_cpp as cpp

    cpp.disable_logging()
    options = cpp.LlamaModelParams()
    model, cases = cpp.LlamaModel(path_model=file, params=options, verbose=False), dict[str, Step]()
    name = "llama.cpp " + model.desc.split()[-1]
    for count in rows:
        sizes = cpp.LlamaContextParams()
        sizes.n_ctx, sizes.n_seq_max = count * (ENTRIES + ROOM), count
        sizes.n_batch = sizes.n_ubatch = 512
        sizes.n_threads = sizes.n_threads_batch = 1
        context = cpp.LlamaContext(model=model, params=sizes, verbose=False)
        batch = cpp.LlamaBatch(n_tokens=512, embd=0, n_seq_max=count)
        for row in range(count):
            for first in range(0, ENTRIES, 512):
                batch.clear()
                for index in range(first, first + 512):
                    batch.add(3 + (index * 31 + row) % 40000, index, [row], index + 1 == ENTRIES)
                context.decode(batch)
        positions = iter(range(ENTRIES, ENTRIES + ROOM))

        def step(
            context: Any = context,
            batch: Any = batch,
            positions: Any = positions,
            count: int = count,
        ) -> None:
            index = next(positions)
            batch.clear()
            for row in range(count):
                batch.add(TOKEN, index, [row], True)
            context.decode(batch)
            context.synchronize()

        cases[f"{name} {count}"] = step
    return cases


ENGINES = {
    "larder": larder_cases,
    "transformers": transformers_cases,
    "static": static_cases,
    "kvpress": kvpress_cases,
    "llama.cpp": llama_cpp_cases,
}


def main() -> None:
    engine, model, *rows = sys.argv[1:]
    if engine != "llama.cpp":
        import torch

        torch.set_num_threads(1)
    cases = ENGINES[engine](model, [int(count) for count in rows])
    for step in cases.values():  # libraries allocate, compilers run
        step()
        step()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        name, _, steps = line.strip().rpartition(" ")
        started = time.process_time()
        for _ in range(int(steps)):
            cases[name]()
        print(json.dumps((time.process_time() - started) / int(steps)), flush=True)


if __name__ == "__main__":
    main()
