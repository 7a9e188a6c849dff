"""Model loader: from a name or folder to a verified decoder with its tokenizer."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from larder.core.arguments import check_type
from larder.core.errors import BadParameter, DependencyError, ModelError
from larder.core.progress import ProgressStage, silent_stage
from larder.models.decoder import Decoder, check_not_in_use
from larder.models.model_packages import GGUF_SUFFIX, PACKAGED_MODELS
from larder.models.placement import (
    DeviceMap,
    PageUse,
    check_device_map,
    check_parts,
    check_placement,
    page_use,
    set_pages,
)
from larder.models.rope_frequencies import check_rope
from larder.models.transformers_logging import loading_progress, silence_transformers
from larder.models.verification import check_tokenizer, reference_logits, verify

SEED = "seed"
AUTO = "auto"
SENTENCE_END = re.compile(r"(?<!e\.g)\. ")
MERGED = "merged"
VERIFICATION_STEPS = 3  # logits of the model, its specification, logits through Larder
ADAPTER_MODES = (MERGED, "live")  # values of `larder.models.lora_adapter.AdapterMode`
# What damaged or hostile files make transformers, torch and tokenizers raise while they load.
LOAD_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    SafetensorError,
    StrictDataclassError,
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """Decoder with its tokenizer and the name that it was loaded by.

    Args:
        processor: processor of a model with a vision tower; None where no images are taken.
        adapters: folders of the adapters that were given beside the name.
    """

    decoder: Decoder
    tokenizer: Any
    name: str
    processor: Any = None
    adapters: tuple[str, ...] = ()

    def __repr__(self) -> str:
        adapters = f", adapters={self.adapters}" if self.adapters else ""
        return f"LoadedModel({self.name!r}, {type(self.decoder.module).__name__}{adapters})"


def load(
    name: str = SEED,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    adapter: str | None = None,
    adapter_mode: str = MERGED,
    *,
    revision: str | None = None,
    device_map: DeviceMap | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    pages: str = "auto",
    stage: ProgressStage = silent_stage,
) -> LoadedModel:
    """Verified model by name.

    Args:
        name: `seed` for the bundled model, the name of a packaged one (`PACKAGED_MODELS`), a
            local folder, a GGUF file, or a Hugging Face name.
        device: torch device, such as `cpu` or `cuda:0`.
        dtype: `float32`, `bfloat16` or `float16`, as a name or a torch dtype; `auto` for that of
            the saved weights. Default on a CPU: `bfloat16` where the weights are saved so and the
            CPU has AMX or AVX512-BF16, else `float32`, and always `float32` for `seed`; elsewhere
            `bfloat16`.
        adapter: folder with an adapter that peft saved, such as LoRA.
        adapter_mode: `merged` into the weights, or `live` beside them.
        revision: commit, branch or tag of a Hugging Face name; None for its main branch.
        device_map: placement of the weights by accelerate, in place of `device`. Each layer's
            entries are on the device that computes it; what does not fit is offloaded to `cpu` or
            `disk`. The default dtype is then that of the saved weights.
        tokenizer: tokenizer of transformers, or the name or folder of one; None for that of the
            model.
        processor: processor of transformers, or the name or folder of one; None for that of the
            model, which is loaded when images are first given.
        pages: `on` to hold caches in pages of one arena, `off` not to, `auto` for pages on CUDA.
        stage: opens each stage that takes long: what is converted, downloaded, loaded, verified.

    Returns:
        Model with its tokenizer and name. Its module has Larder's attention: for other uses, such
        as its own `generate`, call `decoder.release()` first.

    Raises:
        BadParameter: unknown device, dtype, mode or use of pages; arguments that contradict each
            other; a tokenizer with another vocabulary.
        DependencyError: `device_map` without accelerate.
        ModelError: the model or its adapter cannot be loaded, or uses an unsupported feature.

    Examples:
        >>> from larder.models.loader import load
        >>> loaded = load("seed")
        >>> engine = Engine(loaded, policy="kvzip", budget="25%")
    """
    _check_names(name, device, adapter_mode)
    placement, use = _placement(device, device_map), page_use(pages)
    with silence_transformers():
        source = _source(name, stage)
        hub = _hub_options(name, source, revision)
        with loading_progress(stage) as reported:
            module = _load(name, source, device, dtype, {**hub, **placement}, reported)
        module = _with_adapters(module, _adapter_folders(name, adapter, adapter_mode), stage)
        module = _placed(module, device, device_map)
        own = _tokenizer(name, source, hub, tokenizer)
        if tokenizer is not None:
            check_tokenizer(own, module)
        chosen = _processor(source, module.config, hub, processor)
        adapters = () if adapter is None else (adapter,)
        return LoadedModel(wrap_model(module.eval(), use, stage), own, name, chosen, adapters)


def _check_names(name: str, device: str, adapter_mode: str) -> None:
    """Raise BadParameter if one of them is no string, or the mode of adapters is unknown."""
    expected = "a name or a folder as a string (Engine(model, tokenizer) takes a model in memory)"
    check_type("model", name, str, expected)
    check_type("device", device, str, "a string such as cpu or cuda:0")
    if adapter_mode not in ADAPTER_MODES:
        raise BadParameter(
            f"adapter_mode must be {' or '.join(ADAPTER_MODES)}, got {adapter_mode!r}."
        )


def _placed(module: Any, device: str, device_map: DeviceMap | None) -> Any:
    """Model on its device, or as the map has placed its parts; checked."""
    if device_map is None:
        module = move_to_device(module, device)
    else:
        check_parts(module, device_map)
    check_placement(module)
    return module


def _adapter_folders(name: str, adapter: str | None, mode: str) -> list[tuple[str, str]]:
    """Folder and mode of each adapter: that of a packaged model, and the given one."""
    bundled = PACKAGED_MODELS[name].adapter_folder(name) if name in PACKAGED_MODELS else None
    folders = [(str(bundled), MERGED)] if bundled is not None else []
    return folders + ([(adapter, mode)] if adapter is not None else [])


def with_adapters(
    loaded: LoadedModel, folders: Mapping[str, str]
) -> tuple[LoadedModel, dict[str, LoadedModel]]:
    """A model, and the same model under several adapters, each merged into a copy of the weights
    that it changes; all others are shared.

    Args:
        folders: of the adapters, by name.

    Raises:
        ModelError: an adapter cannot be loaded, or is of another model.
    """
    from larder.models.lora_adapter import adapted_copy

    loaded.decoder.release()
    module = loaded.decoder.module
    use = PageUse.OFF if loaded.decoder.spec.arena is None else PageUse.ON
    copies = {name: adapted_copy(module, folder) for name, folder in folders.items()}
    adapted = {
        name: replace(
            loaded, decoder=wrap_model(copy, use), adapters=(*loaded.adapters, folders[name])
        )
        for name, copy in copies.items()
    }
    return replace(loaded, decoder=wrap_model(module, use)), adapted


def _processor(source: str, config: Any, hub: dict[str, str], processor: Any) -> Any:
    """Processor as it is given, by the name that is given, or that of the model."""
    if processor is None and "vision_config" not in config.to_dict():
        return None
    from larder.models.processor import NamedProcessor, processor_of

    if processor is None:
        return processor_of(source, config, hub)
    return NamedProcessor(processor, {}).loaded if isinstance(processor, str) else processor


def _tokenizer(name: str, source: str, hub: dict[str, str], tokenizer: Any) -> Any:
    """Tokenizer as it is given, by the name that is given, or that of the model."""
    from transformers import AutoTokenizer

    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    options = {"trust_remote_code": False, **({} if tokenizer else hub)}
    return _call_transformers(
        tokenizer or name, AutoTokenizer.from_pretrained, tokenizer or source, **options
    )


def _hub_options(name: str, source: str, revision: str | None) -> dict[str, str]:
    """Options of transformers for a revision.

    Raises:
        BadParameter: the model does not come from the hub.
    """
    if revision is None:
        return {}
    check_type("revision", revision, str, "a commit, branch or tag as a string")
    if Path(source).is_dir():
        raise BadParameter(
            f"revision {revision!r} names a version on the Hugging Face hub, but {name!r} is a "
            "local model: leave revision out, or give the name on the hub."
        )
    return {"revision": revision}


def _placement(device: str, device_map: DeviceMap | None) -> dict[str, DeviceMap]:
    """Option of transformers for the placement of weights; empty without a device map.

    Raises:
        BadParameter: a device is given too.
        DependencyError: accelerate is not installed.
    """
    if device_map is None:
        return {}
    if device != "cpu":
        raise BadParameter(
            f"device {device!r} and device_map {device_map!r} both place the weights: give one."
        )
    if find_spec("accelerate") is None:
        raise DependencyError("device_map needs the package accelerate: pip install accelerate.")
    check_device_map(device_map)
    return {"device_map": device_map}


def _with_adapters(module: Any, folders: Sequence[tuple[str, str]], stage: ProgressStage) -> Any:
    """Model under adapters, each a folder and its mode; peft is imported for the first."""
    if not folders:
        return module
    from larder.models.lora_adapter import AdapterMode, apply_adapter

    for folder, mode in folders:
        module = apply_adapter(module, folder, AdapterMode(mode), stage)
    return module


def _source(name: str, stage: ProgressStage) -> str:
    """Folder or Hugging Face name to load from; GGUF files are converted at first use.

    Raises:
        ModelError: a folder lacks files of a model.
    """
    if name == SEED:
        return str(files("larder.models") / "seed")
    if name in PACKAGED_MODELS:
        return str(PACKAGED_MODELS[name].folder(name, stage))
    if name.endswith(GGUF_SUFFIX) and Path(name).is_file():
        from larder.models.gguf import convert_gguf  # reads with numpy: not before it is needed

        return str(convert_gguf(Path(name), stage))
    from larder.models.checkpoint_files import check_folder

    check_folder(name)
    return name


def _load(
    name: str,
    source: str,
    device: str,
    dtype: str | torch.dtype | None,
    placement: Mapping[str, Any],
    reported: Mapping[str, Any],
) -> Any:
    """Model of transformers, on the CPU unless it is placed.

    Args:
        placement: `revision` and `device_map`, where they are given.
        reported: options of `from_pretrained` that report its progress.
    """
    saved = "device_map" in placement and dtype is None
    kind = AUTO if saved or dtype == AUTO else torch_dtype(dtype, device)
    revision = {key: placement[key] for key in ("revision",) if key in placement}
    config = _call_transformers(name, _read_config, source, **revision)
    if dtype is None and name != SEED and _is_fast_in(_saved_dtype(config), device):
        kind = AUTO
    check_rope(config)
    if not Path(source).is_dir():
        from larder.models.checkpoint_files import check_hub_indexes

        check_hub_indexes(source, revision)
    options = {"trust_remote_code": False, **_dtype_option(kind), **placement, **reported}
    module = _call_transformers(name, _auto_class(config).from_pretrained, source, **options)
    _check_dtype(name, module.dtype)
    return module


def _auto_class(config: Any) -> Any:
    """Class of transformers that loads a model: of language, or of language with images."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM  # its error names the configuration


