"""Forecast beside measured on whole runs: a real one with a profile measured here, and simulated ones, whose prices are
exact."""

import json
import math
from statistics import median

import pytest

from gruppetto.cli.main import main
from gruppetto.config.loader import load
from gruppetto.ledger.machines.gpus import gpu_of
from gruppetto.ledger.machines.profile import profile_efficiency
from gruppetto.sim.simulate import simulate

SIM = """
[run]
steps = 5
[rollout]
prompts_per_step = 32
group_size = 8
max_tokens = 2048
timeout_s = 100000.0
[engine]
count = 4
slots = 48
context = 4096
[sim]
workload = "lengths"
decode_base_s = 0.0034
decode_weights_s = 0.0127
decode_kv_s = 5e-8
decode_row_s = 1e-4
prefill_token_s = 8e-5
train_token_s = 4e-5
train_step_s = 1.5
publish_s = 2.0
switch_s = 4.0
score_s = 0.5
[sim.lengths]
mean_tokens = 400
cv = 1.0
icc = 0.3
prompt_tokens = 100
"""


def against(capsys, *arguments):
    capsys.readouterr()
    assert main(["plan", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["against"]


def holds_together(data):
    """What is so for every run."""
    stages = data["stages"]
    assert all(pair["forecast_s"] >= 0 and pair["measured_s"] >= 0 for pair in stages.values())
    for kind in ("forecast_s", "measured_s"):
        inside = sum(stages[name][kind] for name in ("decode", "prefill", "score", "waiting"))
        assert inside == pytest.approx(stages["generate"][kind], rel=1e-6)
        for name in stages:
            assert stages[name][kind] == pytest.approx(sum(step["stages"][name][kind] for step in data["steps"]))
    assert sum(loss["share"] for loss in data["losses"]) == pytest.approx(1.0, abs=1e-9)
    if data["mfu"] is not None:
        assert data["losses"][0]["name"] == "useful FLOP"
        assert data["losses"][0]["share"] == data["mfu"]


# -- simulated ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """simulated(*overrides) -> run folder."""
    folder = tmp_path_factory.mktemp("simulated")
    path = folder / "sim.toml"
    path.write_text(SIM)

    def go(name, *overrides):
        return simulate(load([path], [f"run.dir={folder}", f'run.name="{name}"', *overrides]))

    return go


APART = ('run.placement="disaggregated"', "sim.switch_s=0")
RUNS = {
    "sync": ('scheduler.type="sync"',),
    "partial": ('scheduler.type="partial"',),
    "layered": ('scheduler.type="layered"',),
    "tail_batch": ('scheduler.type="tail_batch"',),
    "on_policy_apart": ('scheduler.type="layered"', *APART),
    "async": ('scheduler.type="layered"', "scheduler.max_staleness=1", *APART),
    "one_engine": ('scheduler.type="sync"', "engine.count=1", "engine.slots=128"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_simulated_run_is_what_its_prices_say(capsys, simulated, name):
    data = against(capsys, "--against", simulated(name, *RUNS[name]))
    holds_together(data)
    assert data["simulated"]
    assert data["cores"] is None
    stages = data["stages"]
    for stage in ("generate", "decode", "prefill", "train", "publish", "step"):
        assert stages[stage]["ratio"] == pytest.approx(1.0, abs=0.1), stage
    if not stages["switch"]["measured_s"]:
        assert stages["switch"]["forecast_s"] == 0
    else:
        assert stages["switch"]["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert data["decode_factors"]["price"] == pytest.approx(1.0, abs=0.03)
    assert data["mfu"] is None


def test_rollouts_that_keep_their_version_run_over_publishes(capsys, simulated):
    """Which of their tokens a step made is not in the record: they are divided evenly over their steps."""
    data = against(capsys, "--against", simulated("windowed", 'scheduler.type="windowed"', *APART))
    holds_together(data)
    assert data["stages"]["publish"] == {"forecast_s": 0.0, "measured_s": 0.0, "ratio": None}
    assert data["stages"]["step"]["ratio"] == pytest.approx(1.0, abs=0.25)
    assert data["decode_factors"]["price"] == pytest.approx(1.0, abs=0.03)


def test_tools_are_waited_for_and_not_decoded(capsys, simulated):
    turns = ("turn_tokens=100", "observation_tokens=50", "tool_median_s=3.0", "tool_sigma=0.8")
    data = against(capsys, "--against", simulated("tools", *RUNS["layered"], *(f"sim.lengths.{one}" for one in turns)))
    holds_together(data)
    for stage in ("generate", "decode", "waiting", "train", "step"):
        assert data["stages"][stage]["ratio"] == pytest.approx(1.0, abs=0.15), stage


def test_a_run_that_was_killed_is_read_to_its_last_whole_line(capsys, simulated):
    folder = simulated("killed", *RUNS["sync"])
    whole = against(capsys, "--against", folder)
    last = sorted((folder / "rollouts").iterdir())[-1]
    last.write_text(last.read_text() + '{"rollout": "g1')
    assert against(capsys, "--against", folder) == whole
    last.write_text(last.read_text() + "\n")
    assert main(["plan", "--against", str(folder)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_wrong_price_is_named(capsys, simulated):
    """The record says 2.5 times the decode price that its config admits to."""
    folder = simulated("dear", *RUNS["sync"])
    path = folder / "config.resolved.json"
    config = json.loads(path.read_text())
    for price in ("decode_base_s", "decode_weights_s", "decode_kv_s", "decode_row_s"):
        config["sim"][price] /= 2.5
    path.write_text(json.dumps(config))
    data = against(capsys, "--against", folder)
    assert data["decode_factors"] == {
        "steps": pytest.approx(1.0, abs=0.05),
        "price": pytest.approx(2.5, abs=0.05),
    }
    assert data["stages"]["train"]["ratio"] == pytest.approx(1.0, abs=0.01)
    assert data["off"][0].startswith("decode: measured 2.")
    assert "2.5 x by the price of one" in data["off"][0]


def test_a_model_gives_a_simulated_run_its_mfu(capsys, simulated):
    folder = simulated("mfu", *RUNS["sync"])
    one = against(capsys, "Qwen3-8B", "--against", folder)
    two = against(capsys, "Qwen3-8B", "--against", folder, "--serve", "tp2")
    holds_together(one)
    assert 0 < one["mfu"] < 1
    assert two["mfu"] == pytest.approx(one["mfu"] / 2)


def test_without_recorded_rollouts_the_expectation_stands_for_them(capsys, simulated):
    data = against(capsys, "--against", simulated("unwritten", *RUNS["sync"], "log.rollouts=false", "run.steps=8"))
    holds_together(data)
    assert any("wrote no rollouts" in line for line in data["assumed"])
    assert data["stages"]["decode"]["ratio"] == pytest.approx(1.0, abs=0.15)


# -- real --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile(small_model, tmp_path_factory):
    """A profile of this machine on the runs' own model, as `gruppetto doctor --profile` writes it."""
    path = tmp_path_factory.mktemp("profile") / "profile.toml"
    assert main(["doctor", "--profile", "--model", str(small_model), "--out", str(path)]) == 0
    return path


def test_a_profile_is_a_gpu_and_an_efficiency_set(profile):
    gpu, efficiency = gpu_of(str(profile)), profile_efficiency(str(profile))
    assert 1e8 < gpu.peak("fp32") < 1e14
    assert 1e8 < gpu.bandwidth < 1e13
    assert efficiency.name == "measured"
    assert efficiency.origin.startswith("measured by gruppetto doctor on ")
    for name in ("step_s", "decode_bandwidth", "prefill", "forward", "train", "micro_batch_s", "sync_s", "gather"):
        assert efficiency.source(name) == efficiency.origin
    assert efficiency.source("residual_bytes") != efficiency.origin


@pytest.mark.parametrize(
    "settings",
    [
        ('scheduler.type="sync"',),
        ('scheduler.type="partial"', "run.deterministic=true"),
        ('scheduler.type="layered"', "scheduler.max_staleness=1", 'run.placement="disaggregated"'),
    ],
    ids=["sync", "partial", "async"],
)
def test_a_real_run_beside_its_forecast(capsys, train, profile, settings):
    code, folder = train(*settings, "run.steps=5")
    assert code == 0
    data = against(capsys, "--against", folder, "--gpu", profile)
    holds_together(data)
    assert not data["simulated"]
    assert [step["step"] for step in data["steps"]] == [1, 2, 3, 4, 5]
    assert 0 < data["mfu"] < 1
    assert data["rows"]["measured"] > 0
    assert data["train_mfu"]["measured"] > 0
    assert data["cores"] > 0
    for stage in ("decode", "train"):
        ratio = median(step["stages"][stage]["ratio"] for step in data["steps"])  # one step may have been stalled
        assert 0.02 < ratio < 50, stage  # a busy machine is measured as it is


def test_a_measured_profile_is_nearer_than_another_machine(capsys, train, tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("near") / "profile.toml"
    assert main(["doctor", "--profile", "--model", str(tiny_model), "--out", str(path)]) == 0
    sizes = ("rollout.prompts_per_step=6", "rollout.group_size=8", "rollout.max_tokens=64", "run.steps=3")
    _, folder = train('scheduler.type="sync"', f"model.path={tiny_model}", *sizes)
    near = against(capsys, "--against", folder, "--gpu", path)
    far = against(capsys, "--against", folder, "--gpu", "H100")
    for stage in ("train", "step"):
        assert _distance(near, stage) < _distance(far, stage), stage
    assert near["mfu"] > 10 * far["mfu"]  # of the processor's peak, and of a GPU's


def _distance(data, stage):
    return abs(math.log(data["stages"][stage]["ratio"]))


def test_the_table_says_the_same(capsys, train, profile):
    _, folder = train('scheduler.type="sync"')
    capsys.readouterr()
    assert main(["plan", "--against", str(folder), "--gpu", str(profile)]) == 0
    out = capsys.readouterr().out
    for part in (
        "stage",
        "decode",
        "train",
        "MFU of the whole step",
        "useful FLOP",
        "100.00%",
        "measured by gruppetto",
    ):
        assert part in out


def test_no_slot_of_the_embedded_engine_is_said_to_want_kv(capsys, train):
    """It has a context's KV for each slot: what explain calls queue is queue here."""
    _, folder = train('scheduler.type="sync"', "run.steps=2")
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["engine_s/kv_full"] += 0.25 * row["engine_s/total"]
        row["engine_s/total"] *= 1.25
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert main(["plan", "--against", str(folder), "--gpu", "H100"]) == 0
    out = capsys.readouterr().out
    assert "kv_full" not in out
    assert "queue" in out


def test_an_evaluation_is_no_part_of_the_step_that_is_compared(capsys, simulated):
    folder = simulated("evaluated", 'scheduler.type="sync"')
    before = against(capsys, "--against", folder)
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["engine_s/eval"] = row["engine_s/total"]
        row["engine_s/total"] *= 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = against(capsys, "--against", folder)
    holds_together(after)
    assert after["stages"] == before["stages"]
    (share,) = [loss["share"] for loss in after["losses"] if loss["name"] == "eval"]
    assert share == pytest.approx(0.5)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_busy_machine_is_told(capsys, train, share):
    _, folder = train('scheduler.type="sync"', "run.steps=3")
    path, spent = folder / "metrics.jsonl", 5.0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        spent += share * row["engine_s/total"]
        row["perf/cpu_s_total"] = spent
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert main(["plan", "--against", str(folder), "--gpu", "H100"]) == 0
    assert ("machine: the process had 0.3 CPU seconds a second" in capsys.readouterr().out) == (share < 0.8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: config["rollout"].update(group_size=0), "is not of this version"),
        (lambda config: config["model"].update(path="/nowhere/model"), "model.path of the run"),
        (lambda config: config["model"].update(path=""), "names no model"),
    ],
)
def test_a_run_that_cannot_be_read_is_one_line(capsys, train, change, says):
    _, folder = train('scheduler.type="sync"', "run.steps=1")
    path = folder / "config.resolved.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["plan", "--against", str(folder), "--gpu", "H100"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert says in err[0]


def test_a_run_on_a_cpu_is_not_held_against_an_h100(capsys, train):
    _, folder = train('scheduler.type="sync"', "run.steps=1")
    capsys.readouterr()
    assert main(["plan", "--against", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "it ran on a CPU" in said
    assert "--gpu profile.toml" in said
    environment, config = folder / "env.json", folder / "config.resolved.json"
    config.write_text(config.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    for gpus, code, says in (
        (["NVIDIA H100 80GB HBM3"], 0, "the forecast is for H100"),
        (["NVIDIA Quadro P400"], 2, "no data sheet here"),
    ):
        environment.write_text(json.dumps(json.loads(environment.read_text()) | {"gpus": gpus}))
        assert main(["plan", "--against", str(folder)]) == code
        found = capsys.readouterr()
        assert says in found.out + found.err
