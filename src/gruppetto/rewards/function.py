"""A user's function as verifier.

Promises: it gets what its parameters name out of (prompt, response, answer, extra); anything but a finite number or a
bool from it is an error, never a reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gruppetto.errors import UserError
from gruppetto.imports import load_function

GIVEN = ("prompt", "response", "answer", "extra")

Verifier = Callable[[str, str, Any, Mapping[str, Any]], Any]


def function_verifier(spec: str) -> Verifier:
    """Loads `module:function` or `file.py:function`; raises `UserError` when it cannot be called with `GIVEN`."""
    function = load_function(spec, "reward.path")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward.path = {spec!r} is an async function; write a plain one, it runs in its own process")
    names = _named(function, spec)

    def verify(prompt: str, response: str, answer: Any, extra: Mapping[str, Any]) -> Any:
        given = {"prompt": prompt, "response": response, "answer": answer, "extra": extra}
        return function(**{name: given[name] for name in names})

    return verify


def _named(function: Callable[..., Any], spec: str) -> tuple[str, ...]:
    """Which of `GIVEN` the function takes by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.path = {spec!r} has no signature that Python can read; wrap it in a def") from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return GIVEN
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if needed and (parameter.name not in GIVEN or parameter.kind is parameter.POSITIONAL_ONLY):
            raise UserError(
                f"reward.path = {spec!r} needs a parameter {parameter.name!r}, which is not given; "
                f"name any of {', '.join(GIVEN)}"
            )
    return tuple(parameter.name for parameter in parameters if parameter.name in GIVEN)
