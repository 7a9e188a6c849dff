"""Learned weights that come with the package, from those that `larder train` made.

    larder train kvzap --model smollm2 --dtype float32 --corpus FOLDER --held-out SOURCE
    python -m training.package_weights kvzap --model smollm2

The fingerprint of a model may depend on its dtype; the card gets those of all dtypes. Weights are
stored in bfloat16, and the metrics of the card are those before rounding.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from larder.models.learned_weights import PACKAGED, SUFFIX, learned_file, read_learned
from larder.models.loader import load

FOLDER = Path(__file__).parent.parent / "src" / "larder" / "models" / PACKAGED
DTYPES = ("float32", "bfloat16", "float16")


def package(method: str, model: str, dtype: str, folder: Path = FOLDER) -> Path:
    """Write the packaged file of a method for a model.

    Args:
        dtype: that the weights were trained in.
    """
    prints = {name: load(model, dtype=name).decoder.spec.fingerprint for name in DTYPES}
    found = read_learned(learned_file(prints[dtype], method))
    path = folder / f"{method}.{model}{SUFFIX}"
    card = replace(found.card, fingerprints=tuple(sorted({*prints.values()})))
    replace(found, card=card).save(path, torch.bfloat16)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    args = parser.parse_args()
    print(package(args.method, args.model, args.dtype))


if __name__ == "__main__":
    main()
