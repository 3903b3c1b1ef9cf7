"""What a run's scheduling policy allows and does, as the composition that ran it says.

Promises: no preset is known here: who explains a run composes its [scheduler] table as the run did (`InForce`). Where
nobody does, or the table is none of today's, nothing is claimed of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

_STALENESS = "max_staleness = "


class InForce(Protocol):
    """A [scheduler] table as it ran."""

    @property
    def bound(self) -> int | None:
        """Largest staleness of a trained token; None = nothing bounds it."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Its choices, those of the preset among them."""
        ...


Compose = Callable[[Mapping[str, Any]], InForce | None]
"""A run's [scheduler] table -> what ran; None where that cannot be told."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is known of a run's policy; `bound` as in `InForce`, where it is `known` at all."""

    known: bool = False
    bound: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any], compose: Compose | None) -> Policy:
        """That of a run by its resolved config."""
        found = compose(config["scheduler"]) if compose is not None and "scheduler" in config else None
        return cls() if found is None else cls(True, found.bound, found.settings)

    def named(self, preset: str | None) -> Policy:
        """The same where a run's preset has another name than its table says."""
        return replace(self, settings={**self.settings, "type": preset}) if self.known else self

    @property
    def on_policy(self) -> bool:
        """It is known to allow no staleness at all."""
        return self.known and self.bound == 0

    @property
    def allows_staleness(self) -> bool:
        """It is known to allow some."""
        return self.known and self.bound != 0

    def beyond(self, lines: Sequence[str]) -> str | None:
        """In words, where the lines ask for more staleness than the run allows, or than can be told."""
        asked = next((int(line.removeprefix(_STALENESS)) for line in lines if line.startswith(_STALENESS)), 0)
        if not asked or (self.known and (self.bound is None or asked <= self.bound)):
            return None
        if not self.known:
            return f"it asks for {_STALENESS}{asked}; what the run allows cannot be told from its record"
        return f"it asks for {_STALENESS}{asked}, more than the {self.bound} that the run allows"

    def has(self, lines: Sequence[str], config: Mapping[str, Any]) -> bool:
        """Whether the run was like this already."""
        for table, wanted in tomllib.loads("\n".join(lines)).items():
            present = self.settings if table == "scheduler" else config.get(table, {})
            if any(present.get(key) != value for key, value in wanted.items()):
                return False
        return bool(lines)


UNKNOWN = Policy()
