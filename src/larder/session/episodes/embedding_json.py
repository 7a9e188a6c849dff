"""Embeddings as JSON can say them, to the bit."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

_TYPE = "<f4"


def arrays_to_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values by name, with arrays as `{"shape", "base64"}` and tuples as lists."""
    return {name: _value_to_json(value) for name, value in values.items()}


def array_from_json(told: Any) -> Float32[np.ndarray, "..."]:
    """The array that was spelled.

    Raises:
        KeyError, TypeError, ValueError: this is none.
    """
    data = b64decode(told["base64"], validate=True)
    return np.frombuffer(data, _TYPE).reshape(told["shape"]).astype(np.float32)


def _value_to_json(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return list(value)
    data = np.ascontiguousarray(value, dtype=_TYPE).tobytes()
    return {"shape": list(value.shape), "base64": b64encode(data).decode()}
