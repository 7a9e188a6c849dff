"""Interface of lm-eval 0.4.13 as Larder's model uses it, written for tests.

`test_lm_eval_contract` compares it with the package where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Ids = list[int]
MODELS: dict[str, type] = {}


@dataclass
class Instance:
    """Request of a task: its kind, a document, its arguments and its number."""

    request_type: str
    doc: dict[str, Any]
    arguments: tuple[Any, ...]
    idx: int

    @property
    def args(self) -> tuple[Any, ...]:
        return self.arguments


class CacheHook:
    """Cache of answers, which records nothing."""

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        del attr, req, res


class TemplateLM:
    """Base class that encodes the requests of a model."""

    backend = "causal"

    def __init__(self) -> None:
        self.cache_hook = CacheHook()

    @property
    def prefix_token_id(self) -> int:
        raise NotImplementedError

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Ids:
        raise NotImplementedError

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def _encode_pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """Ids of a context without spaces at its end, which go to the continuation."""
        stripped = context.rstrip()
        whole = self.tok_encode(context + continuation)
        own = self.tok_encode(stripped)
        return own, whole[len(own) :]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores of continuations; an empty context is the prefix token."""
        encoded = [(request.args, *self._encoded(*request.args)) for request in requests]
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _encoded(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        if context:
            return self._encode_pair(context, continuation)
        ids = self.tok_encode(continuation, add_special_tokens=False)
        if ids[0] == self.prefix_token_id:
            return ids[:1], ids[1:]
        return [self.prefix_token_id], ids


def register_model(*names: str) -> Callable[[type], type]:
    """Decorator that registers a model under names."""

    def registered(kind: type) -> type:
        MODELS.update(dict.fromkeys(names, kind))
        return kind

    return registered


def get_model(model_name: str) -> type:
    """Registered model by name."""
    return MODELS[model_name]


def get_rolling_token_windows(
    token_list: Ids, prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[tuple[Ids, Ids]]:
    """Inputs and predicted tokens of windows that predict each token once."""
    inputs = [prefix_token, *token_list]
    stop = 0
    while stop < len(token_list):
        start, most = stop, max_seq_len if stop == 0 else max_seq_len - context_len + 1
        stop = min(start + most, len(token_list))
        yield inputs[max(0, stop - max_seq_len) : stop], token_list[start:stop]


def make_disjoint_window(pair: tuple[Ids, Ids]) -> tuple[Ids, Ids]:
    """A window's inputs up to the first predicted token, and the predicted tokens."""
    inputs, predicted = pair
    return inputs[: len(inputs) - len(predicted) + 1], predicted


def modules() -> dict[str, ModuleType]:
    """The package and its modules, by name."""
    contents: dict[str, tuple[Any, ...]] = {
        "lm_eval": (),
        "lm_eval.api": (),
        "lm_eval.api.model": (TemplateLM,),
        "lm_eval.api.instance": (Instance,),
        "lm_eval.api.registry": (register_model, get_model),
        "lm_eval.utils": (get_rolling_token_windows, make_disjoint_window),
    }
    found = {name: ModuleType(name) for name in contents}
    for name, own in contents.items():
        vars(found[name]).update({each.__name__: each for each in own})
    return found
