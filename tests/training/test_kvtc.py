"""Principal components that are trained on texts, and what they keep of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from larder.cache import KvtcTables
from larder.core import BadParameter
from larder.models import load
from larder.session import TokenizerAdapter
from larder.training import KvtcSettings, read_corpus, train_kvtc

SETTINGS = KvtcSettings(
    tokens=600, test_tokens=200, passage_tokens=200, rank=160, planned_tokens=200
)


@pytest.mark.extended
def test_components_keep_more_in_more_bytes(tmp_path: Path) -> None:
    loaded = load("seed")
    given = TokenizerAdapter(loaded.tokenizer)
    tables, card = train_kvtc(
        loaded.decoder, given, read_corpus(None, None), SETTINGS, lambda done, total: None
    )
    spec = loaded.decoder.spec
    width = sum(layer.kv_heads * layer.head_dim for layer in spec.managed)
    for side in tables.sides:
        assert side.basis.shape == (width, min(160, width))
        assert all(int(plan[:, 0].sum()) == side.basis.shape[1] for plan in side.plans.values())
    splits = [name for name in ("test", "held_out") if f"{name}_tokens" in card.metrics]
    assert splits
    for split in splits:
        for side in ("keys", "values"):
            more, less = (card.metrics[f"{split}_{side}_{share}_r2"] for share in ("1_8", "1_16"))
            assert 0 < less < more < 1
            assert card.metrics[f"{split}_{side}_1_8_bits"] < 16 / 8 * 1.15
    path = tmp_path / "kvtc.safetensors"
    tables.save(path, {"card": card.dumps()})
    assert KvtcTables.of(load_file(path)).digest == tables.digest


@pytest.mark.parametrize("change", [{"tokens": 0}, {"rank": 0}, {"passage_tokens": 4}])
def test_invalid_settings_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(BadParameter, match="kvtc needs"):
        KvtcSettings(**change)
