"""Decoder stack: the layers of a model in few calls, for the tokens of decode steps.

On a CPU it serves calls of few bfloat16 or float32 tokens, on a GPU with Triton all in bfloat16.
While such a call runs, one module stands in the place of the model's layers and reads their weights
where they are. Nothing is copied, and outside such calls the model is as it was. The stack serves
layers that it knows whole: classes of transformers, without adapters, hooks or replaced methods.
Every other model, and every other call, runs the model's own layers.

A snapshot of the modules, cheap enough for a decode step, tells whether any of them changed since.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_forward_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Queries
from larder.models.activation_hooks import CaptureHook
from larder.models.attention_backend import NAME, AttentionInputs, LayerAttention, attend
from larder.models.forward_batch import ForwardBatch
from larder.models.introspection import TOLERANCE, relative_difference
from larder.ops.cpu import decoder_layer as cpu_layer
from larder.ops.cpu.decoder_layer import few_rows_linear, is_supported, max_rows
from larder.ops.decoder_layer import LayerSizes, LayerTensors

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")  # prefixes of transformers' classes
ACTIVATIONS = ("SiLU", "SiLUActivation")
CPU = torch.device("cpu")
PROBED_POSITION = 7  # of the token on which the first layer is compared with the model's own
Angles = tuple[Float[Tensor, "1 N D"], Float[Tensor, "1 N D"]]  # cosines and sines
CHILDREN, PARAMETERS = itemgetter("_modules"), itemgetter("_parameters")
HOOKS, DTYPE = itemgetter("_forward_hooks"), attrgetter("dtype")


class LayerKernels(NamedTuple):
    """Kernels of layers on one kind of device.

    Args:
        rows: class of states on their way through the layers.
        weights: form in which its methods take the weights of a layer.
        support: True for sizes that they take.
    """

    rows: Callable[..., Any]
    weights: Callable[[LayerTensors], Any]
    support: Callable[[LayerSizes], bool]


class EchoAttention:
    """Layer attention that returns the queries and records what it was given."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def attend(self, inputs: AttentionInputs) -> Queries:
        self.seen += [inputs.queries, inputs.keys, inputs.values]
        return inputs.queries


