"""Log-probabilities of tokens, with the text and the bytes of each token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from larder.engine.detokenizer import REPLACEMENT_CHARACTER
from larder.server.request import TokenLogprob
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

LEAST_LOGPROB = -9999.0  # JSON has no infinities; vLLM sends the same
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
CACHED_TEXTS = 1 << 16


class TokenTexts:
    """Text and bytes of single tokens, white space at the start included.

    A token that is part of a character has U+FFFD as its text; its bytes are its own.
    """

    def __init__(self, tokenizer: TokenizerAdapter) -> None:
        self._tokenizer = tokenizer
        # Decoders strip white space at the start of a text, so each token is decoded behind this.
        self._anchor = tokenizer.encode("a")[-1:]
        self._special = frozenset(tokenizer.tokenizer.all_special_ids)
        self.of = lru_cache(CACHED_TEXTS)(self._text_and_bytes)

    def _text_and_bytes(self, token: int) -> tuple[str, bytes]:
        spelled = self._tokenizer.tokenizer.convert_ids_to_tokens(token)
        if spelled is None:  # the model has more logits than the tokenizer has tokens
            return "", b""
        if token in self._special:
            return spelled, spelled.encode()
        decode = self._tokenizer.decode
        text = decode((*self._anchor, token)).removeprefix(decode(self._anchor))
        if REPLACEMENT_CHARACTER not in text:
            return text, text.encode("utf-8", "replace")
        if named := BYTE_TOKEN.fullmatch(spelled):
            return text, bytes.fromhex(named[1])
        alphabet = _byte_alphabet()
        is_byte_level = all(sign in alphabet for sign in spelled)
        return text, bytes(alphabet[sign] for sign in spelled) if is_byte_level else text.encode()


def token_logprobs(
    logits: Float[Tensor, "N V"], ids: Sequence[int], num_top: int, texts: TokenTexts
) -> list[TokenLogprob]:
    """Log-probabilities of tokens, and of the most likely ones at their positions.

    Args:
        logits: the model's own, before bias, penalties and temperature.
        ids: token at each position.
        num_top: number of the most likely tokens.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs[torch.arange(len(ids)), torch.tensor(ids)].tolist()
    ranked, tokens = logprobs.topk(min(num_top, logprobs.shape[1]))
    entries = list[TokenLogprob]()
    for token, number, best, numbers in zip(
        ids, chosen, tokens.tolist(), ranked.tolist(), strict=True
    ):
        pairs = zip(best, numbers, strict=True)
        top = tuple(_entry(other, likely, texts) for other, likely in pairs)
        entries.append(_entry(token, number, texts, top))
    return entries


def unscored_token(token: int, texts: TokenTexts) -> TokenLogprob:
    """Entry of the first token of a text, which the model does not predict."""
    text, data = texts.of(token)
    return TokenLogprob(token, text, data, None)


def _entry(
    token: int, logprob: float, texts: TokenTexts, top: tuple[TokenLogprob, ...] = ()
) -> TokenLogprob:
    text, data = texts.of(token)
    return TokenLogprob(token, text, data, max(logprob, LEAST_LOGPROB), top)


@cache
def _byte_alphabet() -> dict[str, int]:
    """Byte of each character in the tokens of byte-level tokenizers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {sign: byte for byte, sign in bytes_to_unicode().items()}
