"""Goldens of interfaces beside commands: HTTP, metrics, errors, names, environment."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import larder
from golden.access import serving
from golden.clients import get, post
from golden.comparison import MASK, masked

ROOT = Path(__file__).resolve().parents[2]
FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
SERIES = re.compile(r"^([a-z_:]+)(?:\{([^}]*)\})? ", re.MULTILINE)
LABEL = re.compile(r'([a-z_]+)="')
MEMBERS = (FunctionType, property, classmethod, staticmethod)
VARIABLE = re.compile(r"""["'$](LARDER_[A-Z_]+)""")


def http() -> dict[str, Any]:
    """`/openapi.json` without descriptions, and `/metrics` after one answer."""
    with TemporaryDirectory() as home, serving(Path(home)) as url:
        schema = json.loads(get(f"{url}/openapi.json"))
        asked = {"model": "seed", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
        post(f"{url}/v1/chat/completions", asked)
        own, others = get(f"{url}/metrics"), get(f"{url}/metrics?names=vllm")
    return {
        "openapi": masked(schema, ("description",)),
        "metrics": _metrics(own),
        "metrics_as_vllm": _metrics(others),
    }


def errors() -> dict[str, Any]:
    """Tree of errors: exit code and parent by name."""
    return {
        kind.__name__: {"exit_code": kind.exit_code, "parent": kind.__base__.__name__}
        for kind in _below(larder.LarderError)
        if kind.__module__ == larder.LarderError.__module__
    }


def api() -> dict[str, Any]:
    """Names that `import larder` offers, with their public members and parameters."""
    return {
        name: _parameters(value) if inspect.isfunction(value) else _member(value)
        for name in sorted(larder.__all__)
        for value in [getattr(larder, name)]
    }


def environment() -> list[str]:
    """Environment variables in the sources."""
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")]
    return sorted({name for text in sources for name in VARIABLE.findall(text)})


def distribution_names() -> dict[str, Any]:
    """Contents of the installed distribution: commands, extras, and groups of entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "name": project["name"],
        "scripts": sorted(project["scripts"]),
        "extras": sorted(project["optional-dependencies"]),
        "groups": sorted(project.get("entry-points", {})),
    }


def _metrics(text: str) -> dict[str, Any]:
    """Families by type, and the labels of every series."""
    series = {
        name: sorted(set(LABEL.findall(labels)))
        for name, labels in sorted(set(SERIES.findall(text)))
    }
    return {"families": dict(sorted(FAMILY.findall(text))), "series": series}


def _below(kind: type) -> list[Any]:
    return [kind, *(each for child in kind.__subclasses__() for each in _below(child))]


def _member(value: Any) -> Any:
    members = {
        name: "property" if isinstance(inner, property) else _parameters(getattr(value, name))
        for base in reversed(value.__mro__)
        if base.__module__.startswith("larder")
        for name, inner in vars(base).items()
        if not name.startswith("_") and isinstance(inner, MEMBERS)
    }
    return {"class": _parameters(value), "members": dict(sorted(members.items()))}


def _parameters(value: Any) -> list[str]:
    if isinstance(value, type) and issubclass(value, Exception):
        return []
    return [
        f"{each.kind.description} {each.name}{_default(each.default)}"
        for each in inspect.signature(value).parameters.values()
        if each.name != "self"
    ]


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    value = value.value if isinstance(value, Enum) else value
    return f" = {MASK if callable(value) else value!r}"


GOLDENS = {
    "http": http,
    "errors": errors,
    "api": api,
    "environment": environment,
    "distribution": distribution_names,
}
