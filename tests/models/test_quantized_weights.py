"""Models with weights that torchao and bitsandbytes quantized, in every way of use.

Where neither is installed, plain modules of the same kinds stand for them (`quantized_linears`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import larder
from larder.interop import LarderCache
from larder.models import fingerprint, has_quantized_weights, seed_tokenizer
from larder.ops import is_plain
from larder.ops.linear_weight import linear_weight
from model_runs import some_ids
from quantized_linears import QUANTIZERS, quantized

PROMPT = torch.tensor([some_ids(96)])
GREEDY: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# The second reads weights of the model.
POLICIES = ("keydiff", "criticalkv")


def bundled(dtype: torch.dtype, **options: Any) -> Any:
    """The bundled model, whose matrices have sizes that all quantizers take."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(str(files("larder.models") / "seed"), dtype=dtype, **options).eval()


def torchao(dtype: torch.dtype, config: str, **options: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    module = bundled(dtype)
    quantization.quantize_(module, vars(quantization)[config](**options))
    return module


def eight_bits(dtype: torch.dtype) -> Any:
    return torchao(dtype, "Int8WeightOnlyConfig")


def four_bits(dtype: torch.dtype) -> Any:
    return torchao(dtype, "IntxWeightOnlyConfig", weight_dtype=vars(torch)["int4"])


def eight_bit_activations(dtype: torch.dtype) -> Any:
    return torchao(dtype, "Int8DynamicActivationInt8WeightConfig")


def bitsandbytes(dtype: torch.dtype, **options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**options)
    return bundled(dtype, device_map="cpu", quantization_config=config)


PACKAGES = ("int8", "int4", "int8 activations", "nf4", "bitsandbytes int8")


@pytest.fixture(params=[*QUANTIZERS, *PACKAGES])
def quantize(request: pytest.FixtureRequest) -> Callable[[torch.dtype], Any]:
    """Builder of a quantized model by dtype."""
    if request.param in QUANTIZERS:
        return lambda dtype: quantized(bundled(dtype), request.param)
    builders: dict[str, Callable[[torch.dtype], Any]] = {
        "int8": eight_bits,
        "int4": four_bits,
        "int8 activations": eight_bit_activations,
        "nf4": lambda dtype: bitsandbytes(dtype, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "bitsandbytes int8": lambda dtype: bitsandbytes(dtype, load_in_8bit=True),
    }
    return builders[request.param]


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_quantized_models_run_in_generate_policies_and_the_engine(
    quantize, dtype: torch.dtype
) -> None:
    module = quantize(dtype)
    expected = module.generate(PROMPT, **GREEDY)
    with larder.applied(module, policy="full"):
        same = module.generate(PROMPT, **GREEDY)
    assert has_quantized_weights(module)
    assert fingerprint(module) != fingerprint(bundled(dtype))
    if dtype is torch.float32:
        assert torch.equal(same, expected)
    whole = LarderCache(module, "full")
    module(PROMPT, past_key_values=whole)
    for policy in POLICIES:
        cache = LarderCache(module, policy, 48)
        module(PROMPT, past_key_values=cache)
        assert 0 < cache.nbytes < whole.nbytes
        with larder.applied(module, policy, 48):
            assert module.generate(PROMPT, **GREEDY).shape == expected.shape
    engine = larder.Engine(module, seed_tokenizer(), policy="sirllm", budget=48)
    assert engine.loaded.decoder.spec.dtype is dtype
    assert len(engine.generate("a text of some letters, " * 4, max_new_tokens=3).ids) == 3


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_matrix_of_a_quantized_module_approximates_its_weight(quantize) -> None:
    module, plain = quantize(torch.float32), bundled(torch.float32)
    pairs = zip(module.model.layers, plain.model.layers, strict=True)
    for layer, own in pairs:
        got, expected = layer.self_attn.o_proj, own.self_attn.o_proj.weight
        assert not is_plain(got)
        matrix = linear_weight(got, torch.empty(0, expected.shape[1]))
        assert (matrix - expected).abs().max() < 0.3 * expected.abs().max()
        rows = torch.randn(5, expected.shape[1], generator=torch.Generator().manual_seed(0))
        assert (rows @ matrix.T - got(rows)).abs().max() < 0.1 * got(rows).abs().max()


def test_matrix_of_a_plain_module_is_its_weight() -> None:
    linear = nn.Linear(3, 2)
    rows = torch.empty(0, 3)
    assert linear_weight(linear, rows).data_ptr() == linear.weight.data_ptr()
    other = nn.Sequential(linear)  # not plain: read by what it makes of unit vectors, bias aside
    torch.testing.assert_close(linear_weight(other, rows), linear.weight.detach())
