"""Label files: what is in them, that they go on where they ended, and how documents are split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from larder.core import BadParameter, InputError, ModelError
from larder.models import Decoder, wrap_model
from larder.session import TokenizerAdapter
from larder.training import (
    LOGIT,
    PLUS,
    STATES,
    WEIGHT,
    CopyPass,
    CorpusSplit,
    LabelFile,
    LabelSettings,
    label_layers,
    make_labels,
    read_corpus,
)
from larder.training import labels as labels_module
from model_attention import heads_of
from tiny_models import tiny

WORDS = "one two three four five six seven eight nine ten".split()
SETTINGS = LabelSettings(tokens=300, passage_tokens=16)


def a_corpus(folder: Path, documents: int = 8) -> Path:
    for source in ("letters", "talks"):
        (folder / source).mkdir(parents=True)
        for number in range(documents):
            text = " ".join(WORDS[(number + n * n) % 10] for n in range(60))
            (folder / source / f"{number}.txt").write_text(f"{source} {number}: {text}")
    return folder


@pytest.fixture
def adapter(seed_model) -> TokenizerAdapter:
    return TokenizerAdapter(seed_model.tokenizer)


def labelled(seed_model, adapter, folder: Path, settings=SETTINGS, progress=None) -> LabelFile:
    def silent(done: int, total: int) -> None:
        del done, total

    corpus = read_corpus(folder)
    return make_labels(seed_model.decoder, adapter, corpus, settings, progress or silent)


def test_labels_equal_the_reference() -> None:
    with wrap_model(tiny("llama", layers=2)) as decoder:
        text = CopyPass.of(tuple(range(3, 9)), (20, 21))
        assert text.ids == (*range(3, 9), 20, 21, *range(3, 9)) and text.copy == 8
        found, entered = label_layers(decoder, text), states_of(decoder, text.ids)
        for layer, heads in enumerate(heads_of(decoder, text.ids)):
            projection = decoder.attentions[layer].o_proj.weight.detach()
            expected = {name: torch.full((2, 6), -torch.inf) for name in (WEIGHT, PLUS, LOGIT)}
            for head in range(4):
                k = head // heads.group
                out = projection[:, head * 16 : (head + 1) * 16]
                for t in range(text.copy, len(text.ids)):
                    row = heads.row(head, t)
                    for j in range(6):
                        size = (out @ heads.values[k, j]).norm() / entered[layer][t].norm()
                        logit = heads.queries[head, t] @ heads.keys[k, j] * heads.scaling
                        for name, number in (
                            (WEIGHT, row[j]),
                            (PLUS, row[j] * size),
                            (LOGIT, logit),
                        ):
                            expected[name][k, j] = max(expected[name][k, j], float(number))
            for name, numbers in expected.items():
                torch.testing.assert_close(found[layer][name], numbers, atol=1e-4, rtol=1e-4)
            got = found[layer][STATES].float()
            torch.testing.assert_close(got, entered[layer][:6], atol=2e-3, rtol=2e-3)


def states_of(decoder: Decoder, ids: tuple[int, ...]) -> list[torch.Tensor]:
    """Hidden states that enter the attention of every layer."""
    entered: list[torch.Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda m, i, out: entered.append(out[0]))
        for layer in decoder.body.layers
    ]
    heads_of(decoder, ids)
    for hook in hooks:
        hook.remove()
    return entered


@pytest.mark.extended
def test_interrupted_run_resumes_to_equal_files(seed_model, adapter, tmp_path, larder_home) -> None:
    folder = a_corpus(tmp_path / "corpus")
    whole = labelled(seed_model, adapter, folder)
    digests = [shard.path.read_bytes() for shard in whole.shards]
    kept = whole.shards[0].path.stat().st_mtime_ns
    for shard in whole.shards[3:]:
        shard.path.unlink()

    class Killed(Exception):
        pass

    def kill(done: int, total: int) -> None:
        if done > total / 2:
            raise Killed

    with pytest.raises(Killed):
        labelled(seed_model, adapter, folder, progress=kill)
    assert 3 < len([*whole.shards[0].path.parent.glob("*.safetensors")]) < len(whole.shards)
    again = labelled(seed_model, adapter, folder)
    assert again == whole
    assert [shard.path.read_bytes() for shard in again.shards] == digests
    assert again.shards[0].path.stat().st_mtime_ns == kept
    index = json.loads((whole.shards[0].path.parent / labels_module.INDEX).read_text())
    assert len(index["shards"]) == len(whole.shards) and index["held_out"] == "talks"


def test_more_tokens_extend_the_same_file(seed_model, adapter, tmp_path) -> None:
    folder = a_corpus(tmp_path / "corpus")
    few = labelled(seed_model, adapter, folder, LabelSettings(tokens=100, passage_tokens=24))
    more = labelled(seed_model, adapter, folder, LabelSettings(tokens=200, passage_tokens=24))
    assert more.digest == few.digest and more.shards[: len(few.shards)] == few.shards
    assert sum(shard.tokens for shard in more.shards) >= 200 > few.tokens(*CorpusSplit)
    other = labelled(seed_model, adapter, folder, LabelSettings(tokens=100, passage_tokens=16))
    assert other.digest != few.digest


def test_documents_are_in_one_split_and_a_source_is_held_out(tmp_path, adapter) -> None:
    corpus = read_corpus(a_corpus(tmp_path / "corpus"), "letters")
    splits = corpus.splits()
    assert {splits[d.name] for d in corpus.documents if d.source == "letters"} == {
        CorpusSplit.HELD_OUT
    }
    others = [splits[d.name] for d in corpus.documents if d.source == "talks"]
    assert (others.count(CorpusSplit.TEST), others.count(CorpusSplit.TRAIN)) == (2, 6)
    passages = list(corpus.passages(adapter, 24))
    assert all(passage.split is splits[passage.document] for passage in passages)
    assert [passage.source for passage in passages[:4]] == ["letters", "talks"] * 2
    assert len({passage.document for passage in passages[:16]}) == 16  # each before any comes again
    assert read_corpus(tmp_path / "corpus").held_out == "talks"
    assert read_corpus(tmp_path / "corpus").digest != corpus.digest


def test_messages_are_not_split(tmp_path, adapter) -> None:
    messages = [
        {"role": "user" if n % 2 else "assistant", "content": " ".join(WORDS)} for n in range(12)
    ]
    (tmp_path / "talk.json").write_text(json.dumps(messages))
    passages = list(read_corpus(tmp_path).passages(adapter, 50))
    assert len(passages) > 1
    assert all(" ".join(WORDS) in adapter.decode(passage.ids) for passage in passages)


def test_invalid_corpora_and_label_settings_are_refused(tmp_path, seed_model, adapter) -> None:
    with pytest.raises(InputError, match="holds no"):
        read_corpus(tmp_path)
    a_corpus(tmp_path / "corpus", 1)
    with pytest.raises(BadParameter, match="'news' must be one of .* letters, talks"):
        read_corpus(tmp_path / "corpus", "news")
    with pytest.raises(BadParameter, match="passage_tokens >= 2"):
        LabelSettings(passage_tokens=1)
    long = LabelSettings(passage_tokens=5000)
    with pytest.raises(ModelError, match="no text of 5000 tokens"):
        labelled(seed_model, adapter, tmp_path / "corpus", long)
    assert len(read_corpus(None).documents) > 3 and not read_corpus(None).held_out


def test_corpus_reads_files_once_by_content(tmp_path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        read_corpus(tmp_path / "nowhere")
    folder = a_corpus(tmp_path / "corpus", 2)
    with pytest.raises(InputError, match=r"0\.txt is no folder"):
        read_corpus(folder / "talks" / "0.txt")
    before = read_corpus(folder)
    (folder / "notes.md").mkdir()
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    (folder / "talks" / "copy.txt").write_bytes((folder / "letters" / "0.txt").read_bytes())
    assert read_corpus(folder) == before


def test_shard_of_another_passage_is_regenerated(tmp_path, seed_model, adapter) -> None:
    folder = a_corpus(tmp_path / "corpus", 2)
    settings = LabelSettings(tokens=60, passage_tokens=24)
    found = labelled(seed_model, adapter, folder, settings)
    first, second = (shard.path for shard in found.shards[:2])
    wanted = first.read_bytes(), second.read_bytes()
    first.write_bytes(wanted[1])
    second.write_bytes(b"no tensors")
    labelled(seed_model, adapter, folder, settings)
    assert (first.read_bytes(), second.read_bytes()) == wanted


def test_damaged_shard_is_refused(tmp_path, seed_model, adapter) -> None:
    settings = LabelSettings(tokens=20, passage_tokens=24)
    found = labelled(seed_model, adapter, a_corpus(tmp_path / "corpus", 1), settings)
    found.shards[0].path.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        found.shards[0].layer(0, STATES)
