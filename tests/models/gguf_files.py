"""Small GGUF files with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter, quantize  # pyright: ignore
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING  # pyright: ignore
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from tiny_models import VOCABULARY

# Words of several bytes, with the merges that make them.
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2")
WIDTH = 64  # a multiple of the blocks of 32 that types are quantized in


def write_gguf(
    path: Path,
    module: Any,
    architecture: str,
    quantization: GGMLQuantizationType = GGMLQuantizationType.Q4_1,
    *,
    sentencepiece: bool = False,
) -> Path:
    """Write a model as a GGUF file, its matrices quantized where their rows have whole blocks.

    Args:
        architecture: name in GGUF.
        sentencepiece: the tokenizer is of SentencePiece's kind; else of bytes.
    """
    writer = GGUFWriter(path, architecture)
    config = module.config.to_dict() | (getattr(module.config, "rope_parameters", None) or {})
    for key, name in GGUF_CONFIG_MAPPING[architecture].items():
        value = config.get(name)
        if isinstance(value, bool) or value is None:
            continue
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    if sentencepiece:
        add_sentencepiece(writer)
    else:
        _add_tokenizer(writer, "qwen2" if architecture.startswith("qwen") else "gpt-2")
    state = module.state_dict()
    for ours, theirs in get_gguf_hf_weights_map(module, TensorProcessor(), architecture).items():
        weights = state[theirs].float().numpy()
        if weights.ndim == 2 and weights.shape[1] % WIDTH == 0:
            writer.add_tensor(ours, quantize(weights, quantization), raw_dtype=quantization)
        elif ours != "output.weight":
            writer.add_tensor(ours, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary() -> list[str]:
    """128 tokens: bytes, among them all of ASCII text, merged words, and two special ones."""
    symbols = bytes_to_unicode()
    text = [symbols[code] for code in (*range(32, 127), ord("\n"))]
    others = [symbol for symbol in symbols.values() if symbol not in text]
    merged = [pair.replace(" ", "") for pair in MERGES]
    special = ["<|start|>", "<|end|>"]
    return [
        *text,
        *others[: VOCABULARY - len(text) - len(merged) - len(special)],
        *merged,
        *special,
    ]


def _add_tokenizer(writer: GGUFWriter, pre_tokenizer: str) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")


def add_sentencepiece(writer: GGUFWriter) -> None:
    """Tokenizer without merges: special tokens, all bytes, words with scores, and blanks that the
    user defined."""
    words = [
        *"helowrd12+3,!",
        "\u2581",
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581w",
        "or",
        "\u2581wor",
        "12",
    ]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>"]
    types = [3, 3, 3, 2]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [6] * 256
    tokens += [*words, "  ", "\n", "<tag>", "\u00e9\u2581", "\u00e9"]
    types += [1] * len(words) + [1, 4, 4, 1, 1]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index % 7) for index in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
