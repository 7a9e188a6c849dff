"""LoRA adapters give the logits that peft gives, merged and live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, TaskType, get_peft_model  # pyright: ignore
from typer.testing import CliRunner

from larder.cache import SequenceCache
from larder.cli.main import app
from larder.core import BadParameter, Mode, ModelError
from larder.models import AdapterMode, BatchSegment, apply_adapter, load, wrap_model
from tiny_models import tiny

# What peft asks of a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.arange(10)[None]


def save_adapter(folder: Path, module: Any) -> torch.Tensor:
    """Save a random adapter of a model; the logits of peft."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(module, config).eval()
    adapted.save_pretrained(str(folder))
    with torch.no_grad():
        return adapted(IDS).logits


@pytest.mark.parametrize("mode", AdapterMode)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "gemma3"])
def test_logits_equal_peft(tmp_path: Path, architecture: str, mode: AdapterMode) -> None:
    expected = save_adapter(tmp_path, tiny(architecture))
    plain = wrap_model(tiny(architecture))
    with wrap_model(apply_adapter(tiny(architecture), str(tmp_path), mode)) as decoder:
        cache = SequenceCache(decoder.spec, "ragged")
        segment = BatchSegment(cache, tuple(IDS[0].tolist()))
        logits = decoder.forward_logits([segment], Mode.APPEND, range(IDS.shape[1]))
        assert torch.allclose(logits, expected[0], atol=1e-4)
        assert decoder.spec.fingerprint != plain.spec.fingerprint  # caches are not mixed up


@pytest.mark.extended
def test_adapter_of_the_bundled_model_is_loaded(tmp_path: Path) -> None:
    plain = load().decoder
    plain.release()
    save_adapter(tmp_path, plain.module)
    adapted = load(adapter=str(tmp_path), adapter_mode="live").decoder.spec
    assert adapted.fingerprint != plain.spec.fingerprint
    file = tmp_path / "talk.txt"
    file.write_text("The key is 7.")
    done = CliRunner().invoke(
        app, ["ask", str(file), "-q", "Key?", "--adapter", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["answers"]
    given = ["model", "calibrate", "seed", "squeeze", "--json", "--adapter", str(tmp_path)]
    for mode in AdapterMode:  # found by the fingerprint with which `ask` looks it up
        done = CliRunner().invoke(app, [*given, "--adapter-mode", mode.value])
        expected = load(adapter=str(tmp_path), adapter_mode=mode.value).decoder.spec.fingerprint
        assert json.loads(done.stdout)["model_fingerprint"] == expected != plain.spec.fingerprint
    gated = ["--policy", "whole() > trim() > uniform()", "--adapter", str(tmp_path)]
    missing = CliRunner().invoke(app, ["ask", str(file), "-q", "Key?", *gated])
    assert f"`larder train trim --model seed --adapter {tmp_path}`" in missing.stderr
    sizes = ["--tokens", "300", "--passage-tokens", "150", "--adapter", str(tmp_path)]
    trained = CliRunner().invoke(app, ["train", "predictive", "--json", *sizes])
    merged = load(adapter=str(tmp_path)).decoder.spec.fingerprint
    assert Path(json.loads(trained.stdout)["file"]).parent.name == merged


def test_invalid_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no adapter_config.json: give a folder that peft"):
        load(adapter=str(tmp_path / "none"))
    with pytest.raises(BadParameter, match="adapter_mode must be merged or live, got 'hot'"):
        load(adapter_mode="hot")
    save_adapter(tmp_path / "wide", tiny("llama", kv_heads=4))
    with pytest.raises(ModelError, match=r"size mismatch.*trained on this model"):
        apply_adapter(tiny("llama", kv_heads=2), str(tmp_path / "wide"))
    save_adapter(tmp_path / "deep", tiny("llama", layers=3))
    with pytest.raises(ModelError, match=r"tensors differ in name.*layers\.2"):
        apply_adapter(tiny("llama"), str(tmp_path / "deep"))
    (tmp_path / "deep" / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match="cannot be applied"):
        apply_adapter(tiny("llama", layers=3), str(tmp_path / "deep"))
    (tmp_path / "deep" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no adapter_model.safetensors"):
        apply_adapter(tiny("llama", layers=3), str(tmp_path / "deep"))
    prefix = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    get_peft_model(tiny("llama"), prefix).save_pretrained(str(tmp_path / "prefix"))
    with pytest.raises(ModelError, match="Larder takes adapters of weights"):
        apply_adapter(tiny("llama"), str(tmp_path / "prefix"))
