"""Policy that acts where none is named: by the kind of text, in Python and on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import larder
from larder import Chat, Engine, LarderCache, Policy
from larder.cache import tables_path
from larder.cli.options import ModelOptions
from larder.cli.question_run import choose_policy
from larder.core import UnknownName
from larder.models import calibration, shared_decoder
from larder.policy import Transform
from larder.session import (
    TextKind,
    conversation_of,
    for_model,
    missing_for_larder,
    policy_for_kind,
    with_measured_recall,
)
from tiny_models import tiny

KNOWN = "1ee2b6a19dfb828a8691c8c5b50ce8f9"  # smollm2, whose transforms come with the package
TEXT = "My cat is called Minka. " * 40
MESSAGES = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Nice."}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load()


@pytest.fixture
def fast_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AVX-512, whatever the machine has."""
    monkeypatch.setattr("larder.ops.plane_coder.is_plane_kernel_fast", lambda: True)


def default(kind: str) -> Policy:
    return Policy.parse(larder.default_policy(kind))


@pytest.mark.extended
def test_default_policy_depends_on_the_text_kind(engine: Engine) -> None:
    read = {
        "document": engine.read(TEXT),
        "conversation": engine.read(MESSAGES),
        "contexts": engine.read(contexts=[TEXT, "The dog is called Biscuit."]),
    }
    for kind, memory in read.items():
        assert type(memory.policy.session) is type(default(kind).session)
        assert memory.policy.scorer == default(kind).scorer, kind
    assert engine._completer._policy == default("prompt")
    assert Chat(engine).policy.scorer == default("conversation").scorer
    assert "by what is read" in repr(engine)


def test_contexts_with_a_budget_are_read_as_a_document(engine: Engine) -> None:
    sized = Engine(engine.loaded, budget=96)
    memory = sized.read(contexts=[TEXT, "The dog is called Biscuit."])
    assert memory.policy.scorer == default("document").scorer


def test_explicit_policy_is_used_for_every_kind(engine: Engine) -> None:
    other = engine.under("keydiff", 96)
    for kind in TextKind:
        assert other.policy_for(kind) == with_measured_recall(
            Policy.parse("keydiff"), engine.loaded.decoder.spec
        )