class DecoderStack(nn.Module):
    """Layers of a model as one module that reads their weights where they are. Not thread-safe.

    Args:
        body: the model's layers with embedding and norm.
        spec: of its caches.
        tensors: weights of each layer.
    """

    def __init__(self, body: Any, spec: ModelSpec, tensors: Sequence[LayerTensors]) -> None:
        super().__init__()
        self._owner = (body,)  # in a tuple, so that the model does not become a part of this module
        self._spec = spec
        self._sizes = _layer_sizes(body, spec.layers[0])
        self._kernels = _kernels_of(spec.device)
        self._weights = [self._kernels.weights(each) for each in tensors]
        self._layers = list(body.layers)
        # transformers 5.2 chooses the mask of a layer by it; later versions ask the configuration
        self.attention_type = vars(self._layers[0]).get("attention_type", "full_attention")
        self._parts = ModuleSnapshot(self._layers, spec.dtype)

    @staticmethod
    def of(body: Any, spec: ModelSpec) -> DecoderStack | None:
        """Stack of a model's layers; None if it does not serve them as they are now.

        To be called while the model is on Larder's attention.
        """
        is_known = _is_own_attention() and _is_known_body(body)
        if not is_known or len(spec.layers) != len(body.layers):
            return None
        tensors = list[LayerTensors]()
        for layer, own in zip(body.layers, spec.layers, strict=True):
            if not _is_known_layer(layer, own):
                return None
            tensors.append(_layer_tensors(layer))
        if not all(_are_supported(each, spec) for each in tensors):
            return None
        sizes = {_layer_sizes(body, own) for own in spec.layers}
        if len(sizes) > 1 or not _kernels_of(spec.device).support(sizes.pop()):
            return None
        stack = DecoderStack(body, spec, tensors)
        return stack if stack._equals_first_layer() else None

    @property
    def is_current(self) -> bool:
        """False while a module has hooks or attention is wrapped, and once one was replaced or a
        weight was changed.

        New numbers in the memory of a weight are no change: they are read where they are.
        """
        return (
            _is_own_attention()
            and list(self._owner[0].layers) == self._layers
            and not (_global_forward_hooks or _global_forward_pre_hooks)
            and self._parts.is_current
            and all(map(_is_served_hook, self._parts.pre_hooks))
        )

    @property
    def is_running(self) -> bool:
        """True while calls of the model run the stack."""
        return list(self._owner[0].layers) == [self]

    def in_place_of_layers(self) -> AbstractContextManager[None]:
        """Context in which calls of the model run the stack."""
        return _layers_replaced(self._owner[0], [self])

    def out_of_place(self) -> AbstractContextManager[None]:
        """Context in which calls of the model run its own layers, within a call of the stack."""
        return _layers_replaced(self._owner[0], self._layers)

    def forward(
        self,
        hidden_states: Float[Tensor, "1 N hidden"],
        *,
        position_embeddings: Angles,
        larder: LayerAttention,
        **rest: object,
    ) -> Float[Tensor, "1 N hidden"]:
        """States behind the last layer."""
        if isinstance(larder, ForwardBatch) and self._can_step():
            tabulate = larder.step_tables(hidden_states.dtype)
            if tabulate is not None:
                return self._step(hidden_states, position_embeddings, larder, tabulate)
            larder.start_pass(hidden_states.dtype)
        return self._run(hidden_states, position_embeddings, larder, len(self._weights))

    def _can_step(self) -> bool:
        """True if one call can run all layers: on a CPU, where no activations are captured."""
        return (
            self._spec.device.type == "cpu"
            and cpu_layer.can_step(self._sizes, self._spec.dtype)
            and not any(_pre_hooks(layer.self_attn) for layer in self._layers)
        )

    def _step(
        self,
        states: Float[Tensor, "1 N hidden"],
        angles: Angles,
        batch: ForwardBatch,
        tabulate: cpu_layer.StepTableMaker,
    ) -> Float[Tensor, "1 N hidden"]:
        """States behind the last layer, of tokens that are appended to storages of all layers."""
        rows = cpu_layer.LayerRows(self._sizes, states[0], angles[0][0], angles[1][0])
        scalings = [layer.scaling for layer in self._spec.layers]
        batch.finish_steps(rows.take_step(self._weights, tabulate, scalings))
        return rows.states[None]

    def _run(
        self,
        states: Float[Tensor, "1 N hidden"],
        angles: Angles,
        attention: LayerAttention,
        num_layers: int,
    ) -> Float[Tensor, "1 N hidden"]:
        """States behind the first layers; behind the last one of rows that are asked for alone."""
        rows = self._kernels.rows(self._sizes, states[0], angles[0][0], angles[1][0])
        for weights, layer in zip(self._weights[:num_layers], self._spec.layers, strict=False):
            number, own = self._spec.number_of(layer.index), self._layers[layer.index]
            for hook in _pre_hooks(own.self_attn):
                hook.capture(own.self_attn, own.input_layernorm(rows.states), attention)
            queries, keys, values = rows.attention_inputs(weights)
            inputs = AttentionInputs(
                number, queries, keys, values, layer.scaling, layer.sliding_window
            )
            attended, kept = attention.attend(inputs), None
            if layer.index == len(self._weights) - 1:
                kept = self._output_rows(attention)
            if kept is None:
                rows.finish_layer(weights, attended)
                continue
            last = self._kernels.rows(self._sizes, rows.states[kept], *(a[0, kept] for a in angles))
            last.finish_layer(weights, attended[:, kept])
            rows.states[kept] = last.states
        return rows.states[None]

    def _output_rows(self, attention: LayerAttention) -> Int[Tensor, " M"] | None:
        """Rows whose states behind the last layer are asked for; None to pass all rows through it.

        A GPU gets all, as its products of fewer rows round otherwise, and so do hooks that read the
        states.
        """
        if not isinstance(attention, ForwardBatch) or self._spec.device.type != "cpu":
            return None
        if any(map(_is_hooked, (self._owner[0], self._owner[0].norm))):
            return None
        rows = attention.output_rows
        return rows if rows is not None and len(rows) < attention.num_tokens else None

    @torch.no_grad()
    def _equals_first_layer(self) -> bool:
        """True if the first layer gives what the model's own gives, as far as rounding allows."""
        body, device = self._owner[0], self._spec.device
        random = torch.Generator().manual_seed(0)
        drawn = torch.randn(1, 1, self._sizes.hidden, generator=random)
        states = drawn.to(device, self._spec.dtype)
        positions = torch.full((1, 1), PROBED_POSITION, device=device)
        angles = body.rotary_emb(states, positions)
        if angles[0].shape[-1] != self._sizes.head_dim:
            return False
        own, expected = EchoAttention(), EchoAttention()
        got = self._run(states, angles, own, 1)
        out = body.layers[0](
            states,
            attention_mask=None,
            position_embeddings=angles,
            use_cache=False,
            larder=expected,
        )
        pairs = zip((got, *own.seen), (out, *expected.seen), strict=True)
        most = TOLERANCE[self._spec.dtype]
        return all(relative_difference(ours, theirs) < most for ours, theirs in pairs)