def seed_tokenizer() -> Any:
    """Tokenizer of the bundled model; its weights are not loaded."""
    from transformers import AutoTokenizer

    with silence_transformers():
        return AutoTokenizer.from_pretrained(str(files("larder.models") / "seed"))


def wrap_model(
    module: Any, pages: PageUse = PageUse.AUTO, stage: ProgressStage = silent_stage
) -> Decoder:
    """Verified decoder around a module, which it holds until `release`.

    Args:
        stage: opens the stage of verification, which calls the model a few times.

    Raises:
        ModelError: the model uses an unsupported feature; it is left unchanged.
    """
    check_not_in_use(module)
    check_rope(module.config)
    with stage("Verifying", "steps") as report:
        expected = reference_logits(module.eval())
        report(1, VERIFICATION_STEPS)
        decoder = Decoder(module)
        report(2, VERIFICATION_STEPS)
        try:
            verify(decoder, expected)
        except BaseException:
            decoder.release()
            raise
        report(VERIFICATION_STEPS, VERIFICATION_STEPS)
    set_pages(decoder, pages)
    return decoder


def _call_transformers(name: str, function: Any, *args: Any, **options: Any) -> Any:
    """Call a function of transformers; its failures become a ModelError of one line."""
    try:
        return function(*args, **options)
    except LOAD_FAILURES as error:
        reason = SENTENCE_END.split(" ".join(str(error).split()))[0] or type(error).__name__
        near = [n for n in get_close_matches(name, (SEED, *PACKAGED_MODELS), 1) if n != name]
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ModelError(
            f"The model {name!r} cannot be loaded.{hint} {reason.rstrip('.')}. Give a local "
            "folder, a Hugging Face name that this machine can reach, or leave the model out for "
            "the bundled one."
        ) from error