@pytest.fixture
def own_home(larder_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test, calibrations included, which tests of this folder share."""
    monkeypatch.setattr(calibration, "home", lambda: larder_home)
    return larder_home


def save_bits(home: Path, fingerprint: str, text: str) -> None:
    path = home / fingerprint / "transform_bits.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_bits_of_a_policy_are_those_measured_of_the_model(engine: Engine, own_home: Path) -> None:
    """Where a sentence names none, and entries are held so, not parked."""
    spec = engine.loaded.decoder.spec
    assert engine.under("larder").policy == Policy.parse("larder")
    save_bits(
        own_home, spec.fingerprint, '{"schema": 1, "profile": {"older": 1}, "values": [1.5, 1.5]}'
    )
    for sentence, bits in (
        ("larder", 1.5),
        ("larder > transform(coder='entropy')", 1.5),
        ("kvzap > transform()", 1.5),
        ("larder > transform(bits=2.5)", 2.5),
        ("larder > transform(bits=4)", 4.0),
        ("icecache > transform()", 2.5),
    ):
        for policy in (
            sentence,
            Policy.parse(sentence),
            Policy.parse(sentence).with_sizes(90, None),
        ):
            assert engine.under(policy).policy.storage.bits == bits, sentence
    bound = engine.under("larder").policy
    assert "transform(bits=1.5, " in str(bound) and "transform(bits=1.5)" in bound.short
    assert for_model(bound, spec) == bound == for_model(Policy.parse(str(bound)), spec)
    exact = replace(Policy.parse("larder"), storage=Transform(bits=3.0))
    assert for_model(exact, spec).storage.bits == 3.0
    assert for_model(Policy.parse("kvzip"), spec) == Policy.parse("kvzip")


def test_usual_bits_stay_without_a_measurement(engine: Engine, own_home: Path) -> None:
    """Canonical spellings, and so names of saved caches, are those of a model without one."""
    spec = engine.loaded.decoder.spec
    for text in ("", "[]", '{"schema": 1}', '{"schema": 9, "values": [1.5]}', '{"schema": 1, "va'):
        save_bits(own_home, spec.fingerprint, text)
        assert str(engine.under("larder").policy) == str(Policy.parse("larder"))
        assert "transform(bits=2.5, " in str(engine.under("larder").policy)
    save_bits(own_home, spec.fingerprint, '{"schema": 1, "values": [1e999]}')
    assert engine.under("larder").policy.storage.bits == 2.5


def test_bits_inside_transformers_are_those_measured_of_the_model(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("larder.interop.sequence.warm_up", lambda *_: None)  # it would calibrate
    model, policy = tiny("llama"), Policy.parse("keydiff > transform()")
    assert LarderCache(model, policy).policy == policy
    save_bits(own_home, shared_decoder(model).spec.fingerprint, '{"schema": 1, "values": [2.0]}')
    assert LarderCache(model, policy).policy.storage.bits == 2.0
    assert LarderCache(model, "keydiff > transform(bits=2.5)").policy == policy


def test_prompts_inside_transformers_have_the_policy_of_prompts() -> None:
    model = tiny("llama")
    assert LarderCache(model).policy == default("prompt")
    with larder.applied(model) as run:
        model.generate(max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert run.cache is not None
    assert run.cache.policy.scorer == default("prompt").scorer


@pytest.mark.usefixtures("fast_planes")
@pytest.mark.parametrize("kind", ["document", "conversation", "contexts"])
def test_command_line_and_engine_have_the_same_defaults(engine: Engine, kind: str) -> None:
    given = {
        "document": conversation_of(TEXT),
        "conversation": conversation_of(MESSAGES),
        "contexts": conversation_of(None, [TEXT, TEXT]),
    }
    for spec in (
        engine.loaded.decoder.spec,
        replace(engine.loaded.decoder.spec, fingerprint=KNOWN),
    ):
        options = choose_policy(ModelOptions(), [given[kind]], spec)
        assert options.policy == larder.default_policy(kind, spec)


@pytest.mark.usefixtures("fast_planes")
def test_documents_of_a_calibrated_model_are_read_under_larder(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, and without the kernel or the transforms, under kvzip."""
    spec = engine.loaded.decoder.spec
    known = replace(spec, fingerprint=KNOWN)
    assert larder.default_policy("document", known) == "larder"
    assert policy_for_kind(None, known, TextKind.DOCUMENT) == Policy.parse("larder")
    assert policy_for_kind(None, spec, TextKind.DOCUMENT) == Policy.parse("kvzip")
    assert larder.default_policy("conversation", known) == larder.default_policy("conversation")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for other, missing in (
        (spec, "`larder model calibrate MODEL transform` was not run"),
        (replace(known, device=cuda), "for CPUs"),
        (replace(known, layer_devices=(cpu, cuda)), "for CPUs"),
    ):
        assert missing in missing_for_larder(other)
        assert larder.default_policy("document", other) == "kvzip"
    monkeypatch.setattr("larder.ops.plane_coder.c_library", lambda: None)
    assert "not compiled" in missing_for_larder(known)
    assert larder.default_policy("document", known) == "kvzip"


@pytest.mark.usefixtures("fast_planes")
def test_documents_are_read_under_larder_once_the_model_is_calibrated(engine: Engine) -> None:
    spec = engine.loaded.decoder.spec
    path = tables_path(spec.fingerprint, "transform")
    assert larder.default_policy("document", spec) == "kvzip"
    path.parent.mkdir(parents=True)
    path.touch()
    assert larder.default_policy("document", spec) == "larder"


@pytest.mark.parametrize(("limit", "policy"), [(1, "kvzip"), (2, "larder")])
def test_processors_without_avx512_read_documents_under_kvzip(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, limit: int, policy: str
) -> None:
    """Processors up to AVX2 and from AVX-512 on, in the order of the instruction sets in C."""
    library = SimpleNamespace(larder_instruction_set=lambda: limit)
    monkeypatch.setattr("larder.ops.plane_coder.plane_library", lambda: library)
    known = replace(engine.loaded.decoder.spec, fingerprint=KNOWN)
    assert larder.default_policy("document", known) == policy
    assert ("without AVX-512" in missing_for_larder(known)) == (policy == "kvzip")


@pytest.mark.usefixtures("fast_planes")
def test_reason_of_the_default_policy_is_printed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list[str]()
    spec = engine.loaded.decoder.spec
    printer = SimpleNamespace(print=lambda line, **options: lines.append(line))
    monkeypatch.setattr("larder.cli.question_run.progress_console", lambda: printer)
    text, talk = conversation_of(TEXT), conversation_of(MESSAGES)
    choose_policy(ModelOptions(), [text], spec)
    choose_policy(ModelOptions(), [text], replace(spec, fingerprint=KNOWN))
    choose_policy(ModelOptions(), [talk], spec)
    choose_policy(ModelOptions(policy="full"), [text], spec)
    kvzip, transformed, episodes = lines
    assert kvzip.startswith("Policy kvzip, ") and "larder model calibrate MODEL transform" in kvzip
    assert transformed.startswith("Policy larder, ") and "calibrate" not in transformed
    assert episodes.startswith("Policy epicache_pooled, ") and "calibrate" not in episodes


def test_unknown_kind_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="Known: prompt, document, conversation, contexts"):
        larder.default_policy("text")
