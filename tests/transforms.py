"""Transform tables and layers for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from builders import layer_options
from larder.cache import TransformLayer, TransformTables, tables_path
from larder.core import Coder, LayerSpec, Ledger, MeanSource, TransformSpec

FINE_STEP = 2.0**-20
NO_COLUMNS = Ledger()


def some_tables(layer: LayerSpec, seed: int = 0) -> TransformTables:
    """Tables with any means and well-conditioned matrices."""
    source = torch.Generator().manual_seed(seed)
    size, heads = layer.head_dim, layer.kv_heads
    mixed = torch.randn(2, heads, size, size, generator=source)
    forward = torch.linalg.qr(mixed)[0] * (0.5 + torch.rand(size, generator=source))
    mean = torch.randn(2, heads, size, generator=source)
    deviation = 0.5 + 3 * torch.rand(2, heads, size, generator=source)
    return TransformTables(forward, mean, deviation, layer.radians or ())


def save_tables(layer: LayerSpec) -> TransformTables:
    """Tables of a layer, saved as those of a model without a fingerprint."""
    from safetensors.torch import save_file

    from larder.cache import state_of

    path, tables = tables_path("", "transform"), some_tables(layer)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state_of({layer.index: tables}), path)
    return tables


def a_transform_layer(
    layer: LayerSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    ledger: Ledger = NO_COLUMNS,
    coder: Coder = Coder.ENTROPY,
    step: float = FINE_STEP,
    mean: MeanSource = MeanSource.TEXT,
) -> TransformLayer:
    """Layer whose plans need no step of their own; its tables are saved, so that it can be too."""
    from safetensors.torch import save_file

    from larder.cache import state_of

    path = tables_path("", "transform")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state_of({layer.index: some_tables(layer)}), path)
    spec = TransformSpec(coder, sinks=1, recent=2, block=4, mean=mean)
    store = TransformLayer(
        layer,
        layer_options(dtype, device=device, ledger=ledger, transform=spec),
        TransformTables.load(layer, spec),
    )
    store._hold(replace(store.tier, step=step))
    return store
