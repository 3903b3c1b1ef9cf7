"""`gruppetto plan --workload` of a recipe or a run.toml: the rollouts that `simulate` draws from it, or one line."""

import tomllib

import pytest
from cli.planned import answer, planned

from gruppetto.config.loader import load
from gruppetto.sim.simulate import workload_of

PLAN = ["plan", "Qwen3-8B", "--gpus", "16", "--prompts", "16", "--compare", "colocated"]
ROOM = "[rollout]\nmax_tokens = 4096\n[engine]\ncontext = 8192\n"
DRAWN = """[sim]
workload = "lengths"
[sim.lengths]
mean_tokens = 900.0
cv = 0.8
turn_tokens = 100
tool_median_s = 2.0
"""


@pytest.mark.parametrize("name", ["sim/family-a", "family-a", "recipes/sim/family-a.toml", "reasoning-32k"])
def test_a_recipe_is_planned_with_the_workload_that_it_names(capsys, monkeypatch, request, name):
    monkeypatch.chdir(request.config.rootpath)
    found, family = answer(capsys, *PLAN, "--workload", name), answer(capsys, *PLAN, "--workload", "A")
    assert found["workload"] == family["workload"]
    assert found["placements"]["colocated"]["step_s"] == family["placements"]["colocated"]["step_s"]


def test_lengths_of_its_own_are_planned_and_written_as_simulate_draws_them(capsys, tmp_path):
    file, written = tmp_path / "own.toml", tmp_path / "run.toml"
    file.write_text(ROOM + DRAWN)
    found = answer(capsys, *PLAN, "--workload", str(file), "--write", str(written))["workload"]
    ours, theirs = workload_of(load([file]).config), workload_of(load([written]).config)
    assert found["mean_tokens"] == pytest.approx(900, rel=0.01)
    assert found["cap"] == ours.cap == theirs.cap == 4096
    assert found["turns"] > 8
    assert (theirs.mean, theirs.sigma) == pytest.approx((ours.mean, ours.sigma), rel=0.01)
    assert (theirs.turn_tokens, theirs.tool_median_s) == (ours.turn_tokens, ours.tool_median_s)


def test_rollouts_end_where_the_recipe_ends_them(capsys, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("group,length\n0,100\n0,9000\n1,200\n1,300\n")
    for named in ("A", str(rows)):
        file, written = tmp_path / "short.toml", tmp_path / "run.toml"
        file.write_text(f'{ROOM}[sim]\nworkload = "{named}"\n')
        found = answer(capsys, *PLAN, "--workload", str(file), "--write", str(written))["workload"]
        assert found["cap"] == 4096
        assert found["mean_tokens"] < answer(capsys, *PLAN, "--workload", named)["workload"]["mean_tokens"]
        assert tomllib.loads(written.read_text())["sim"]["workload"] == named
        assert tomllib.loads(written.read_text())["rollout"]["max_tokens"] == 4096


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("demo", "--workload demo: it has no workload, which [sim] workload names; write --workload sim/family-a"),
        ("no.toml", "--workload no.toml: no such config file"),
        ("bad.toml", "--workload bad.toml: "),
        ("nix.toml", '--workload nix.toml: sim.workload = "nix" is no family'),
        ("sim/familya", "--workload 'sim/familya': no kind"),
        ("a\0.toml", "--workload 'a\\x00.toml': no kind"),
    ],
)
def test_what_has_no_workload_gets_one_line(capsys, monkeypatch, tmp_path, name, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[sim]\nworkloat = 3\n[rollout]\nmax_tokens = -1\n")
    (tmp_path / "nix.toml").write_text('[sim]\nworkload = "nix"\n')
    code, out, err = planned(capsys, *PLAN, "--workload", name)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1


def test_a_slip_in_a_name_is_told_the_nearest(capsys):
    assert "write --workload sim/family-b, a run.toml or" in planned(capsys, *PLAN, "--workload", "sim/familyb")[2]


def test_sizes_beside_a_recipe_are_refused(capsys):
    assert (
        "--cv with --workload sim/family-a, which has lengths of its own"
        in (planned(capsys, *PLAN, "--workload", "sim/family-a", "--cv", "2")[2])
    )