class SmallBatchHead:
    """Forward hooks by which the head of a model multiplies the states of decode steps.

    Context manager; its hooks also leave after one call of the head. The head's own product is
    given no rows.

    Args:
        module: model with a head.
    """

    def __init__(self, module: Any) -> None:
        self._head = module.get_output_embeddings()
        self._dtype = self._head.weight.dtype
        self._states = torch.empty(0)
        self._hooks = list[Any]()

    def __enter__(self) -> None:
        head = self._head
        if type(head) is nn.Linear and head.bias is None and not _is_hooked(head):
            if _is_plain(head.weight, self._dtype, CPU) and is_supported(*head.weight.shape):
                before = head.register_forward_pre_hook(self._before)
                self._hooks = [before, head.register_forward_hook(self._after)]

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _before(self, head: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        (self._states,) = args
        if not self._is_served:
            return None
        return (self._states[..., :0, :],)

    def _after(self, head: Any, args: tuple[Tensor], out: Tensor) -> Tensor:
        self.__exit__()
        if not self._is_served:
            return out
        rows = self._states.flatten(0, -2)
        return few_rows_linear(rows, head.weight).view(*self._states.shape[:-1], -1)

    @property
    def _is_served(self) -> bool:
        """True for as few rows of the head's dtype as the kernel takes."""
        is_few = 0 < self._states.shape[:-1].numel() <= max_rows(self._dtype)
        return is_few and self._states.dtype is self._dtype


@contextmanager
def _layers_replaced(body: Any, layers: Sequence[nn.Module]) -> Iterator[None]:
    modules = vars(body)["_modules"]
    former, modules["layers"] = modules["layers"], nn.ModuleList(layers)
    try:
        yield
    finally:
        modules["layers"] = former


def _kernels_of(device: torch.device) -> LayerKernels:
    if device.type != "cuda":
        pointers = cpu_layer.LayerPointers.of
        return LayerKernels(cpu_layer.LayerRows, pointers, cpu_layer.are_supported)
    from larder.ops.gpu import decoder_layer as gpu_layer  # imports Triton

    return LayerKernels(gpu_layer.DeviceLayerRows, lambda tensors: tensors, gpu_layer.are_supported)


def _is_own_attention() -> bool:
    """False while Larder's attention function is wrapped or replaced."""
    return ALL_ATTENTION_FUNCTIONS.get(NAME) is attend


def _is_known_body(body: Any) -> bool:
    """True for a body of transformers whose layers are of a known family."""
    kinds = {f"{family}Model": family for family in FAMILIES}
    family = kinds.get(type(body).__name__, "")
    home = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    return type(body).__module__ == home and all(
        type(layer) is vars(sys.modules[home])[f"{family}DecoderLayer"] for layer in body.layers
    )


def _is_known_layer(layer: Any, spec: LayerSpec) -> bool:
    """True if a layer of a known family has the parts that its class makes, and no hooks."""
    attention, gated = layer.self_attn, layer.mlp
    linear = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    linear += (gated.gate_proj, gated.up_proj, gated.down_proj)
    return (
        all(type(each) is nn.Linear for each in linear)
        and all(each.bias is None for each in linear[-3:])
        and type(gated.act_fn).__name__ in ACTIVATIONS
        and not any(_is_hooked(part) for part in layer.modules())
        and (spec.softcap, spec.sinks, spec.chunk, spec.kv_source) == (None, (), None, None)
        and all(
            type(part).__module__ == type(layer).__module__
            for part in (attention, gated, layer.input_layernorm, layer.post_attention_layernorm)
        )
    )


def _layer_tensors(layer: Any) -> LayerTensors:
    attention, gated = layer.self_attn, layer.mlp
    norms = dict(attention.named_children())
    query_norm, key_norm = norms.get("q_norm"), norms.get("k_norm")
    return LayerTensors(
        input_norm=layer.input_layernorm.weight,
        output_norm=layer.post_attention_layernorm.weight,
        query=attention.q_proj.weight,
        key=attention.k_proj.weight,
        value=attention.v_proj.weight,
        output=attention.o_proj.weight,
        gate=gated.gate_proj.weight,
        up=gated.up_proj.weight,
        down=gated.down_proj.weight,
        query_bias=attention.q_proj.bias,
        key_bias=attention.k_proj.bias,
        value_bias=attention.v_proj.bias,
        output_bias=attention.o_proj.bias,
        query_norm=query_norm.weight if query_norm is not None else None,
        key_norm=key_norm.weight if key_norm is not None else None,
    )


def _are_supported(tensors: LayerTensors, spec: ModelSpec) -> bool:
    """True for plain contiguous weights of the model's dtype and device."""
    given = [each for each in vars(tensors).values() if each is not None]
    return all(_is_plain(each, spec.dtype, spec.device) for each in given)


def _is_plain(weight: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.dtype == dtype
        and weight.device == device
        and weight.is_contiguous()
    )


def _layer_sizes(body: Any, spec: LayerSpec) -> LayerSizes:
    layer = body.layers[spec.index]
    return LayerSizes(
        hidden=layer.mlp.gate_proj.in_features,
        inner=layer.mlp.gate_proj.out_features,
        heads=spec.query_heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        epsilon=layer.input_layernorm.variance_epsilon,
    )


def _is_hooked(part: nn.Module) -> bool:
    """True if a call of a module does something beside what its class says."""
    attributes = vars(part)
    others = not all(map(_is_served_hook, _pre_hooks(part)))
    hooks = attributes["_forward_hooks"] or others
    is_global = _global_forward_hooks or _global_forward_pre_hooks
    return bool(hooks or is_global) or "forward" in attributes


def _is_served_hook(hook: object) -> bool:
    """True for hooks that capture activations, which the stack serves itself, on a CPU."""
    return type(hook) is CaptureHook and not hook.is_on_device


def _pre_hooks(part: nn.Module) -> list[Any]:
    return list(vars(part)["_forward_pre_hooks"].values())


class ModuleSnapshot:
    """Modules with all of their parts: classes, children, parameters and addresses of these.

    A layer has a dozen parts, so that they are compared without a line of Python for each.

    Args:
        modules: the modules.
        dtype: of their parameters.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._parts = [part for module in modules for part in module.modules()]
        self._kinds = list(map(type, self._parts))
        self._dtype = dtype
        self._children = _Members.of(self._parts, CHILDREN)
        self._parameters = _Members.of(self._parts, PARAMETERS)
        self._weights = [each for each in self._parameters.members if isinstance(each, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._weights))

    @property
    def is_current(self) -> bool:
        """False once a part was replaced, hooked or overridden, or a parameter was.

        New numbers in the memory of a parameter are no change. Hooks before a call do not count.
        """
        own = list(map(vars, self._parts))
        weights = self._weights
        return (
            all(map(is_, map(type, self._parts), self._kinds))
            and not any(map(HOOKS, own))
            and not any(map(contains, own, repeat("forward")))
            and self._children.are_same(_Members.of(self._parts, CHILDREN))
            and self._parameters.are_same(_Members.of(self._parts, PARAMETERS))
            and list(map(Tensor.data_ptr, weights)) == self._addresses
            and all(map(is_, map(DTYPE, weights), repeat(self._dtype)))
            and all(map(Tensor.is_contiguous, weights))
        )

    @property
    def pre_hooks(self) -> list[Any]:
        """Hooks before calls of the parts."""
        held = map(itemgetter("_forward_pre_hooks"), map(vars, self._parts))
        return [hook for hooks in held if hooks for hook in hooks.values()]


class _Members(NamedTuple):
    """Members of some parts in order, and how many each part has."""

    counts: list[int]
    members: list[Any]

    @staticmethod
    def of(parts: Sequence[nn.Module], kind: Callable[[Any], Any]) -> _Members:
        held = list(map(kind, map(vars, parts)))
        return _Members(list(map(len, held)), [*chain.from_iterable(map(dict.values, held))])

    def are_same(self, other: _Members) -> bool:
        """True for the same objects in the same parts."""
        return self.counts == other.counts and all(map(is_, self.members, other.members))
