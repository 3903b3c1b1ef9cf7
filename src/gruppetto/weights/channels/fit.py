"""Whether a trainer's tensors and an engine's are the same model, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gruppetto.errors import UserError
from gruppetto.weights.channels.base import State
from gruppetto.weights.channels.feed import Plain, Source
from gruppetto.weights.layouts.names import EMBEDDING, HEAD
from gruppetto.weights.layouts.spec import Spec


def misfit(specs: Iterable[Spec], state: State) -> str:
    """What does not fit, in one line; "" where all does. Types may differ: they are cast."""
    have = {spec.name: spec for spec in state.specs}
    sent = set()
    for spec in specs:
        own = have.get(state.aliases.get(spec.name, spec.name))
        if own is None:
            return f"the trainer has {spec.name} {spec.shape}, which the engine's model does not have"
        if own.shape != spec.shape:
            return f"{spec.name} is {spec.shape} in the trainer and {own.shape} in the engine"
        sent.add(own.name)
    missing = [name for name in have if name not in sent]
    if missing == [HEAD] and EMBEDDING in sent:
        return f"{HEAD} is a tensor of its own in the engine, but the trainer's head is its {EMBEDDING}: untied head"
    if missing:
        return f"the engine has {len(missing)} tensors that the trainer does not send, the first is {missing[0]}"
    return ""


def wanted_specs(source: Source, state: State) -> list[Spec]:
    """What is sent: each of the engine's tensors once, under its own name, in the engine's type.

    Raises `UserError` where the trainer has two different values for what is one tensor in the engine.
    """
    types = {spec.name: spec.dtype for spec in state.specs}
    specs = {spec.name: spec for spec in source.specs()}
    for second, first in state.aliases.items():
        if second in specs and first in specs:
            if isinstance(source, Plain) and not torch.equal(source.tensor(second), source.tensor(first)):
                raise UserError(
                    f"{second} and {first} are one tensor in the engine, but hold different values in the trainer: "
                    "untied head; tie them, or serve a model folder with tie_word_embeddings = false"
                )
            del specs[second]
    return [Spec(spec.name, spec.shape, types[state.aliases.get(spec.name, spec.name)]) for spec in specs.values()]
