"""Labels of passages of text: attention to their entries while the model repeats them, in one file
per model.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 3, for the pass, which is that of the scorer `reconstruct`; Jegou and
Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891, for
KVzip+; Huang et al., "Locret: Enhancing Eviction in Long-Context LLM Inference with Trained
Retaining Heads on Consumer-Grade Devices" (2024), arXiv:2410.01805, for logits before the softmax.

Each label is the highest of a kv head's query heads and of the tokens of the copy. A weight is
shared with everything that the token sees, the copy up to itself included.

The file is a folder `$LARDER_HOME/<fingerprint>/labels/<digest>/` with `labels.json` and a
safetensors file per passage, of hidden states and labels. The digest covers the corpus and how it
is cut, not how much of it is labelled: a later call that asks for more continues where the last one
ended, also if that was interrupted. Shards are written whole or not at all, and depend on nothing
but their passage.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from larder.core.errors import BadParameter, ModelError
from larder.core.home import home
from larder.core.types import TokenIds
from larder.models.activation_hooks import forward_hooks
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.models.introspection import weight_inputs
from larder.ops.attention import cap_logits
from larder.ops.attention_weights import softmax_with_sinks
from larder.policy.scorers.reconstruct import Reconstruct
from larder.prefill.base import Progress
from larder.session.prefill import common_prompts
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit, Passage

SCHEMA = 1
INDEX = "labels.json"
IDS = "ids"  # tensor of a shard: token ids of its passage
PASSAGE_TOKENS = 768  # KVzap's texts have 750 to 1,250: softmax shares depend on the length
STATES, WEIGHT, PLUS, LOGIT = "states", "kvzip", "kvzip_plus", "logit"
CHUNK_TOKENS = 128  # tokens of the copy whose weights are in memory at a time
STATE_DTYPE = torch.float16
# By label: float32 [K, N], of a layer; `states` are [N, hidden].
LayerLabels = dict[str, Tensor]
LEAST = 1e-8  # scores below are next to nothing


@dataclass(frozen=True)
class CopyPass:
    """Text, the request to repeat it, and its copy.

    Args:
        ids: all three.
        context: tokens of the text.
        copy: index of the first token of the copy.
    """

    ids: tuple[int, ...]
    context: int
    copy: int

    @staticmethod
    def of(block: TokenIds, request: TokenIds) -> CopyPass:
        """Pass of the scorer `reconstruct` over a text that is read whole."""
        [scratch] = Reconstruct(chunk=len(block)).scratch(block, 0, {"repeat": request})
        return CopyPass(block + scratch.ids, len(block), len(block) + len(request))


@torch.no_grad()
def label_layers(decoder: Decoder, text: CopyPass) -> dict[int, LayerLabels]:
    """Labels of every managed layer, by layer index."""
    managed = {layer.index: layer for layer in decoder.spec.managed}
    projections = weight_inputs(decoder.attentions, decoder.spec.managed, {"projection"})
    found, latest = dict[int, LayerLabels](), list[Tensor]()

    def record(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        latest[:] = [(args[0] if args else named["hidden_states"])[0]]

    def show(inputs: AttentionInputs) -> None:
        if inputs.layer in managed:
            projection = projections[inputs.layer]["projection"]
            found[inputs.layer] = _layer_labels(inputs, latest[0], projection, text)

    handles = (
        decoder.attentions[index].register_forward_pre_hook(record, prepend=True, with_kwargs=True)
        for index in managed
    )
    with forward_hooks(handles):
        decoder.forward_uncached(text.ids, CausalAttention(show))
    return found


def _layer_labels(
    inputs: AttentionInputs,
    states: Float[Tensor, "T hidden"],
    projection: Float[Tensor, "H D hidden"],
    text: CopyPass,
) -> LayerLabels:
    kv_heads = inputs.keys.shape[0]
    sizes = written_sizes(inputs.values[:, : text.context].float(), projection.float())
    norms = states.float().norm(dim=-1)
    nothing = torch.full((kv_heads, text.context), -torch.inf)
    best: LayerLabels = {WEIGHT: nothing, PLUS: nothing, LOGIT: nothing}
    rows = torch.arange(text.copy, len(text.ids))
    for some in rows.split(CHUNK_TOKENS):
        logits, weights = row_attention(inputs, int(some[0]), len(some))
        seen, shares = logits[..., : text.context], weights[..., : text.context]
        written = shares * sizes[:, :, None] / norms[some, None]
        for name, numbers in ((LOGIT, seen), (WEIGHT, shares), (PLUS, written)):
            best[name] = torch.maximum(best[name], numbers.amax((1, 2)))
    return {STATES: states[: text.context].to(STATE_DTYPE), **best}


def written_sizes(
    values: Float[Tensor, "K N D"], projection: Float[Tensor, "H D hidden"]
) -> Float[Tensor, "K R N"]:
    """Length of what each query head would write for a value, behind the output projection."""
    groups = projection.unflatten(0, (len(values), -1))  # [K, R, D, hidden]
    grams = groups @ groups.transpose(-1, -2)
    squares = ((values[:, None] @ grams) * values[:, None]).sum(-1)
    return squares.clamp(min=0).sqrt()


def row_attention(
    inputs: AttentionInputs, first: int, count: int
) -> tuple[Float[Tensor, "K R Q S"], Float[Tensor, "K R Q S"]]:
    """Logits and softmax weights of `count` queries over all tokens up to the last of them."""
    kv_heads, stop = inputs.keys.shape[0], first + count
    groups = inputs.queries[:, first:stop].float().unflatten(0, (kv_heads, -1))
    keys = inputs.keys[:, None, :stop].float()
    logits = cap_logits(groups @ keys.transpose(-1, -2) * inputs.scaling, inputs.softcap)
    later = torch.arange(stop) > torch.arange(first, stop)[:, None]
    visible = logits.masked_fill(later, -torch.inf)
    weights = softmax_with_sinks(visible.flatten(0, 1), inputs.sinks)
    return logits, weights.unflatten(0, (kv_heads, -1))


@dataclass(frozen=True)
class LabelSettings:
    """Size of the labelled part of a corpus, and of its passages.

    Args:
        tokens: labelled tokens, at least; all passages where the corpus has fewer.
        passage_tokens: of a passage, without the chat template.
        seed: of the order of documents.
    """

    tokens: int = 40_000
    passage_tokens: int = PASSAGE_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.passage_tokens < 2:
            raise BadParameter(
                "labels need tokens >= 1 and passage_tokens >= 2, got "
                f"{self.tokens} and {self.passage_tokens}."
            )


@dataclass(frozen=True)
class Shard:
    """Labels of one passage.

    Args:
        path: of a safetensors file with tensors `<label>.<layer>`.
    """

    path: Path
    document: str
    source: str
    split: CorpusSplit
    tokens: int

    def layer(self, index: int, name: str) -> Tensor:
        """One label of one layer.

        Raises:
            ModelError: the file is damaged.
        """
        try:
            with safe_open(self.path, "pt") as tensors:
                return tensors.get_tensor(f"{name}.{index}")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"The labels {self.path} cannot be read ({error}): remove the file, and it is "
                "made again."
            ) from error


@dataclass(frozen=True)
class LabelFile:
    """Shards of a model.

    Args:
        digest: of the corpus and of how it is cut.
    """

    digest: str
    shards: tuple[Shard, ...]

    def of_split(self, *splits: CorpusSplit) -> list[Shard]:
        """Shards of some splits, in order."""
        return [shard for shard in self.shards if shard.split in splits]

    def tokens(self, *splits: CorpusSplit) -> int:
        """Labelled tokens of some splits."""
        return sum(shard.tokens for shard in self.of_split(*splits))


def make_labels(
    decoder: Decoder,
    adapter: TokenizerAdapter,
    corpus: Corpus,
    settings: LabelSettings,
    progress: Progress,
) -> LabelFile:
    """Label a corpus, passage by passage; passages that have a whole shard are not read again.

    Args:
        progress: called with tokens done and in total.

    Raises:
        ModelError: the corpus has no passage of that length.
    """
    digest = _digest(corpus, settings)
    folder = home() / decoder.spec.fingerprint / "labels" / digest
    folder.mkdir(parents=True, exist_ok=True)
    request = common_prompts(adapter)["repeat"]
    shards, done = list[Shard](), 0
    wanted = list(_first_passages(corpus, adapter, settings))
    if not wanted:
        raise ModelError(
            f"The corpus has no text of {settings.passage_tokens} tokens: give longer texts, or "
            "fewer passage_tokens."
        )
    total = sum(len(passage.ids) for passage in wanted)
    for number, passage in enumerate(wanted):
        path = folder / f"{number:05}.safetensors"
        if not _is_of(path, passage):
            _write_shard(path, decoder, passage, request)
        shards.append(
            Shard(path, passage.document, passage.source, passage.split, len(passage.ids))
        )
        done += len(passage.ids)
        progress(done, total)
    _write_index(folder / INDEX, corpus, settings, shards)
    return LabelFile(digest, tuple(shards))


def _digest(corpus: Corpus, settings: LabelSettings) -> str:
    identity = [SCHEMA, corpus.digest, settings.passage_tokens, settings.seed]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _first_passages(
    corpus: Corpus, adapter: TokenizerAdapter, settings: LabelSettings
) -> Iterator[Passage]:
    tokens = 0
    for passage in corpus.passages(adapter, settings.passage_tokens, settings.seed):
        if tokens >= settings.tokens:
            return
        tokens += len(passage.ids)
        yield passage


def _is_of(path: Path, passage: Passage) -> bool:
    """True where a shard is there, whole, and of this passage."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as tensors:
            return IDS in tensors.keys() and (  # noqa: SIM118
                tuple(tensors.get_tensor(IDS).tolist()) == tuple(passage.ids)
            )
    except (SafetensorError, OSError):
        return False


def _write_shard(path: Path, decoder: Decoder, passage: Passage, request: TokenIds) -> None:
    found = label_layers(decoder, CopyPass.of(passage.ids, request))
    tensors = {
        f"{name}.{layer}": tensor.contiguous()
        for layer, labels in found.items()
        for name, tensor in labels.items()
    }
    draft = path.with_suffix(f".{os.getpid()}.draft")
    save_file({IDS: torch.tensor(passage.ids), **tensors}, draft)
    os.replace(draft, path)


def _write_index(path: Path, corpus: Corpus, settings: LabelSettings, shards: list[Shard]) -> None:
    """Description of the shards, for readers; nothing is read from it."""
    document = {
        "schema": SCHEMA,
        "labels": [STATES, *sorted({"kvzip", "kvzip_plus", "logit"})],
        "held_out": corpus.held_out,
        "settings": asdict(settings),
        "shards": [
            {**asdict(shard), "path": shard.path.name, "split": shard.split.value}
            for shard in shards
        ],
    }
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(document, indent=1), encoding="utf-8")
    os.replace(draft, path)


def log_labels(labels: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """Natural logarithm, bounded below."""
    return labels.clamp(min=LEAST).log()
