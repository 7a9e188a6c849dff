"""A short name for exactly this model: what was measured about one must not serve another."""

from __future__ import annotations

import hashlib
import json
from typing import Any

SAMPLED_VALUES = 64  # per tensor: enough to tell fine-tuned siblings apart, cheap for large models
DIGEST_BYTES = 16


def fingerprint(module: Any) -> str:
    """Hexadecimal digest of the configuration and of a sample of every weight."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    config = module.config.to_dict()
    told = {key: config[key] for key in sorted(config) if not _is_load_detail(key)}
    digest.update(json.dumps(told, sort_keys=True, default=str).encode())
    for name, weight in module.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED_VALUES)].float().cpu()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def _is_load_detail(key: str) -> bool:
    """Entries that say where or how a model was loaded, not what it is."""
    return key.startswith("_") or key in {"transformers_version", "dtype", "torch_dtype"}
