"""Progress of what takes long: loads, answers, chats and completions, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from larder import Chat, Engine
from larder.core import Progress
from larder.engine import discard_text, generation_progress
from larder.models import LoadedModel, apply_adapter, download_bars, load, loading_progress
from tests.models.test_lora_adapter import save_adapter
from tiny_models import tiny

# What peft asks of a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TEXT = "The parcel is in locker 17. The keys are on the shelf. " * 4


class Recorder:
    """Calls of a progress callback, in order."""

    def __init__(self) -> None:
        self.calls = list[tuple[int, int]]()

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))

    @property
    def totals(self) -> list[int]:
        """Totals, in order of their first call."""
        return list(dict.fromkeys(total for _, total in self.calls))


class Stages:
    """Stages that were opened, each with its unit and its calls."""

    def __init__(self) -> None:
        self.opened = dict[str, tuple[str, Recorder]]()

    @contextmanager
    def __call__(self, doing: str, unit: str) -> Generator[Progress]:
        recorder = Recorder()
        self.opened[doing] = (unit, recorder)
        yield recorder

    def calls(self, doing: str) -> list[tuple[int, int]]:
        return self.opened[doing][1].calls


def counted(total: int) -> list[tuple[int, int]]:
    return [(done, total) for done in range(1, total + 1)]


def test_load_counts_each_tensor_and_each_step_of_verification() -> None:
    stages = Stages()
    loaded = load("seed", stage=stages)
    tensors = len(loaded.decoder.module.state_dict()) - 1  # the head is tied to the embedding
    assert list(stages.opened) == ["Loading weights", "Verifying"]
    assert stages.opened["Loading weights"][0] == "tensors"
    assert stages.calls("Loading weights") == counted(tensors)
    assert stages.calls("Verifying") == counted(3)


def test_engine_load_passes_its_progress_callback() -> None:
    seen = Recorder()
    Engine.load("seed", policy="full", progress=seen)
    assert seen.calls[-3:] == counted(3) and len(seen.totals) == 2


def test_model_in_memory_is_verified_with_progress(loaded: LoadedModel) -> None:
    seen, module = Recorder(), tiny("llama")
    module.resize_token_embeddings(len(loaded.tokenizer))
    Engine(module, loaded.tokenizer, policy="full", progress=seen)
    assert seen.calls == counted(3)


def test_merging_an_adapter_counts_its_layers(tmp_path: Path) -> None:
    stages, module = Stages(), tiny("llama")
    save_adapter(tmp_path, tiny("llama"))
    apply_adapter(module, str(tmp_path), stage=stages)
    calls = stages.calls("Merging the adapter")
    assert calls and calls == counted(calls[-1][1])


def test_conversion_of_gguf_counts_its_tensors(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.gguf.reader")  # not in older transformers
    from gguf import GGUFReader  # pyright: ignore

    from larder.models import convert_gguf
    from tests.models.test_gguf import tiny_file

    file = tiny_file(tmp_path)
    stages = Stages()
    convert_gguf(file, stages)
    assert stages.calls("Converting") == counted(len(GGUFReader(file).tensors))
    assert "Converting" not in again(file)


def again(file: Path) -> dict[str, tuple[str, Recorder]]:
    from larder.models import convert_gguf

    stages = Stages()
    convert_gguf(file, stages)
    return stages.opened


def test_bytes_of_several_downloads_are_counted_together() -> None:
    stages = Stages()
    with ExitStack() as stack:
        bars = download_bars(stages, stack)
        assert stages.opened == {}
        with bars(total=100, unit="B", desc="a") as one, bars(total=50, unit="B", desc="b") as two:
            one.update(60)
            two.update(50)
            one.update(40)
    assert stages.calls("Downloading") == [(60, 150), (110, 150), (150, 150)]


def test_hub_downloads_use_the_progress_bars(tmp_path: Path) -> None:
    """The bars take what huggingface_hub makes its own with."""
    from huggingface_hub.utils.tqdm import _get_progress_bar_context  # pyright: ignore

    stages = Stages()
    with ExitStack() as stack:
        context = _get_progress_bar_context(
            desc="model.safetensors",
            log_level=20,
            total=8,
            initial=2,
            name="huggingface_hub.http_get",
            tqdm_class=download_bars(stages, stack),
        )
        with context as bar:
            bar.update(6)
    assert stages.calls("Downloading") == [(8, 8)]


def test_other_threads_keep_their_progress_bars_during_a_load() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from transformers.utils import logging

    stages = Stages()
    with loading_progress(stages), ThreadPoolExecutor(1) as pool:
        assert list(logging.tqdm([1, 2])) == [1, 2]
        assert pool.submit(lambda: type(logging.tqdm([1, 2])).__name__).result() != "generator"
    assert stages.calls("Loading weights") == counted(2)
    assert type(logging.tqdm([1, 2])).__name__ != "generator"


def test_answer_counts_its_tokens(engine: Engine) -> None:
    seen = Recorder()
    memory = engine.under("full").read(TEXT)
    answer = engine.ask(memory, "Where is the parcel?", max_new_tokens=6, progress=seen)
    assert seen.calls[: answer.new_tokens] == [(n, 6) for n in range(1, answer.new_tokens + 1)]
    assert seen.calls[-1] == (answer.new_tokens, answer.new_tokens)


def test_answers_to_a_list_are_counted_together(engine: Engine) -> None:
    seen = Recorder()
    memory = engine.under("full").read(TEXT)
    answers = engine.ask(memory, ["Where?", "What?"], max_new_tokens=4, progress=seen)
    tokens = sum(answer.new_tokens for answer in answers)
    done = [done for done, _ in seen.calls]
    assert done == sorted(done) and seen.calls[0] == (1, 8) and seen.calls[-1] == (tokens, tokens)


def test_stop_string_ends_the_progress_count(engine: Engine) -> None:
    memory = engine.under("full").read(TEXT)
    plain = engine.ask(memory, "Where?", max_new_tokens=6)
    assert plain.new_tokens >= 3, "choose another question"
    seen, stop = Recorder(), plain.text.strip()[0]
    cut = engine.ask(memory, "Where?", max_new_tokens=6, stop=stop, progress=seen)
    assert cut.new_tokens < 6 and seen.calls[-1] == (cut.new_tokens, cut.new_tokens)


def test_chat_turn_counts_its_tokens(engine: Engine) -> None:
    seen = Recorder()
    answer = Chat(engine.under("streaming_llm", 64)).say("Hello.", max_new_tokens=5, progress=seen)
    assert seen.calls[0] == (1, 5) and seen.calls[-1] == (answer.new_tokens, answer.new_tokens)


def test_completions_count_prefilled_then_generated_tokens(engine: Engine) -> None:
    seen = Recorder()
    prompts = ["One parcel", "Two keys are here"]
    one, two = engine.under("full").generate(prompts, max_new_tokens=4, progress=seen)
    read = one.prompt_tokens + two.prompt_tokens
    generated = len(one.ids) + len(two.ids)
    assert read in seen.totals and 8 in seen.totals
    assert seen.calls[-1] == (generated, generated)


@pytest.mark.parametrize("call", ["ask", "say", "generate", "load"])
def test_no_output_without_a_terminal(
    engine: Engine, call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "ask": lambda: engine.ask(engine.under("full").read(TEXT), "Where?", max_new_tokens=2),
        "say": lambda: Chat(engine.under("streaming_llm", 64)).say("Hello.", max_new_tokens=2),
        "generate": lambda: engine.generate("One", max_new_tokens=2),
        "load": lambda: Engine.load("seed"),
    }
    calls[call]()
    assert capfd.readouterr() == ("", "")


def test_streamed_text_has_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()

    @contextmanager
    def bar(progress: Progress | None, doing: str, unit: str) -> Generator[Progress | None]:
        opened.append(doing if progress is None else "none")
        yield progress

    monkeypatch.setattr("larder.engine.progress_bar.progress_or_bar", bar)
    for on_text in (print, discard_text):
        with generation_progress(None, on_text):
            pass
    assert opened == ["none", "Generating"]
