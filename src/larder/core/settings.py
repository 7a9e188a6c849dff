"""Where Larder keeps what it learns: environment variables, read when asked for."""

from __future__ import annotations

import os
from pathlib import Path

HOME = "LARDER_HOME"
LOCAL_PRINCIPAL = "local"  # the principal of who works at the machine itself


def home() -> Path:
    """The folder for measurements and sessions: `$LARDER_HOME`, else `~/.cache/larder`."""
    named = os.environ.get(HOME, "")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "larder"
