"""Files of trained tensors: refused under another model, whatever reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from builders import a_layer, a_spec
from larder.cache import AquaPredictions, KvtcTables, LowRankMaps, PredictiveTables, tables_path
from larder.core import MissingWeights, ModelError
from larder.models import Card, LearnedWeights, cartridge_path, find_cartridge

LAYER = a_layer()
CPU = torch.device("cpu")
OWN, OTHER = "f" * 32, "e" * 32
SPEC = replace(a_spec(LAYER), fingerprint=OWN)
LOADERS = {
    "aqua": lambda: AquaPredictions.load(LAYER, 0, OWN, CPU),
    "less": lambda: LowRankMaps.load(LAYER, 0, OWN),
    "predictive": lambda: PredictiveTables.load(OWN),
    "kvtc": lambda: KvtcTables.load(OWN),
}


@pytest.mark.parametrize(("method", "load"), LOADERS.items(), ids=LOADERS)
def test_tables_are_refused_under_another_model(method: str, load: Callable[[], object]) -> None:
    file = tables_path(OWN, method)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.zeros(1)}, file, {"card": Card("any", (OTHER,)).dumps()})
    with pytest.raises(ModelError, match=f"{file.name} was trained for the model eeeeeeeeeeee, "):
        load()


@pytest.mark.parametrize("card", [None, "[", "[]", "{}"])
@pytest.mark.parametrize(("method", "load"), LOADERS.items(), ids=LOADERS)
def test_tables_without_a_card_are_refused_as_missing(
    method: str, load: Callable[[], object], card: str | None
) -> None:
    file = tables_path(OWN, method)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.zeros(1)}, file, {} if card is None else {"card": card})
    with pytest.raises(MissingWeights, match=f"larder train {file.stem}"):
        load()


def test_cartridge_of_another_model_is_refused() -> None:
    slots = {name: torch.zeros(LAYER.kv_heads, 1, LAYER.head_dim) for name in ("keys", "values")}
    LearnedWeights(Card("cartridge", (OTHER,)), (slots,)).save(cartridge_path(OWN, [1, 2], 1))
    with pytest.raises(ModelError, match="trained for the model eeee"):
        find_cartridge(SPEC, [1, 2], 1)
