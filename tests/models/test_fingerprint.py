"""A fingerprint is the model's, not its circumstances'."""

from __future__ import annotations

import torch

from larder.models import Decoder, fingerprint
from tiny_models import tiny


def test_fingerprint_depends_on_the_weights(architecture) -> None:
    module, sibling = tiny(architecture), tiny(architecture, seed=1)
    assert fingerprint(module) != fingerprint(sibling)


def test_fingerprint_depends_on_every_tensor() -> None:
    module = tiny("llama")
    before = fingerprint(module)
    with torch.no_grad():
        module.base_model.layers[1].mlp.up_proj.weight.mul_(1.01)
    assert fingerprint(module) != before


def test_fingerprint_depends_on_the_config() -> None:
    module = tiny("llama")
    before = fingerprint(module)
    module.config.rms_norm_eps *= 2
    assert fingerprint(module) != before


def test_fingerprint_is_unchanged_by_wrapping(architecture) -> None:
    module = tiny(architecture)
    before = fingerprint(module)
    with Decoder(module) as decoder:
        assert decoder.spec.fingerprint == before == fingerprint(module)


def test_fingerprint_is_unchanged_by_saving_and_loading(architecture, tmp_path) -> None:
    module = tiny(architecture)
    module.save_pretrained(tmp_path)
    assert fingerprint(type(module).from_pretrained(tmp_path)) == fingerprint(module)
