"""Identity keys of saved caches: every field, changed alone, changes the key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from larder.core import LayerSpec, ModelSpec
from larder.store import ModelIdentity, digest_of_files, digest_of_weights
from larder.store.model_identity import model_identity
from tiny_models import tiny

LAYERS = tuple(LayerSpec(n, 4, 2, 16, 0.25, None, (1.0, 0.1)) for n in range(2))
SPEC = ModelSpec(LAYERS, torch.float32, torch.device("cpu"))
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "_commit_hash": "r1",
    "dtype": "float32",
}
TOLD: dict[str, Any] = {
    "spec": SPEC,
    "config": CONFIG,
    "weights": "w",
    "tokenizer": "{}",
    "chat_template": "t",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}


def made(**changes: Any) -> ModelIdentity:
    return model_identity(**(TOLD | changes))


def configured(**changes: Any) -> ModelIdentity:
    return made(config=CONFIG | changes)


def shaped(change: Callable[[tuple[LayerSpec, ...]], tuple[LayerSpec, ...]]) -> ModelIdentity:
    return made(spec=replace(SPEC, layers=change(LAYERS)))


def each(**changes: Any) -> ModelIdentity:
    return shaped(lambda layers: tuple(replace(layer, **changes) for layer in layers))


CHANGED = {
    "weights": (made(weights="other"), {"weights"}),
    "revision": (configured(_commit_hash="r2"), {"config"}),
    "dtype": (made(spec=replace(SPEC, dtype=torch.bfloat16)), {"kv_dtype", "compute_dtype"}),
    "compute dtype": (made(compute_dtype="bfloat16"), {"compute_dtype"}),
    "quantization": (configured(quantization_config={"bits": 4}), {"config", "quantization"}),
    "rope theta": (configured(rope_theta=5e5), {"config", "rope"}),
    "rope scaling": (configured(rope_scaling={"factor": 2.0}), {"config", "rope"}),
    "rope as measured": (each(radians=(1.0, 0.2)), {"rope"}),
    "attention window": (each(sliding_window=8), {"layers"}),
    "window in the configuration": (configured(sliding_window=8), {"config"}),
    "tokenizer file": (made(tokenizer='{"a": 1}'), {"tokenizer"}),
    "chat template": (made(chat_template="u"), {"chat_template"}),
    "adapter": (made(adapters=("lora",)), {"adapters"}),
    "layer order": (shaped(lambda layers: layers[::-1]), {"layers"}),
    "fewer layers": (shaped(lambda layers: layers[:1]), {"layers", "rope"}),
    "head count": (each(query_heads=8), {"layers"}),
    "kv heads": (each(kv_heads=4), {"layers"}),
    "head size": (each(head_dim=8), {"layers"}),
    "scaling": (each(scaling=0.5), {"layers"}),
    "torch": (made(torch="3.0.0"), {"torch"}),
    "attention class": (made(attention="sdpa"), {"attention"}),
    "numerics": (made(numerics="tf32"), {"numerics"}),
    "architecture": (configured(architectures=["MistralForCausalLM"]), {"config"}),
}


@pytest.mark.failure(number=11)
@pytest.mark.parametrize("what", CHANGED)
def test_each_identity_field_changes_the_key(what: str) -> None:
    other, named = CHANGED[what]
    assert set(made().differences(other)) == named
    assert other.key != made().key


@pytest.mark.failure(number=11)
def test_informative_fields_do_not_change_the_key() -> None:
    other = made(model="under another name", torch="2.14.1", transformers="5.24.0")
    assert made().differences(other) == [] and made().key == other.key
    assert configured(dtype="bfloat16").key == made().key


def test_identity_round_trips_through_its_dict() -> None:
    assert ModelIdentity.from_dict(made().to_dict()) == made()
    shorter = made(numerics="tf32").to_dict()
    del shorter["numerics"]
    assert ModelIdentity.from_dict(shorter).differences(made(numerics="tf32")) == ["numerics"]


@pytest.mark.failure(number=12)
def test_weight_digest_distinguishes_models_of_equal_shapes() -> None:
    one, same, other = (tiny("llama", seed=seed) for seed in (0, 0, 1))
    digests = [digest_of_weights(model.named_parameters()) for model in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    with torch.no_grad():
        next(one.parameters()).view(-1)[-1] += 1e-3
    assert digest_of_weights(one.named_parameters()) != digests[0]


def test_cached_file_digests_equal_uncached_ones(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("b", "a")]
    for file in files:
        file.write_text(file.name)
    memory = tmp_path / "kept" / "digests.json"
    first = digest_of_files(files, memory)
    assert digest_of_files(files[::-1], memory) == digest_of_files(files) == first
    files[0].write_text("other")
    assert digest_of_files(files, memory) != first
    memory.write_text("no JSON")
    assert digest_of_files(files[1:], memory) == digest_of_files(files[1:])
