"""Agreement of presses under a LarderCache with the same presses under their own hooks.

    python benchmarks/peers/adapted_presses.py TEXT [--model smollm2] [--tokens 500] [PRESS...]

kvpress must be installed beside Larder: `pip install --no-deps kvpress`, and what it imports
(cachetools, datasets, fire, pandas). PRESS is a constructor call. Its `forward_hook` runs on the
model's own attention, with the `cache_position` that transformers no longer gives it. A line has
the share of heads that keep the same positions, the fewest and the most entries of a head, and the
bytes held as a share of the full cache's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from larder.interop import LarderCache
from larder.models import PACKAGED_MODELS

PRESSES = (
    "SnapKVPress(0.75)",
    "KeyDiffPress(0.75)",
    "CompactorPress(0.75)",
    "AdaKVPress(SnapKVPress(0.75))",
    "AdaKVPress(ExpectedAttentionPress(0.75, epsilon=0.01))",
    "CriticalAdaKVPress(SnapKVPress(0.75))",
)
Positions = list[list[int]]  # by head of each layer, ascending


def main() -> None:
    options = _options()
    import kvpress  # pyright: ignore

    folder = PACKAGED_MODELS[options.model].folder(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(options.text.read_text())["input_ids"][: options.tokens]])
    whole = _read(model, ids, DynamicCache())
    full_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    print("| press | same heads | entries | bytes |\n|---|---|---|---|")
    for made in options.presses or PRESSES:
        theirs = hook_positions(model, ids, eval(made, dict(vars(kvpress))), whole)
        torch.manual_seed(0)
        cache = LarderCache(model, kvpress=eval(made, dict(vars(kvpress))))
        ours = larder_positions(_read(model, ids, cache))
        same = sum(one == other for one, other in zip(theirs, ours, strict=True))
        sizes = [len(head) for head in ours]
        share = f"{cache.nbytes / full_bytes:.3f}"
        print(f"| `{made}` | {same} of {len(ours)} | {min(sizes)} to {max(sizes)} | {share} |")


def larder_positions(cache: LarderCache) -> Positions:
    """Positions that the first row of a cache holds."""
    held = cache.sequences[0]
    layers = [held.entries(layer.index) for layer in held.spec.layers]
    return [own.head_positions(head).tolist() for own in layers for head in range(len(own.lengths))]


def hook_positions(model: Any, ids: Tensor, press: Any, whole: Any) -> Positions:
    """Positions that a press leaves and does not mask under its own hook.

    Args:
        whole: full cache of the same tokens.
    """

    def hook(module: nn.Module, args: Any, named: dict[str, Any], out: Any) -> Any:
        return press.forward_hook(module, args, {**named, "cache_position": positions}, out)

    cache: Any = DynamicCache()
    positions = torch.arange(ids.shape[1])
    attentions = [layer.self_attn for layer in model.model.layers]
    press.post_init_from_model(model)
    for module in attentions:
        vars(module)["rotary_emb"] = model.model.rotary_emb
    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in attentions]
    torch.manual_seed(0)
    _read(model, ids, cache)
    for each in hooks:
        each.remove()
    found = Positions()
    for module, own, left in zip(attentions, whole.layers, cache.layers, strict=True):
        del vars(module)["rotary_emb"]
        masked = vars(module).pop("masked_key_indices", None)
        for head, (keys, remaining) in enumerate(zip(own.keys[0], left.keys[0], strict=True)):
            kept = set(torch.cdist(remaining, keys).argmin(1).tolist())
            gone = set() if masked is None else set(masked[2][masked[1] == head].tolist())
            found.append(sorted(kept - gone))
    return found


@torch.no_grad()
def _read(model: Any, ids: Tensor, cache: Any) -> Any:
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def _options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("presses", nargs="*", metavar="PRESS")
    parser.add_argument("--model", choices=sorted(PACKAGED_MODELS), default="smollm2")
    parser.add_argument("--tokens", type=int, default=500)
    return parser.parse_args()


if __name__ == "__main__":
    main()
