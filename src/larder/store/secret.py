"""The 32 bytes by which a store seals its records and hides its tenants."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from larder.core.errors import StoreError

SECRET_FILE = "secret"
SECRET_BYTES = 32


def store_secret(home: Path) -> bytes:
    """The secret of a home folder, made when first asked for; nobody else may read its file.

    Raises:
        StoreError: the file is no secret.
    """
    path = home / SECRET_FILE
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        temporary = home / f".{SECRET_FILE}-{os.getpid()}-{secrets.token_hex(4)}"
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # whoever comes second takes what the first has made
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    found = path.read_bytes()
    if len(found) != SECRET_BYTES:
        raise StoreError(
            f"{path} has {len(found)} bytes instead of {SECRET_BYTES}: put the right file back, "
            "or take "
            "another LARDER_HOME; without it what was saved cannot be read."
        )
    return found
