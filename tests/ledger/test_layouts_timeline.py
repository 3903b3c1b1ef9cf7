"""Memory by owner over a step: what each phase holds, and that it sums."""

from __future__ import annotations

import pytest
from ledger.test_layouts_models import dense, dense_32b

from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.memory import Memory, TrainWork, train_memory
from gruppetto.ledger.layouts.serving import ServeMemory, ServeOverheads, serve_memory
from gruppetto.ledger.layouts.timeline import Phase, Sleep, timeline

WORK = TrainWork(tokens_per_micro_batch=8192, longest=8192)
GB80 = 80e9


def sides(fraction: float = 0.8) -> tuple[Memory, ServeMemory]:
    """32B on 8 GPUs: trained with tp 8, served with tp 4."""
    train = train_memory(dense_32b(), TrainLayout(tp=8), WORK, GB80)
    return train, serve_memory(dense_32b(), ServeLayout(tp=4), GB80, over=ServeOverheads(fraction=fraction))


def phases(sleep: Sleep = Sleep()) -> dict[str, Phase]:  # noqa: B008
    return {phase.name: phase for phase in timeline("colocated", *sides(), GB80, sleep)}


def test_32b_colocated_on_8_gpus_fits_in_every_phase() -> None:
    found = phases()
    assert list(found) == ["generate", "hand over", "train", "sync"]
    assert all(phase.fits for phase in found.values())
    assert all(phase.used + phase.free == pytest.approx(GB80) for phase in found.values())


def test_an_engine_that_sleeps_has_no_weights_and_no_kv_and_the_trainer_leaves_only_its_residue() -> None:
    found = phases()
    assert {"engine kv", "engine weights"} <= set(found["generate"].parts)
    assert "trainer optimizer" not in found["generate"].parts
    assert not {"engine kv", "engine weights"} & set(found["train"].parts)
    assert {"engine weights", "trainer weights"} <= set(found["sync"].parts)
    assert "engine kv" not in found["sync"].parts


def test_what_is_not_on_the_gpu_is_in_host_memory() -> None:
    train, serve = sides()
    found = phases()
    assert found["generate"].host.value == train.parts["weights"].value + train.parts["optimizer"].value
    assert found["train"].host.value == 0
    assert found["sync"].host.value == train.parts["optimizer"].value
    assert phases(Sleep(level=1))["train"].host.value == serve.parts["weights"].value


def test_groups_that_are_destroyed_and_graphs_that_are_released_make_room() -> None:
    kept, freed = phases(), phases(Sleep(groups_stay=False, graphs_stay=False))
    assert kept["generate"].used - freed["generate"].used == pytest.approx(2e9)
    assert kept["train"].used - freed["train"].used == pytest.approx(1e9)


def test_trainer_state_that_stays_may_not_fit_beside_the_engine() -> None:
    found = phases(Sleep(trainer_stays=("weights", "optimizer")))
    assert not found["generate"].fits
    assert found["generate"].host.value == 0


def test_apart_each_side_has_its_own_phases_and_nothing_of_the_other() -> None:
    train = train_memory(dense(), TrainLayout(dp=8), WORK, GB80)
    serve = serve_memory(dense(), ServeLayout(), GB80)
    found = timeline("disaggregated", train, serve, GB80)
    assert [(phase.side, phase.name) for phase in found] == [
        ("trainer", "train"), ("trainer", "wait"), ("trainer", "sync"), ("engine", "generate"), ("engine", "sync"),
    ]  # fmt: skip
    for phase in found:
        other = "engine" if phase.side == "trainer" else "trainer"
        assert not any(owner.startswith(other) for owner in phase.parts)
    assert found[0].used == train.total
    assert found[3].used == serve.total


def test_offloaded_optimizer_state_is_in_host_memory_in_every_phase() -> None:
    train, serve = sides()
    away = train_memory(dense_32b(), TrainLayout(tp=8, offload=True), WORK, GB80)
    for phase in timeline("colocated", away, serve, GB80):
        assert phase.host.value >= away.host.value
        assert "trainer optimizer" not in phase.parts
    assert away.host.value == train.parts["optimizer"].value
    assert away._replace(host=train.host).total == away.total
