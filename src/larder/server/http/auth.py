"""Authentication: API keys, their principals, and loopback access without keys."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from larder.core.errors import InputError
from larder.server.request import ApiError

LOCAL = "local"  # principal of loopback clients without keys
OPERATOR = "operator"  # marks a key that may read numbers of all tenants
# Sec-Fetch-Site of requests from another origin.
CROSS_SITE = frozenset({"cross-site", "same-site"})
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-+\--~]{16,512}")  # printable ASCII without a comma


@dataclass(frozen=True)
class Principal:
    """Authenticated client.

    Args:
        name: tenant name; the store derives the tenant from it with its own secret.
        is_operator: may read numbers of all tenants together.
    """

    name: str
    is_operator: bool


class Authenticator(ABC):
    """Interface that admits or rejects requests."""

    @abstractmethod
    def admit(self, headers: Mapping[str, str], client: str | None) -> Principal:
        """Principal of a request.

        Args:
            headers: by lower-case name.
            client: address of the peer; None if unknown.

        Raises:
            ApiError: 401 `invalid_api_key`, or 403 `forbidden`.
        """


class ApiKeyAuth(Authenticator):
    """Bearer authentication by API key. Keys are stored as digests under a secret of this process.

    Args:
        keys: principal by key.
    """

    def __init__(self, keys: Mapping[str, Principal]) -> None:
        self._secret = secrets.token_bytes(32)
        self._principals = {self._digest(key): principal for key, principal in keys.items()}

    def admit(self, headers: Mapping[str, str], client: str | None) -> Principal:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # Anthropic's clients
        principal = self._principals.get(self._digest(key.strip()))
        if principal is None:
            raise ApiError(
                "No valid API key: send 'Authorization: Bearer KEY', or 'x-api-key: KEY', with a "
                "key of this server.",
                401,
                "invalid_api_key",
            )
        return principal

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), "sha256")


class LoopbackAuth(Authenticator):
    """Access without keys for clients on this machine; in a browser only for the server's own page.

    A page of any other origin is rejected, another port of this machine included: browsers send
    its origin, or mark the request as cross-site.
    """

    def admit(self, headers: Mapping[str, str], client: str | None) -> Principal:
        host = headers.get("host", "localhost")
        if (client is not None and not is_loopback(client)) or not is_loopback(_host(f"//{host}")):
            raise ApiError(
                "Without API keys only this machine is served, under the name localhost: start "
                "the server with --keys FILE, or connect from this machine.",
                403,
                "forbidden",
            )
        origin = f"http://{host}".lower()
        if (
            headers.get("origin", origin) != origin
            or headers.get("sec-fetch-site", "none") in CROSS_SITE
        ):
            raise ApiError(
                "Without API keys only the page of this server has access from a browser: start "
                f"the server with --keys FILE, or open {origin}.",
                403,
                "forbidden",
            )
        return Principal(LOCAL, is_operator=True)


def is_loopback(host: str | None) -> bool:
    """True for `localhost` and for loopback addresses."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def parse_keys(text: str, source: str) -> dict[str, Principal]:
    """Principals by key, from lines (or comma-separated parts) of `NAME KEY [operator]`.

    Args:
        source: source of the text, for error messages.

    Raises:
        InputError: a line is malformed or a key is duplicate; the message contains no key.
    """
    keys: dict[str, Principal] = {}
    lines = text.replace(",", "\n").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        _check(words, f"{source}, line {number}")
        if words[1] in keys:
            raise InputError(f"{source}, line {number}: this key is a duplicate: make another.")
        keys[words[1]] = Principal(words[0], is_operator=words[2:] == [OPERATOR])
    if not keys:
        raise InputError(f"{source} holds no key: write lines of 'NAME KEY', or leave it out.")
    return keys


def load_keys(path: Path) -> dict[str, Principal]:
    """Principals by key from a file.

    Raises:
        InputError: the file cannot be read, or as `parse_keys`.
    """
    try:
        return parse_keys(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(
            f"{path} cannot be read as a file of keys ({reason}): name a file with lines of "
            f"'NAME KEY' or 'NAME KEY {OPERATOR}'."
        ) from error


def _check(words: list[str], source: str) -> None:
    if len(words) < 2 or words[2:] not in ([], [OPERATOR]):
        raise InputError(
            f"{source}: not 'NAME KEY' or 'NAME KEY {OPERATOR}': write the tenant's name, a space, "
            "and its key."
        )
    if NAME.fullmatch(words[0]) is None:
        raise InputError(
            f"{source}: a name is 1 to 64 letters, digits, dots, dashes and underscores."
        )
    if KEY.fullmatch(words[1]) is None:
        raise InputError(f"{source}: a key is 16 to 512 printable ASCII characters, no comma.")


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None
