"""Versions of stored forms, and the steps that carry content of earlier ones over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from larder.core.errors import Refused

UPGRADE_COMMAND = "larder cache upgrade"


@dataclass(frozen=True)
class StoredForm:
    """Stored form of one kind of content, in the version that this Larder writes.

    Args:
        name: begins a sentence, such as "The record of a session".
        key: name of the field that has the version.
        version: of what is written now.
        steps: by version, a function from content of that version to content of the next one.
    """

    name: str
    key: str
    version: int
    steps: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)

    def can_upgrade(self, version: object) -> bool:
        """True if content of an earlier version can be carried over."""
        if type(version) is not int or version >= self.version:
            return False
        return all(each in self.steps for each in range(version, self.version))

    def upgraded(self, content: Any, version: object) -> Any:
        """Content of an earlier version in the present one.

        Raises:
            Refused: there are no steps from that version.
        """
        if type(version) is not int or not self.can_upgrade(version):
            raise self.refusal(version)
        for each in range(version, self.version):
            content = self.steps[each](content)
        return content

    def refusal(self, version: object) -> Refused:
        """Error for content of another version, with the way out."""
        wrong = f"is of {self.key} {str(version)[:20]}, this larder reads {self.version}"
        return Refused(f"{self.name} {wrong}: {self.way_out(version)}", "format")

    def way_out(self, version: object) -> str:
        """End of a message about content of another version."""
        if self.can_upgrade(version):
            return f"'{UPGRADE_COMMAND}' carries it over."
        return "it is left as it is; use the version of larder that wrote it."
