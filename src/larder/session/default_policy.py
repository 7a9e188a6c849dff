"""Default policy of each kind of text: what acts where no policy is named.

| kind | default | because |
|---|---|---|
| prompt | `snapkv` | its end says what is asked, as it is continued at once; no tokenizer |
| document | `larder` or `kvzip` | read before its questions are known; KVzip's score asks none |
| conversation | `epicache_pooled` | it returns to its topics, and grows within the budget |
| contexts | `cacheblend` | texts that are read apart can be reused; with a budget, as a document |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from types import MappingProxyType

from larder.core.codec import TransformSpec
from larder.core.conversation import Conversation, PromptLayout
from larder.core.errors import UnknownName
from larder.core.registry import unknown_name_message
from larder.core.spec import ModelSpec
from larder.session.capacity import beyond_budget
from larder.session.policy import Policy


class TextKind(Enum):
    """Kind of a text that is read.

    PROMPT: continued at once, as by `generate`, `stream`, `larder.applied` and `LarderCache`.
    DOCUMENT: one text, about which is asked later, as by `Engine.read` and `larder ask`.
    CONVERSATION: messages, or the transcript of a dialogue; `Chat` and `larder chat` too.
    CONTEXTS: several texts of one question.
    """

    PROMPT = "prompt"
    DOCUMENT = "document"
    CONVERSATION = "conversation"
    CONTEXTS = "contexts"


DEFAULT_POLICIES: Mapping[TextKind, str] = MappingProxyType(
    {
        TextKind.PROMPT: "snapkv",
        TextKind.DOCUMENT: "kvzip",
        TextKind.CONVERSATION: "epicache_pooled",
        TextKind.CONTEXTS: "cacheblend",
    }
)


def default_policy(kind: TextKind | str, spec: ModelSpec | None = None) -> str:
    """Name of the policy that acts on a kind of text where none is given, in Python and on the
    command line.

    Documents are read under `larder` if the model has calibrated transforms, as `smollm2` has from
    the package and others by `larder model calibrate MODEL transform`, and runs on a CPU with
    AVX-512 and the compiled kernel; else under `kvzip`.

    Args:
        kind: `"prompt"`, `"document"`, `"conversation"` or `"contexts"`, or the `TextKind`.
        spec: of the model, `engine.loaded.decoder.spec`; None for one without transforms.

    Returns:
        Name of a preset, whose budget is 20% of the text but at least 128 tokens where none is
        given.

    Raises:
        UnknownName: no kind has this name.

    Examples:
        >>> larder.default_policy("document")
        'kvzip'
        >>> larder.default_policy("conversation")
        'epicache_pooled'
    """
    known = {own.value: own for own in TextKind}
    name = kind.value if isinstance(kind, TextKind) else kind
    if name not in known:
        raise UnknownName(unknown_name_message("kind of text", str(name), list(known)))
    if known[name] is TextKind.DOCUMENT and spec is not None and not missing_for_larder(spec):
        return "larder"
    return DEFAULT_POLICIES[known[name]]


def missing_for_larder(spec: ModelSpec) -> str:
    """Reason not to read documents under the policy `larder`, as a clause; empty if none."""
    from larder.cache.table_file import measured_path
    from larder.ops.plane_coder import is_plane_kernel_fast, plane_library

    if spec.layer_devices or spec.device.type != "cpu":
        return "its kernel is for CPUs"
    if plane_library() is None:
        return "its kernel was not compiled"
    if not is_plane_kernel_fast():
        return "its decode steps take long on a processor without AVX-512"
    if not measured_path(spec.fingerprint, TransformSpec().calibration).is_file():
        return (
            "`larder model calibrate MODEL transform` was not run for this model as it is loaded, "
            "its adapter included"
        )
    return ""


def policy_for_kind(policy: Policy | None, spec: ModelSpec, kind: TextKind) -> Policy:
    """A policy, or the default one of a kind of text, for a model."""
    return for_model(policy or Policy.parse(default_policy(kind, spec)), spec)


def for_model(policy: Policy, spec: ModelSpec) -> Policy:
    """Policy with what was measured of the model and this machine."""
    return with_measured_recall(with_measured_storage(policy, spec), spec)


def with_measured_storage(policy: Policy, spec: ModelSpec) -> Policy:
    """Policy whose storage has the parameters that were measured of a model, where its sentence
    names none.
    """
    storage = policy.storage
    plain = type(storage)  # whose attributes are the usual numbers
    names = {
        parameter: name
        for parameter, name in storage.measured_parameters.items()
        if parameter in policy.unnamed and getattr(storage, parameter) == getattr(plain, parameter)
    }
    if not names:
        return policy
    from larder.models.calibration import known_numbers

    found = {each: known_numbers(spec.fingerprint, name) for each, name in names.items()}
    known = {parameter: numbers[0] for parameter, numbers in found.items() if numbers}
    bound = replace(storage, **known)  # pyright: ignore[reportArgumentType] every part is one
    return replace(policy, storage=bound) if known else policy


def with_measured_recall(policy: Policy, spec: ModelSpec) -> Policy:
    """Policy whose recall reads all offloaded entries up to the break-even of this machine."""
    if policy.recall is None:
        return policy
    from larder.session.recall_break_even import with_break_even

    return with_break_even(policy, spec)


def text_kind(conversation: Conversation, has_budget: bool) -> TextKind:
    """Kind of a conversation or document for its default policy.

    Args:
        has_budget: True if a budget was given, under which contexts are read as one document.
    """
    if conversation.form is PromptLayout.CONTEXTS and not has_budget:
        return TextKind.CONTEXTS
    return TextKind.DOCUMENT if conversation.form.is_document else TextKind.CONVERSATION


def beyond_budget_by_kind(
    policy_for: Callable[[TextKind], Policy], spec: ModelSpec
) -> tuple[str, ...]:
    """Exceptions from the budget bound, a clause each; one that does not hold for every kind of
    text names its kinds.

    Args:
        policy_for: policy of a kind of text.
    """
    clauses = dict[str, list[str]]()
    for kind in TextKind:
        for clause in beyond_budget(policy_for(kind), spec):
            clauses.setdefault(clause, []).append(kind.value)
    every = len(TextKind)
    return tuple(
        clause if len(kinds) == every else f"{clause} (text: {', '.join(kinds)})"
        for clause, kinds in clauses.items()
    )
