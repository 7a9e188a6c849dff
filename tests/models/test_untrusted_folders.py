"""Model folders that are damaged or made to harm are refused in one line, with the way out."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from larder.core import ModelError
from larder.models import load

SEED = Path(str(files("larder.models") / "seed"))


def copied(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """The bundled model's folder with changes in its config."""
    shutil.copytree(SEED, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    return folder


def not_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02garbage that no unpickler knows\x00")


def a_pickle_that_runs_code(folder: Path) -> None:
    class CreateFileOnLoad:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (folder / "harmed",)

    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"weight": CreateFileOnLoad()}, file)


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def config_of(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tokenizer_of(name: str) -> Callable[[Path], None]:
    """A tokenizer that asks for a package or a file that is not there."""

    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({"tokenizer_class": name}))

    return change


def no_heads(folder: Path) -> None:
    """A Llama whose size of a head is that of the model through zero."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "llama", "num_attention_heads": 0}
    del config["head_dim"]
    path.write_text(json.dumps(config))


def file_of(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


DAMAGES: dict[str, Callable[[Path], None]] = {
    "UnpicklingError": not_a_pickle,
    "a pickle that runs code": a_pickle_that_runs_code,
    "cut off": cut_off,
    "ZeroDivisionError": no_heads,
    "StrictDataclass": config_of(num_hidden_layers="six"),
    "ImportError": tokenizer_of("BertJapaneseTokenizer"),
    "a type that is none": config_of(dtype="float99"),
    "no mapping": file_of("config.json", "[]"),
    "a tokenizer that is none": file_of("tokenizer.json", "{}"),
    "code beside the weights": config_of(
        model_type="of_its_own", auto_map={"AutoConfig": "harm.Config"}
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.filterwarnings("ignore")
def test_load_errors_are_one_line(tmp_path, name) -> None:
    folder = copied(tmp_path / "model")
    DAMAGES[name](folder)
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert not (folder / "harmed").exists()


@pytest.mark.parametrize(
    "shard", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../b", "C:\\x", "..\\x"]
)
def test_weight_map_outside_the_folder_is_refused(tmp_path, shard) -> None:
    folder = copied(tmp_path / "model")
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(folder / "model.safetensors", other / "model.safetensors")
    (folder / "decoy.safetensors").touch()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the model's folder"):
        load(str(folder))


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_invalid_weight_index_is_refused(tmp_path, index) -> None:
    folder = copied(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="does not map weights to files"):
        load(str(folder))


def test_weight_map_inside_the_folder_is_read(tmp_path) -> None:
    from safetensors import safe_open

    folder = copied(tmp_path / "model")
    (folder / "parts").mkdir()
    shutil.move(folder / "model.safetensors", folder / "parts" / "one.safetensors")
    with safe_open(folder / "parts" / "one.safetensors", "pt") as weights:
        names = list(weights.keys())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "parts/one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "beside.safetensors").touch()
    assert load(str(folder)).decoder.spec.layers
