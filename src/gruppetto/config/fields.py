"""The schema as a flat list of fields: what each key takes, its default and what it means.

Owns the one reading of the schema that messages, `gruppetto config` and the reference are made from. Promise: every
key that `Config` accepts is here once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from gruppetto.config.schema import Config
from gruppetto.config.toml import value_text

Node = Mapping[str, Any]
_NOUNS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a table",
}
_PLURALS = {"integer": "whole numbers", "number": "numbers", "string": "texts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One setting, by its dotted key."""

    key: str
    node: Node
    default: Any
    doc: str
    nullable: bool

    @property
    def type(self) -> str:
        """integer, number, string, boolean, object or array."""
        return str(self.node.get("type", "object"))

    @property
    def choices(self) -> list[str]:
        """The values of a closed list; empty where any value of the type will do."""
        return [self.node["const"]] if "const" in self.node else list(self.node.get("enum", ()))

    @property
    def expects(self) -> str:
        """What the key takes, in words: `a whole number, at least 1`."""
        if self.choices:
            words = _either([value_text(choice) for choice in self.choices])
        elif self.type == "array":
            words = _list_words(self.node)
        else:
            words = ", ".join([_NOUNS[self.type], *_limits(self.node)])
        return words + (' or "none"' if self.nullable else "")

    def nearest(self, value: Any) -> Any:
        """A value that the key takes, as near to `value` as can be told; the default where nothing can."""
        if self.choices:
            close = get_close_matches(str(value), self.choices, 1, cutoff=0.6)
            return close[0] if close else self.default
        if self.type in ("integer", "number"):
            return self._nearest_number(value)
        if self.type == "string":
            return value if isinstance(value, str) else value_text(value)
        if self.type == "boolean":
            return {"1": True, "yes": True, "on": True, "true": True}.get(str(value).lower(), False)
        if self.type == "array" and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return self._nearest_list(value)
        return self.default

    def _nearest_number(self, value: Any) -> Any:
        try:
            number = int(float(value)) if self.type == "integer" else float(value)
        except (TypeError, ValueError, OverflowError):
            return self.default
        if isinstance(value, bool) or number != number or abs(number) == float("inf"):
            return self.default
        low, high = self.node.get("minimum"), self.node.get("maximum")
        above = self.node.get("exclusiveMinimum")
        if above is not None and number <= above:
            return self.default if self.default is not None else above + 1
        number = low if low is not None and number < low else number
        return high if high is not None and number > high else number

    def _nearest_list(self, value: Any) -> Any:
        if "prefixItems" in self.node:
            return self.default
        choices = self.node["items"].get("enum") or [self.node["items"].get("const")]
        if choices != [None]:
            return choices[:1]
        wants_text = self.node["items"].get("type") == "string"
        return [value] if isinstance(value, str) == wants_text else self.default


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _limits(node: Node) -> list[str]:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return [f"{word} {node[name]:,}".removesuffix(".0") for name, word in words.items() if name in node]


def _list_words(node: Node) -> str:
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])} {_PLURALS[node['prefixItems'][0]['type']]}"
    items = node["items"]
    choices = [items["const"]] if "const" in items else items.get("enum")
    return "a list of " + (_either([value_text(c) for c in choices]) if choices else _PLURALS[items["type"]])


@cache
def fields() -> tuple[Field, ...]:
    """All settings, in the order of the schema."""
    root = Config.model_json_schema()
    return tuple(_walk(root, "", root["$defs"]))


def _walk(node: Node, prefix: str, defs: Node) -> Iterator[Field]:
    for name, prop in node["properties"].items():
        key = prefix + name
        if "$ref" in prop:
            yield from _walk(_resolve(prop["$ref"], defs), f"{key}.", defs)
        else:
            yield _field(prop, key)


def _field(prop: Node, key: str) -> Field:
    kinds = [kind for kind in prop.get("anyOf", [prop]) if kind.get("type") != "null"]
    return Field(
        key=key,
        node=kinds[0],
        default=prop.get("default"),
        doc=str(prop.get("description", "")),
        nullable=len(kinds) < len(prop.get("anyOf", [prop])),
    )


def _resolve(ref: str, defs: Node) -> Node:
    node: Node = defs[ref.rpartition("/")[2]]
    return node


@cache
def by_key() -> dict[str, Field]:
    """Every key with its field."""
    return {field.key: field for field in fields()}


def find(key: str) -> Field | None:
    """The field that `key` names; for `engine.args.x` that of `engine.args`."""
    while key:
        field = by_key().get(key)
        if field is not None:
            return field
        key = key.rpartition(".")[0]
        if key in by_key() and by_key()[key].type != "object":
            return None
    return None
