"""Learned weights: found by fingerprint, refused if they do not fit, read into every new entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.resources import files

import pytest
import torch
from safetensors.torch import save_file

from larder import Policy
from larder.cache import SequenceCache
from larder.core import AppendKind, LayerSpec, Ledger, MissingWeights, Mode, ModelError, ModelSpec
from larder.models import (
    PACKAGED,
    BatchSegment,
    Card,
    Decoder,
    LearnedGates,
    LearnedWeights,
    learned_file,
    load_learned,
    read_learned,
    wrap_model,
)
from larder.training import PASSAGE_METHODS
from learned_gates import every_gate, give_gates, random_weights
from tiny_models import tiny

GATES = every_gate()
IDS = tuple(range(3, 15))


@pytest.fixture(scope="module")
def gated() -> Iterator[Decoder]:
    with wrap_model(tiny("llama", layers=2)) as decoder:
        give_gates(decoder)
        yield decoder


def a_cache(decoder: Decoder, *columns: str) -> SequenceCache:
    return SequenceCache(decoder.spec, "ragged", Ledger(tuple(sorted(columns))))


def read(decoder: Decoder, cache: SequenceCache, ids: tuple[int, ...]) -> None:
    decoder.read([BatchSegment(cache, ids, append_kind=AppendKind.TEXT)], Mode.APPEND)


def states_of(decoder: Decoder, ids: tuple[int, ...]) -> list[torch.Tensor]:
    entered: list[torch.Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda m, i, out: entered.append(out[0]))
        for layer in decoder.body.layers
    ]
    read(decoder, a_cache(decoder), ids)
    for hook in hooks:
        hook.remove()
    return entered


@pytest.mark.parametrize("name", GATES)
def test_gate_columns_equal_their_reference(gated, name) -> None:
    cache, loop = a_cache(gated, name), import_module(f"references.{name}")
    weights = random_weights(name, GATES[name], gated.spec)
    blocks = (7, 4, 1)  # a text in blocks, then a single token
    for ids in torch.tensor(IDS).split(blocks):
        read(gated, cache, tuple(ids.tolist()))
    for layer, states in enumerate(states_of(gated, IDS)):
        result = {key: each.tolist() for key, each in weights.layers[layer].items()}
        passes = states.split(blocks if GATES[name].reads_pass else len(IDS))
        expected = torch.cat([torch.tensor(loop.gated(result, own.tolist())) for own in passes])
        entries = cache.entries(layer)
        for head in range(2):
            got = entries.columns[name][entries.rows(head)]
            torch.testing.assert_close(got, expected[:, head], atol=1e-4, rtol=1e-4)


def test_gate_that_reads_a_pass_uses_only_its_own_sequence(gated) -> None:
    texts = (IDS[:5], IDS[4:11], IDS[2:3])
    together = [a_cache(gated, "attention_gate") for _ in texts]
    gated.read([BatchSegment(*pair) for pair in zip(together, texts, strict=True)], Mode.APPEND)
    for cache, ids in zip(together, texts, strict=True):
        alone = a_cache(gated, "attention_gate")
        read(gated, alone, ids)
        for layer in range(2):
            own, expected = (
                each.entries(layer).column("attention_gate") for each in (cache, alone)
            )
            torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def test_shared_tensor_must_be_the_same_in_all_layers(gated) -> None:
    gate = GATES["global_retention"]
    weights = random_weights("global_retention", gate, gated.spec)
    first, second = weights.layers
    other = replace(weights, layers=(first, {**second, "4.weight": second["4.weight"] + 1}))
    with pytest.raises(ModelError, match=r"another 4\.weight in layer 1 .*all layers share it"):
        LearnedGates(gated.spec, gated.attentions).put("global_retention", gate, other)


def test_scratch_passes_and_other_caches_get_no_gate_columns(gated) -> None:
    cache = a_cache(gated, "kvzap")
    read(gated, cache, IDS)
    before = [cache.entries(layer).columns["kvzap"].clone() for layer in range(2)]
    gated.forward_logits([BatchSegment(cache, (1, 2))], Mode.SCRATCH, [1])
    after = [cache.entries(layer).columns["kvzap"] for layer in range(2)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert not a_cache(gated).entries(0).columns


def test_weights_are_found_in_the_home(gated, larder_home) -> None:
    spec, gate = gated.spec, GATES["kvzap"]
    with pytest.raises(
        MissingWeights, match="kvzap has no weights for this model .*larder train kvzap"
    ):
        load_learned(spec, "kvzap", gate)
    weights = random_weights("kvzap", gate, spec)
    weights.save(learned_file(spec.fingerprint, "kvzap"))
    assert (larder_home / spec.fingerprint / "kvzap.safetensors").is_file()
    assert load_learned(spec, "kvzap", gate).card == weights.card


def test_weights_of_another_model_are_refused(gated) -> None:
    spec, gate = gated.spec, GATES["kvzap"]
    weights = random_weights("kvzap", gate, spec)
    gates = LearnedGates(spec, gated.attentions)
    other = replace(weights, card=replace(weights.card, fingerprints=("0" * 32,)))
    with pytest.raises(ModelError, match="trained for the model 0000.*, not for this one"):
        gates.put("kvzap", gate, other)
    with pytest.raises(ModelError, match="are of 1 layers, but this model has 2 managed ones"):
        gates.put("kvzap", gate, replace(weights, layers=weights.layers[:1]))
    narrow = tuple({**own, "weight": own["weight"][:, 1:]} for own in weights.layers)
    with pytest.raises(ModelError, match="layer 0 have shapes .* this model needs"):
        gates.put("kvzap", gate, replace(weights, layers=narrow))
    named = tuple({"weights": own["weight"], "bias": own["bias"]} for own in weights.layers)
    with pytest.raises(ModelError, match="have shapes"):
        gates.put("kvzap", gate, replace(weights, layers=named))


@pytest.mark.parametrize("name", [*PASSAGE_METHODS.names()])
@pytest.mark.parametrize("tensors", [{"other": torch.zeros(2)}, {"kernel": torch.zeros(2)}])
def test_files_of_another_method_are_refused(gated, name, tensors) -> None:
    spec = gated.spec
    layers = [{key: own.clone() for key, own in tensors.items()} for _ in spec.managed]
    given = LearnedWeights(Card(name, (spec.fingerprint,)), tuple(layers))
    given.save(learned_file(spec.fingerprint, name))
    with pytest.raises(ModelError, match=f"have shapes .*train {name} for this model"):
        load_learned(spec, name, PASSAGE_METHODS.load(name)())


@pytest.mark.parametrize("content", [b"", b"nothing"])
def test_damaged_file_is_refused(gated, content) -> None:
    path = learned_file(gated.spec.fingerprint, "kvzap")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ModelError, match="holds no learned weights with a card"):
        load_learned(gated.spec, "kvzap", GATES["kvzap"])


def test_policy_names_its_gate() -> None:
    ridge, mlp = (
        Policy.parse(f'whole() > kvzap(form="{form}") > global()').planner
        for form in ("ridge", "mlp")
    )
    assert ridge.ledger.columns == ("kvzap",) and mlp.ledger.columns == ("kvzap_mlp",)
    assert not ridge.activation_providers and not ridge.has_tallies


def test_packaged_weights_are_small_and_fit_their_model() -> None:
    folder = files("larder.models") / PACKAGED
    assert sum(len(entry.read_bytes()) for entry in folder.iterdir()) < 300_000
    layers = tuple(LayerSpec(index, 9, 3, 64, 0.125) for index in range(30))
    [entry] = folder.iterdir()
    card = read_learned(folder / entry.name).card
    spec = ModelSpec(layers, torch.float32, torch.device("cpu"), card.fingerprints[0], 576)
    assert load_learned(spec, "kvzap", GATES["kvzap"]).card == card
    assert card.metrics["held_out_r2"] > 0.59 and card.tokens == 31_041
    with pytest.raises(ModelError, match="kvzap_mlp has no weights"):
        load_learned(spec, "kvzap_mlp", GATES["kvzap_mlp"])


@pytest.mark.parametrize("prints", ['"abc"', "[1]", "null"])
def test_fingerprints_of_a_card_are_a_list_of_strings(prints) -> None:
    with pytest.raises(ValueError, match="fingerprints must be a list of strings"):
        Card.loads(f'{{"method": "kvzap", "fingerprints": {prints}, "metrics": {{}}}}')


def test_file_with_a_nested_card_is_refused(tmp_path) -> None:
    path = tmp_path / "nested.safetensors"
    save_file({"layers.0.x": torch.zeros(1)}, path, {"card": "[" * 100_000})
    with pytest.raises(ModelError, match="nested too deeply"):
        read_learned(path)
