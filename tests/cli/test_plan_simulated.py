"""`gruppetto plan --simulate`: how far the simulated steps spread stands beside their mean, as text and as data."""

import json
import re
from statistics import fmean, stdev

import pytest

from gruppetto.cli.main import main
from gruppetto.cli.plan_simulated import STEPS
from gruppetto.ledger.plan.plan import Simulated

TINY = ["plan", "Qwen3-8B", "--gpus", "4", "--prompts", "4", "--mean-tokens", "500", "--max-tokens", "2k"]


def test_the_spread_of_the_steps_stands_beside_their_mean(capsys, tmp_path):
    file = tmp_path / "plan.json"
    assert main([*TINY, "--compare", "colocated", "--simulate", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    one = json.loads(file.read_text())["placements"]["colocated"]
    steps = one["simulated_steps_s"]
    assert len(steps) == STEPS
    assert one["simulated_s"] == pytest.approx(fmean(steps))
    assert one["simulated_error_s"] == pytest.approx(stdev(steps) / STEPS**0.5)
    row = next(line for line in reversed(out.splitlines()) if line.startswith("colocated"))
    over, error = (float(part) / 100 for part in re.search(r"([+-][\d.]+)% \+- ([\d.]+)%", row).groups())
    assert over == pytest.approx(fmean(steps) / one["step_s"] - 1, abs=6e-4)
    assert error == pytest.approx(one["simulated_error_s"] / one["step_s"], abs=6e-4)
    assert error > 0
    assert f"the mean of {STEPS} steps" in out


def test_one_step_has_no_spread():
    assert Simulated((3.0,)).error_s is None
    assert Simulated((3.0, 3.0)).error_s == 0
