"""The workload of a recipe or a run.toml, for `gruppetto plan --workload sim/family-a`.

Owns what a plan takes from a config: the rollouts that `simulate` would draw from it, cut at its rollout.max_tokens,
and nothing else. Names are those that `simulate` takes. Promise: a config that names no workload is refused, so that
no default stands for one.
"""

from __future__ import annotations

from dataclasses import replace

from gruppetto.cli.plan_arguments import Given, given_of, recorded
from gruppetto.config.loader import DEFAULT, load, recipes
from gruppetto.errors import UserError
from gruppetto.ledger.lengths import LognormalLengths


def is_recipe(name: str) -> bool:
    """Whether `simulate` would take the name for that of a config: a .toml file, or a recipe of the package."""
    if name.endswith(".toml"):
        return "\0" not in name
    return any(name == recipe or ("/" not in name and recipe.endswith(f"/{name}")) for recipe in recipes())


def recipe_workload(name: str) -> Given:
    """Lengths and turns of its rollouts. Raises `UserError` where it has none, or cannot be read."""
    from gruppetto.sim.simulate import GENERATED, workload_of
    from gruppetto.sim.workload import Workload

    try:
        loaded = load([name])
        if loaded.origins["sim.workload"] == DEFAULT:
            raise UserError(
                "it has no workload, which [sim] workload names; write --workload sim/family-a or reasoning"
            )
        named, most = loaded.config.sim.workload, loaded.config.rollout.max_tokens
        demand = workload_of(loaded.config)
        if not isinstance(demand, Workload):
            return recorded(named, most)
    except UserError as error:
        why = "; ".join(str(error).splitlines()).removeprefix(f"{name}: ")
        raise UserError(f"--workload {name}: {why}") from None
    given = given_of(demand, "" if named == GENERATED else named)
    lengths = given.lengths
    if isinstance(lengths, LognormalLengths) and lengths.cap > most:
        given = given._replace(lengths=replace(lengths, cap=most))
    return given
