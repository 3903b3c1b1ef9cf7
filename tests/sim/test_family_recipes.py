"""The families' recipes: their engine prices follow from the hardware, and the study's bounds come out."""

from statistics import mean

import pytest

from gruppetto.config.loader import load
from gruppetto.ledger.machines.gpus import GPUS
from gruppetto.record.bounds import Piece, bounds
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.rates import ModelRates
from gruppetto.sim.simulate import engine_model
from gruppetto.sim.workload.families import FAMILIES

HARDWARE = {
    "32B": {"params": 32e9, "kv_bytes_per_token": 64 * 8 * 128 * 4, "tp": 2, "overhead_s": 0.0034},
    "32B agentic": {
        "params": 32e9,
        "kv_bytes_per_token": 64 * 8 * 128 * 4,
        "tp": 2,
        "overhead_s": 0.0034,
        "memory_fraction": 0.66,
    },
    "7B": {"params": 7.6e9, "kv_bytes_per_token": 28 * 4 * 128 * 4, "tp": 1, "overhead_s": 0.002},
    "72B": {
        "params": 72.7e9,
        "kv_bytes_per_token": 80 * 8 * 128 * 4,
        "tp": 8,
        "overhead_s": 0.008,
        "memory_fraction": 0.54,
    },
}
"""Arguments of EngineModel.of_hardware on H800. The overhead (and the memory of families C and E) is fitted to the
bound and rho."""

BOUNDS = {
    "A": ("32B", 552, 41),
    "B": ("7B", 136, 0.49),
    "C": ("72B", 1310, 0.49),
    "D": ("32B", 491.5, 15.5),
    "E": ("32B agentic", 893, 2.0),
    "R": ("32B", 557, 9),
}
"""Family: model, the study's bound in seconds (section 10), its rho."""


@pytest.mark.parametrize("name", BOUNDS)
def test_prices_follow_from_the_hardware(name):
    config = load([f"sim/family-{name.lower()}"]).config
    derived = EngineModel.of_hardware(gpu=GPUS["H800"], slots=config.engine.slots, **HARDWARE[BOUNDS[name][0]])
    written = engine_model(config)
    for price in ("base_s", "weights_s", "kv_token_s", "compute_row_s", "row_s", "prefill_token_s", "kv_capacity"):
        assert getattr(written, price) == pytest.approx(getattr(derived, price), rel=1e-3), price


@pytest.mark.parametrize("name", BOUNDS)
def test_the_studys_bound_comes_out(name):
    config = load([f"sim/family-{name.lower()}"]).config
    family, (_, bound_s, rho) = FAMILIES[name], BOUNDS[name]
    rollout, workload = config.rollout, family.workload
    sizes = (rollout.prompts_per_step, rollout.group_size, config.engine.count, config.sim.workload)
    assert sizes == (family.prompts_per_step, family.group_size, family.engines, name)
    rates = ModelRates(engine_model(config), config.engine.count)
    found = []
    for step in range(40 if family.prompts_per_step == 128 else 10):
        groups = range(step * rollout.prompts_per_step, (step + 1) * rollout.prompts_per_step)
        pieces = [_piece(workload, g, m) for g in groups for m in range(rollout.group_size)]
        found.append(bounds(pieces, rates, sum(workload.prompt(0, g, g) for g in groups)))
    assert mean(b.bound_s for b in found) == pytest.approx(bound_s, rel=0.05)
    assert mean(b.critical_s for b in found) / mean(b.area_s for b in found) == pytest.approx(rho, rel=0.05)


def _piece(workload, group, member):
    turns = workload.turns(0, group, member, group)
    tool_s = sum(turn.tool_s for turn in turns[:-1])
    tokens, others = sum(t.model_tokens for t in turns), sum(t.observation_tokens for t in turns[:-1])
    return Piece("", workload.prompt(0, group, group), tokens, tool_s, others)
