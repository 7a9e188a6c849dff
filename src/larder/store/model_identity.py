"""Identity of a model: everything that a saved cache depends on.

A cache of another model, RoPE or tokenizer may have the same shapes, but its contents are invalid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from larder.core.spec import LayerSpec, ModelSpec
from larder.store.blobs.container import DTYPE_NAMES, raw_bytes
from larder.store.digests import canonical_json, digest_of, key_of

READ_BYTES = 2**22  # of a file read at once
INFORMATIONAL_FIELDS = ("torch", "transformers", "model")  # shown, but not compared as they are

# Configuration keys that say where or how a model was loaded.
_INCIDENTAL = frozenset({"transformers_version", "dtype", "torch_dtype", "_name_or_path"})


@dataclass(frozen=True)
class ModelIdentity:
    """Digests and short names, one per property that a cache depends on.

    Args:
        model: name of the model.
        weights: digest of all weights, or of their files.
        config: digest of the configuration, revision included.
        tokenizer: digest of the tokenizer.
        chat_template: digest of the chat template.
        rope: digest of the rotation of keys, layer by layer.
        layers: digest of heads, sizes and windows, in order.
        kv_dtype: type of keys and values.
        compute_dtype: type in which the model computes.
        attention: name of the attention function.
        adapters: digests of adapters, in order.
        quantization: digest of the quantization of weights; empty for none.
        torch: version of torch. Only the major version is compared; others differ by rounding,
            which `numerics` covers.
        transformers: version of transformers.
        numerics: name of the arithmetic, such as the device type.
    """

    model: str
    weights: str
    config: str
    tokenizer: str
    chat_template: str
    rope: str
    layers: str
    kv_dtype: str
    compute_dtype: str
    attention: str
    adapters: str = ""
    quantization: str = ""
    torch: str = ""
    transformers: str = ""
    numerics: str = ""

    @property
    def key(self) -> str:
        """Digest of all compared properties; equal for equal identities."""
        return key_of("identity", canonical_json(self._compared_fields()))

    def differences(self, other: ModelIdentity) -> list[str]:
        """Names of compared properties that differ; empty if caches are interchangeable."""
        own, others = self._compared_fields(), other._compared_fields()
        return [name for name, value in own.items() if others[name] != value]

    def to_dict(self) -> dict[str, str]:
        """All properties as text."""
        return asdict(self)

    @staticmethod
    def from_dict(known: Mapping[str, str]) -> ModelIdentity:
        """Identity from `to_dict`; properties that older records lack are empty, and so differ."""
        return ModelIdentity(**{f.name: str(known.get(f.name, "")) for f in fields(ModelIdentity)})

    def _compared_fields(self) -> dict[str, str]:
        counting = {
            name: value for name, value in asdict(self).items() if name not in INFORMATIONAL_FIELDS
        }
        return counting | {"torch": self.torch.partition(".")[0]}


def model_identity(
    spec: ModelSpec,
    config: Mapping[str, Any],
    weights: str,
    tokenizer: str,
    *,
    model: str = "",
    chat_template: str = "",
    compute_dtype: str = "",
    attention: str = "larder",
    adapters: Sequence[str] = (),
    torch: str = "",
    transformers: str = "",
    numerics: str = "",
) -> ModelIdentity:
    """Identity of a loaded model.

    Args:
        config: configuration of transformers, as a dictionary.
        weights: from `digest_of_files` or `digest_of_weights`.
        tokenizer: the whole tokenizer as text, in the format of `tokenizers`.
        chat_template: as text.
        adapters: digests, in order.
    """
    known = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    quantized = known.get("quantization_config")
    turning = [_rounded_numbers(layer.radians) for layer in spec.layers]
    scaling = {key: value for key, value in known.items() if key.startswith("rope")}
    shapes = [
        [layer.index, layer.query_heads, layer.kv_heads, layer.head_dim, layer.scaling]
        + [layer.sliding_window]
        + ([] if layer.kv_source is None else [layer.kv_source])
        + _attention_variants(layer)
        + ([layer.latent_rank] if layer.latent_rank else [])
        for layer in spec.layers
    ]
    return ModelIdentity(
        model=model,
        weights=weights,
        config=_digest(known),
        tokenizer=key_of("tokenizer", tokenizer),
        chat_template=key_of("template", chat_template),
        rope=_digest([turning, scaling]),
        layers=_digest(shapes),
        kv_dtype=str(spec.dtype).removeprefix("torch."),
        compute_dtype=compute_dtype or str(spec.dtype).removeprefix("torch."),
        attention=attention,
        adapters=",".join(adapters),
        quantization=_digest(quantized) if quantized else "",
        torch=torch,
        transformers=transformers,
        numerics=numerics,
    )


def digest_of_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of every weight by name, for models that were not loaded from files."""
    parts = [
        f"{name}:{DTYPE_NAMES[weight.dtype]}:{tuple(weight.shape)}:{digest_of(raw_bytes(weight))}"
        for name, weight in weights
    ]
    return key_of("weights", *sorted(parts))


def digest_of_files(files: Sequence[Path], memory: Path | None = None) -> str:
    """Digest of the content of files, in the order of their names.

    Args:
        memory: file of known digests by path, size and time of change, so that a file is read
            only once.
    """
    known = {} if memory is None else read_json_cache(memory)
    found: dict[str, str] = {}
    for file in sorted(files, key=lambda file: file.name):
        stat = file.stat()
        mark = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        found[mark] = known.get(mark) or _digest_of_file(file)
    if memory is not None and not found.keys() <= known.keys():
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_name(
            f"{memory.name}.{hashlib.md5(str(found).encode()).hexdigest()}"
        )
        temporary.write_text(json.dumps(known | found, indent=1))
        temporary.replace(memory)
    return key_of("files", *found.values())


def _digest_of_file(file: Path) -> str:
    from blake3 import blake3

    hasher = blake3()
    with open(file, "rb") as opened:
        while data := opened.read(READ_BYTES):
            hasher.update(data)
    return hasher.hexdigest()


def read_json_cache(memory: Path) -> dict[str, Any]:
    """Object in a JSON file; empty where the file is missing or unreadable."""
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _digest(value: Any) -> str:
    return key_of("value", json.dumps(value, sort_keys=True, default=str))


def _attention_variants(layer: LayerSpec) -> list[object]:
    """Softcap, sinks and chunk of a layer that has one of them."""
    if layer.softcap is None and not layer.sinks and layer.chunk is None:
        return []
    return [layer.softcap, _rounded_numbers(layer.sinks), layer.chunk]


def _rounded_numbers(numbers: Sequence[float] | None) -> list[str] | None:
    """Numbers rounded to six places: measured values differ beyond that between runs."""
    return None if numbers is None else [f"{number:.6g}" for number in numbers]