def _read_config(source: str, **revision: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, trust_remote_code=False, **revision)


def _torch_device(device: str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise BadParameter(
            f"device must be a device that torch knows, such as cpu, cuda, cuda:1 or mps, "
            f"got {device!r}."
        ) from error
    if target.type == "meta":
        raise BadParameter(
            "device must be a device that computes, such as cpu, cuda, cuda:1 or mps, "
            f"got {device!r}, where tensors have shapes but no numbers."
        )
    return target


def torch_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype:
    """Dtype by name, or the default of the device.

    Raises:
        BadParameter: unknown dtype or device.
    """
    target = _torch_device(device)
    if dtype is None:
        return torch.float32 if target.type == "cpu" else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise BadParameter(
            f"dtype must be one of {', '.join(DTYPES)}, or {AUTO} for that of saved weights, got "
            f"{dtype!r}."
        )
    return DTYPES[name]


def _saved_dtype(config: Any) -> torch.dtype | None:
    """Dtype of the saved weights as a configuration names it."""
    saved = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return DTYPES.get(str(saved).removeprefix("torch."))


def _is_fast_in(dtype: torch.dtype | None, device: str) -> bool:
    """Test if a CPU multiplies matrices of bfloat16 in hardware; False for every other case.

    SmolLM2-135M-Instruct with AVX512-BF16: 512 tokens of prefill 2.8 times as fast as in float32, a
    decode step 1.5 times on two threads, 1.0 on one.
    """
    if dtype is not torch.bfloat16 or torch.device(device).type != "cpu":
        return False
    features = getattr(torch.cpu, "get_capabilities", dict)()  # not in older torch
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ModelError if the weights have a dtype that Larder does not compute in."""
    if dtype not in DTYPES.values():
        raise ModelError(
            f"The model {name!r} is saved in {dtype}: give dtype as one of {', '.join(DTYPES)}."
        )


def _dtype_option(dtype: torch.dtype | str) -> dict[str, torch.dtype | str]:
    """Keyword argument of the dtype, which was renamed in transformers 4.56."""
    import transformers
    from packaging.version import Version

    old = Version(transformers.__version__) < Version("4.56")
    return {"torch_dtype" if old else "dtype": dtype}


def move_to_device(module: Any, device: str) -> Any:
    """Module on a device.

    Raises:
        ModelError: the device is not available.
    """
    try:
        return module.to(device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ModelError(
            f"The device {device} cannot be used: {reason}. Leave it out for the CPU."
        ) from error
