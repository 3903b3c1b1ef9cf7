"""The supervised phase, the optimizer's groups and its schedule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainer.sample_maker import VOCABULARY  # noqa: E402

from gruppetto.config.schema import TrainSection  # noqa: E402
from gruppetto.errors import RunError, UserError  # noqa: E402
from gruppetto.trainer.embedded.model import load_model  # noqa: E402
from gruppetto.trainer.embedded.optimizer import learning_rate, make_optimizer  # noqa: E402
from gruppetto.trainer.embedded.supervised import fit  # noqa: E402

CPU = torch.device("cpu")


def counting_up():
    """Prompt of two tokens, then each token is the one before plus 1: learnable from one token of context."""
    rng = np.random.default_rng(0)
    while True:
        start, length = int(rng.integers(0, VOCABULARY)), int(rng.integers(4, 14))
        ids = [(start + i) % VOCABULARY for i in range(length)]
        yield ids, [0, 0] + [1] * (length - 2)


def test_it_learns(model_folder):
    losses = fit(load_model(model_folder, CPU), counting_up(), steps=60, batch_size=8, lr=5e-3, micro_tokens=64)
    assert len(losses) == 60
    assert losses[0] > 3.0
    assert np.mean(losses[-5:]) < 0.5


def test_the_first_loss_is_the_mean_cross_entropy_over_marked_tokens(model_folder):
    model = load_model(model_folder, CPU)
    examples = list(itertools.islice(counting_up(), 6))
    terms = []
    with torch.no_grad():
        for ids, mask in examples:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False, segment_lengths=(len(ids),)).logits[0]
            own = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
            terms.append(own[torch.tensor(mask[1:], dtype=torch.bool)])
    expected = torch.cat(terms).mean().item()
    assert fit(model, examples, steps=1, batch_size=6) == [pytest.approx(expected, rel=1e-5)]


def test_micro_tokens_change_nothing_and_same_settings_are_bitwise_equal(model_folder):
    found = []
    for micro_tokens in (8, 8, 4096):
        model = load_model(model_folder, CPU).double()
        fit(model, counting_up(), steps=3, batch_size=6, micro_tokens=micro_tokens)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "0 of 1 examples"),
        ([([1, 2], [0])], "2 tokens but 1 mask"),
        ([([1, 2], [0, 0])], "mark at least one"),
        ([([1, 2], [1, 1])], "not the first"),
    ],
)
def test_bad_examples_get_one_line(model_folder, examples, message):
    with pytest.raises(UserError, match=message):
        fit(load_model(model_folder, CPU), examples, steps=1, batch_size=1)


def test_a_loss_that_is_not_finite_stops_before_the_weights(model_folder):
    model = load_model(model_folder, CPU)
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    with pytest.raises(RunError, match="not finite"):
        fit(model, counting_up(), steps=1, batch_size=2)
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2]),
    ],
)
def test_schedule(schedule, expected):
    train = TrainSection(lr=1.0, warmup_steps=2, schedule=schedule)
    assert [learning_rate(version, train, 6) for version in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedule_past_its_end_stays_in_range(schedule):
    train = TrainSection(lr=1.0, warmup_steps=4, schedule=schedule)
    assert all(0.0 <= learning_rate(version, train, 4) <= 1.0 for version in range(20))


def test_weight_decay_is_on_matrices_only(model_folder):
    model = load_model(model_folder, CPU)
    optimizer = make_optimizer(model, TrainSection(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {(p.ndim, decay[id(p)]) for p in model.parameters()} == {(1, 0.0), (2, 0.1)}
