"""Tokenizers of GGUF files: the files that transformers would save, written directly.

transformers builds a tokenizer with the whole vocabulary, copies it and saves it: many seconds for
262,144 tokens. Here it builds one with the special tokens alone, by its own rules, from a GGUF file
that has no others. The vocabulary and the merges are put into what it saves, and the ids there
become those of the whole vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from larder.models.gguf_header import MERGES, SCORES, TOKEN_ID, TOKENS, TYPES, GGUFHeader
from larder.ops.cpu.token_pairs import token_pairs

Merges = tuple[list[int], list[int]]  # ids of the first parts and of the second ones

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
ORDINARY = frozenset({1, 6})  # types of tokens: words, bytes
MODEL = "tokenizer.ggml.model"
# transformers' functions that build a tokenizer, by their names.
BYTE_LEVEL, GEMMA = "byte_level_tokenizer", "gemma_tokenizer"
SENTENCEPIECE = ("sentencepiece_tokenizer", "phi3_tokenizer")
SPACE = "\u2581"
MOST_BUILDS = 3  # a build may show that another token of the vocabulary is special, by its name


def save_tokenizer(path: Path, header: GGUFHeader, folder: Path, scratch: Path) -> int:
    """Write the tokenizer's files; number of its tokens.

    Args:
        scratch: file that is written and may be overwritten.

    Raises:
        LookupError, TypeError, ValueError: the file has no vocabulary, or a damaged one.
    """
    words = _words(header)
    if words is None or not _save_directly(header, *words, folder, scratch):
        tokenizer = _build(path)
        tokenizer.save_pretrained(folder)
        tokenizer.backend_tokenizer.save(str(folder / TOKENIZER), pretty=False)
        _list_added_tokens(tokenizer, tokenizer.added_tokens_decoder, folder)
    return len(header.values[TOKENS])


def _save_directly(
    header: GGUFHeader, vocabulary: Mapping[str, int], merges: Merges, folder: Path, scratch: Path
) -> bool:
    """Write a tokenizer built of its special tokens; False if it holds what cannot be completed."""
    tokens, types = header.values[TOKENS], header.values.get(TYPES, ())
    special = {index for index, kind in enumerate(types) if kind not in ORDINARY}
    special |= {value for key, value in header.values.items() if key.endswith(TOKEN_ID)}
    known = {token: index for index, token in enumerate(tokens)}
    for _ in range(MOST_BUILDS):
        chosen = sorted(special)
        header.write_tokens(scratch, chosen)
        tokenizer = _build(scratch)
        added = set(tokenizer.added_tokens_encoder)
        if not (more := {known[token] for token in added if token in known} - special):
            break
        special |= more
    else:
        return False
    size = len(vocabulary)
    fewer = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if state["model"]["type"] != "BPE" or not _is_simple(state["post_processor"]):
        return False
    ids = {
        token: vocabulary.get(token, index - fewer + size)
        for token, index in tokenizer.added_tokens_encoder.items()
    }
    for entry in state["added_tokens"]:
        entry["id"] = ids[entry["content"]]
    state["added_tokens"].sort(key=lambda entry: entry["id"])
    for entry in _templates(state["post_processor"]):
        entry["ids"] = [ids[token] for token in entry["tokens"]]
    tokenizer.save_pretrained(folder)
    (folder / TOKENIZER).write_text(_completed(state, vocabulary, merges), encoding="utf-8")
    decoder = {ids[token.content]: token for token in tokenizer.added_tokens_decoder.values()}
    _list_added_tokens(tokenizer, dict(sorted(decoder.items())), folder)
    return True


def _completed(state: dict[str, Any], vocabulary: Mapping[str, int], merges: Merges) -> str:
    """Text of a tokenizer with other words; each token is quoted once."""
    quoted = list(map(encode_basestring, vocabulary))
    words = ",".join([f"{token}:{index}" for index, token in enumerate(quoted)])
    pairs = ",".join(
        [f"[{quoted[left]},{quoted[right]}]" for left, right in zip(*merges, strict=True)]
    )
    state["model"] |= {"vocab": None, "merges": None}
    text = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
    # Quotes inside of strings are escaped: these keys stand in the model alone.
    return text.replace('"vocab":null', f'"vocab":{{{words}}}', 1).replace(
        '"merges":null', f'"merges":[{pairs}]', 1
    )


def _build(path: Path) -> Any:
    """Tokenizer of a GGUF file as transformers builds it."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, vocabulary, options = get_gguf_tokenizer(str(path))
    backend, more = convert_gguf_tokenizer(architecture, vocabulary)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)


