"""Reading a config.json with care: what is there, under which of its names, and whether it can be true.

Owns the lookups in one config. Promises: a value that is no size, or an absurd one, is one `UserError` line with the
key and the value; a key that is left out takes the default of the model_type's config class, where that is known; a key
that is null is null, as in the classes, which derive it from others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gruppetto.errors import UserError

MOST = 1 << 32
"""No single size of a model is above this; a larger one is a broken file."""

_SIZES = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "num_experts")
"""Defaults worth a word: a published config mostly states them."""


class Keys:
    """One config as the counting rules ask it. `name` is what messages call it."""

    __slots__ = ("config", "defaults", "name", "taken")

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.defaults = defaults
        self.name = name
        self.taken: dict[str, Any] = {}
        """Sizes that the config left out and the class's default gave."""

    def raw(self, *names: str) -> Any:
        """The value under the first of the names that is set, else the class's default, else None."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if any(name in self.config for name in names):
            return None
        for name in names:
            if (value := self.defaults.get(name)) is not None:
                if name in _SIZES:
                    self.taken[name] = value
                return value
        return None

    def has(self, *names: str) -> bool:
        """Whether one of the names has a value."""
        return self.raw(*names) is not None

    def whole(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """A size. Raises `UserError` where it is missing without default, no whole number, below `least` or absurd."""
        value = self.raw(*names)
        if value is None:
            if default is None:
                raise UserError(
                    f"{self.name}: no {names[0]}, without which the model cannot be counted; "
                    "give a whole Hugging Face config.json of a language model"
                )
            return default
        return self.checked(names[0], value, least)

    def checked(self, key: str, value: Any, least: int = 1) -> int:
        """`value` as a size. Raises `UserError`."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise UserError(
                f"{self.name}: {key} = {_short(value)} is no size; write a whole number of {least} or more, "
                "as in the published config.json"
            )
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        """A yes or no; 0 and 1 are taken. Raises `UserError` for anything else."""
        value = self.raw(*names)
        if value is None:
            return default
        if value not in (0, 1):
            raise UserError(f"{self.name}: {names[0]} = {_short(value)} is neither true nor false; write one of them")
        return bool(value)

    def several(self, *names: str) -> list[Any] | None:
        """A list, None where there is none. Raises `UserError` for anything else."""
        value = self.raw(*names)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(f"{self.name}: {names[0]} = {_short(value)} is no list; write one entry a layer")
        return list(value)

    def section(self, *names: str) -> Mapping[str, Any] | None:
        """A nested table, None where there is none. Raises `UserError` for anything else."""
        value = self.raw(*names)
        if value is None or isinstance(value, Mapping):
            return value
        raise UserError(f"{self.name}: {names[0]} = {_short(value)} is no table; write {{...}} as in the original")

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with one entry a layer (entries beyond `layers` are those of MTP layers). Raises `UserError`."""
        value = self.several(key)
        if value is not None and len(value) < layers:
            raise UserError(
                f"{self.name}: {key} has {len(value)} entries for num_hidden_layers = {layers}; write one a layer"
            )
        return None if value is None else value[:layers]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
