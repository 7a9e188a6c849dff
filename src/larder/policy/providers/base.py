"""Base classes of providers: inputs of policy parts beside queries, keys and entries.

A part names the providers that it reads in `needs`, by their file names:

| kind | made of | read as |
|---|---|---|
| `TokenProvider` | logits before each token | column |
| `ImageProvider` | which tokens are of images | column |
| `ActivationProvider` | hidden states before attention | `Observation.inputs[name]`, or column |
| `GateProvider` | hidden states and learned weights | column, other numbers for each kv head |
| `LearnedProvider` | learned weights | `Observation.inputs[name.tensor]` |
| `WeightProvider` | weights of an attention module | `Observation.inputs[name]` |
| `GradientProvider` | gradients of a scratch pass | `Observation.inputs[name]` |
| `DraftProvider` | logits behind a scratch prompt | queries of the drafted tokens |
| `SoftPromptProvider` | learned tokens of a scratch pass | queries of the scratch prompt |
| `SoftEntryProvider` | learned tokens behind a text | `Observation.inputs[name.keys]`, `.values` |
| `VocabularyProvider` | texts of all tokens | `Observation.lexicon[name]` |

A column, read by `Entries.column(name)`, has one number per entry: the cache keeps, forks, saves
and counts it. A provider has no state, and runs only under policies that name it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import ClassVar, TypeVar

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from larder.core.registry import Family
from larder.core.spec import LayerSpec
from larder.core.types import HiddenStates, NamedTensors, TensorShapes

PROVIDERS = Family("provider", "larder.policy.providers")


class Provider:
    """Input of policy parts, named after its file."""

    # Whether there is one number per token, in a column of the cache with the provider's name.
    has_column: ClassVar[bool] = False


class TokenProvider(Provider, ABC):
    """Number of each token from the logits that predicted it; the same for all layers and heads.

    The cache keeps the hidden state of its last token, so that the first token of the next pass has
    a number. A token with nothing before it gets the largest number of its pass.
    """

    has_column = True

    @abstractmethod
    def measure(self, logits: Float[Tensor, "N V"], ids: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Number of each token.

        Args:
            logits: float32, of the model right before each token.
            ids: the tokens.
        """


class ImageProvider(Provider, ABC):
    """Number of each token of a text with images; the same for all layers and heads.

    Tokens of texts without images have 0.
    """

    has_column = True

    @abstractmethod
    def measure(self, is_image: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Number of each token.

        Args:
            is_image: whether the token is of an image.
        """


class ActivationProvider(Provider, ABC):
    """Tensor with one row per token of a pass, from the hidden states before each attention.

    Without a column it is provided during prefill only. With `has_column` it must be one number per
    token, recorded in every appending pass.
    """

    @property
    def reads_pass(self) -> bool:
        """True if a row depends on other tokens of the pass, which must then be of one sequence."""
        return False

    @abstractmethod
    def capture(self, attention: nn.Module, states: HiddenStates) -> Float[Tensor, "Q *rest"]:
        """Input of one layer.

        Args:
            attention: attention module of the layer.
            states: its input.
        """


class GateProvider(Provider, ABC):
    """Number of each token and kv head of a layer, from its hidden state and learned weights.

    Recorded in every appending pass, when the token is written; older entries keep theirs. The
    weights are those that `larder train` made for the model (`larder.models.learned_weights`).
    """

    has_column = True
    # Tensors that are the same in every layer: the weights file repeats them.
    shared: ClassVar[frozenset[str]] = frozenset()
    # Whether a token's number depends on the tokens before it in the pass.
    reads_pass: ClassVar[bool] = False

    @abstractmethod
    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        """Shape that each tensor of a layer must have, by name.

        Args:
            width: size of a hidden state.
            tensors: the tensors; sizes that training chose freely are read from them.
        """

    @abstractmethod
    def gate(self, states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K"]:
        """Float32 number of each token and kv head.

        Args:
            states: input of the layer's attention.
            weights: float32 tensors of the layer.
        """


class LearnedProvider(Provider, ABC):
    """Learned tensors of each layer, by the provider's name, a dot and their own."""

    @abstractmethod
    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        """Shape that each tensor of a layer must have, by name; see `GateProvider.shapes`."""


class WeightProvider(Provider, ABC):
    """Tensor of each layer from the weights of its attention."""

    @abstractmethod
    def layer_tensor(self, attention: nn.Module, layer: LayerSpec) -> Tensor:
        """Tensor of one layer, a view of the weights: its bytes are not counted.

        Raises:
            ModelError: the module has no such weights.
        """


class GradientProvider(Provider, ABC):
    """Number of each token of a scratch prompt, from gradients by a layer's attention output.

    Provided where a prompt that was read behind the cache is scored, in prefill.
    """

    @abstractmethod
    def objective(self, states: HiddenStates) -> Float[Tensor, ""]:
        """Number that is derived.

        Args:
            states: hidden states behind the last layer, before the last norm.
        """

    @abstractmethod
    def numbers(self, gradients: HiddenStates) -> Float[Tensor, " Q"]:
        """Float32 number of each token of one layer.

        Args:
            gradients: of the objective, by the token's attention output.
        """


class DraftProvider(Provider, ABC):
    """Tokens that extend a scratch prompt with `drafts`, one at a time."""

    @abstractmethod
    def next_tokens(self, logits: Float[Tensor, "N V"]) -> list[int]:
        """Next token of each prompt, from the float32 logits behind it."""


class SoftTokenProvider(Provider, ABC):
    """Learned vectors that a scratch pass reads in place of its tokens' embeddings, and low-rank
    updates of linear layers in that pass.

    The weights are those that `larder train` made for the model (`larder.models.learned_weights`).
    """

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Learned vectors, which is the length of the pass."""

    @abstractmethod
    def scale(self, rank: int) -> float:
        """Factor on a low-rank update."""

    @abstractmethod
    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        """Shape that each tensor of a layer must have, as of `GateProvider.shapes`."""


class SoftPromptProvider(SoftTokenProvider):
    """Learned tokens that stand for those of a scratch prompt, whose queries scorers read."""


class SoftEntryProvider(SoftTokenProvider):
    """Learned tokens of a pass of their own behind a text, before anything of it is evicted.

    Their keys and values in each layer, post-RoPE, are the inputs `<name>.keys` and
    `<name>.values`. Their positions are those of the latest tokens of the text.
    """


class VocabularyProvider(Provider, ABC):
    """Set of tokens of the model's vocabulary."""

    @abstractmethod
    def contains(self, text: str, is_special: bool) -> bool:
        """True if a token of this text is in the set.

        Args:
            is_special: whether the tokenizer calls it a special token.
        """


Kind = TypeVar("Kind", bound=Provider)


def select_providers(names: Iterable[str], kind: type[Kind]) -> dict[str, Kind]:
    """Providers of one kind among the named ones, by name.

    Raises:
        UnknownName: there is no provider of a name.
    """
    loaded = {name: _load(name) for name in sorted(names)}
    return {name: each for name, each in loaded.items() if isinstance(each, kind)}


def column_providers(columns: Iterable[str], kind: type[Kind]) -> dict[str, Kind]:
    """Providers of one kind that fill some of the ledger columns of a cache, by name."""
    return select_providers((name for name in columns if name in PROVIDERS), kind)


@cache
def _load(name: str) -> Provider:
    return PROVIDERS.load(name)()
