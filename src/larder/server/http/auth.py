"""Who may ask: API keys and the principals behind them."""

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

LOCAL = "local"  # the principal of who works at the machine itself
OPERATOR = "operator"  # the word behind a key that may read what concerns all tenants
CROSS_SITE = frozenset(
    {"cross-site", "same-site"}
)  # what browsers say of another origin's requests
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-+\--~]{16,512}")  # printable ASCII without a comma


@dataclass(frozen=True)
class Principal:
    """Who asks.

    Args:
        name: whose sessions are meant: the store derives the tenant from it by its own secret.
        is_operator: may read numbers of all tenants together.
    """

    name: str
    is_operator: bool


class Authenticator(ABC):
    """Who is let in."""

    @abstractmethod
    def admit(self, headers: Mapping[str, str], client: str | None) -> Principal:
        """Whose request this is.

        Args:
            headers: by lower-case name.
            client: the address that it comes from; None where there is none, as in a test.

        Raises:
            Refusal: 401 `invalid_api_key`, or 403 `forbidden`.
        """


class ApiKeyAuth(Authenticator):
    """Only who has a key. Keys themselves are not held: a digest under a secret of this process is.

    Args:
        keys: each with its principal.
    """

    def __init__(self, keys: Mapping[str, Principal]) -> None:
        self._secret = secrets.token_bytes(32)
        self._known = {self._digest(key): principal for key, principal in keys.items()}

    def admit(self, headers: Mapping[str, str], client: str | None) -> Principal:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        known = self._known.get(self._digest(key.strip())) if scheme.lower() == "bearer" else None
        if known is None:
            raise ApiError(
                "No valid API key: send 'Authorization: Bearer KEY' with a key of this server.",
                401,
                "invalid_api_key",
            )
        return known

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), "sha256")


class LoopbackAuth(Authenticator):
    """Without keys: whoever is at this machine, and in its browser this server's own page alone.

    A page of any other origin is another site's, also where it comes from another port of this
    machine: browsers tell its origin, or that it is of another one.
    """

    def admit(self, headers: Mapping[str, str], client: str | None) -> Principal:
        host = headers.get("host", "localhost")
        if (client is not None and not is_loopback(client)) or not is_loopback(_host(f"//{host}")):
            raise ApiError(
                "Without API keys only this machine is served, under the name localhost: start "
                "the server with --keys FILE, or ask from the machine itself.",
                403,
                "forbidden",
            )
        own = f"http://{host}".lower()
        if headers.get("origin", own) != own or headers.get("sec-fetch-site", "none") in CROSS_SITE:
            raise ApiError(
                "Without API keys only the page of this server may ask from a browser: start the "
                f"server with --keys FILE, or open {own}.",
                403,
                "forbidden",
            )
        return Principal(LOCAL, is_operator=True)


def is_loopback(host: str | None) -> bool:
    """Whether a name or an address is this machine's own loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def parse_keys(text: str, where: str) -> dict[str, Principal]:
    """Keys and whose they are, from lines (or parts between commas) of `NAME KEY [operator]`.

    Args:
        where: what the text is, for errors.

    Raises:
        InputError: a line is none, or a key stands there twice; no key is repeated in the message.
    """
    found: dict[str, Principal] = {}
    lines = text.replace(",", "\n").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        _check(words, f"{where}, line {number}")
        if words[1] in found:
            raise InputError(f"{where}, line {number}: this key stood there before: make another.")
        found[words[1]] = Principal(words[0], is_operator=words[2:] == [OPERATOR])
    if not found:
        raise InputError(f"{where} holds no key: write lines of 'NAME KEY', or leave it out.")
    return found


def load_keys(path: Path) -> dict[str, Principal]:
    """The keys of a file.

    Raises:
        InputError: it cannot be read, or see `parse_keys`.
    """
    try:
        return parse_keys(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a file of keys ({error}).") from error


def _check(words: list[str], where: str) -> None:
    if len(words) < 2 or words[2:] not in ([], [OPERATOR]):
        raise InputError(f"{where}: not 'NAME KEY' or 'NAME KEY {OPERATOR}'.")
    if NAME.fullmatch(words[0]) is None:
        raise InputError(
            f"{where}: a name is 1 to 64 letters, digits, dots, dashes and underscores."
        )
    if KEY.fullmatch(words[1]) is None:
        raise InputError(f"{where}: a key is 16 to 512 printable ASCII characters, no comma.")


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None
