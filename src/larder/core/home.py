"""Larder's data folder, and the principal of local use."""

from __future__ import annotations

import os
from pathlib import Path

HOME = "LARDER_HOME"
LOCAL_PRINCIPAL = "local"  # principal of a user at the machine itself


def home() -> Path:
    """Folder for calibrations and sessions: `$LARDER_HOME`, else `~/.cache/larder`."""
    folder = os.environ.get(HOME, "")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "larder"