def _list_added_tokens(tokenizer: Any, decoder: Mapping[int, Any], folder: Path) -> None:
    """List added tokens in the configuration, so that the tokenizer loads fast.

    transformers parses the whole of tokenizer.json in Python for the added tokens (2 s of a
    vocabulary of 262,144) where tokenizer_config.json does not list them.
    """
    path = folder / TOKENIZER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {
        index: {"content": token.content} | {name: getattr(token, name) for name in TOKEN_OPTIONS}
        for index, token in decoder.items()
    }
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def _is_simple(post_processor: Any) -> bool:
    """Test if a post-processor names ids in templates alone."""
    if post_processor is None or post_processor["type"] in ("ByteLevel", "TemplateProcessing"):
        return True
    return post_processor["type"] == "Sequence" and all(
        map(_is_simple, post_processor["processors"])
    )


def _templates(post_processor: Any) -> Iterator[dict[str, Any]]:
    """Special tokens that a post-processor names."""
    if post_processor is None:
        return
    yield from post_processor.get("special_tokens", {}).values()
    for each in post_processor.get("processors", ()):
        yield from _templates(each)


def _words(header: GGUFHeader) -> tuple[dict[str, int], Merges] | None:
    """Ids of all tokens, in order, and merges by ids; None for kinds of which more is needed.

    Raises:
        ValueError: a merge is of tokens that are not in the vocabulary.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        get_merges,
        select_tokenizer_builder,
    )

    tokens = header.values[TOKENS]
    build = select_tokenizer_builder(header.architecture, header.values.get(MODEL))
    name, stated = getattr(build, "__name__", ""), header.values.get(MERGES)
    described = {"tokens": tokens, "scores": header.values.get(SCORES)}
    if name == BYTE_LEVEL and stated is not None:
        tokens = _byte_level(tokens)
    elif name == GEMMA:
        tokens = [SPACE * len(one) if " " in one and not one.strip() else one for one in tokens]
    elif name not in SENTENCEPIECE:
        return None
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        return None
    if stated is not None:
        if len(set(stated)) != len(stated):
            return None
        return vocabulary, _numbered(map(_halves, stated), vocabulary)
    if name == GEMMA:  # whose scores do not follow its order of merges
        return vocabulary, token_pairs(vocabulary)
    return vocabulary, _numbered(get_merges(described), vocabulary)


def _byte_level(tokens: Sequence[str]) -> list[str]:
    """Tokens in the alphabet of byte-level vocabularies, in which some files write special ones
    otherwise."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelling = bytes_to_unicode()
    alphabet = frozenset(spelling.values())
    return [
        token
        if alphabet.issuperset(token)
        else "".join(spelling[byte] for byte in token.encode("utf-8"))
        for token in tokens
    ]


def _halves(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _numbered(merges: Iterable[Sequence[str]], vocabulary: Mapping[str, int]) -> Merges:
    """Merges by the ids of their parts.

    Raises:
        ValueError: a part or what is merged is no token.
    """
    lefts, rights = list[int](), list[int]()
    for left, right in merges:
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ValueError(f"the merge {left} {right} is not of its vocabulary")
        lefts.append(vocabulary[left])
        rights.append(vocabulary[right])
    return lefts, rights
