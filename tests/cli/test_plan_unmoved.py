"""Options of `gruppetto plan` that change nothing: each is said to, with why; what does change something is not."""

import pytest
from cli.planned import answer, planned

SMALL = ["plan", "Qwen3-8B", "--gpus", "16", "--prompts", "64", "--mean-tokens", "2k", "--max-tokens", "8k"]
AGENT = ["plan", "Qwen3-8B", "--gpus", "16", "--prompts", "64", "--workload", "agent"]


def steps(found):
    return {name: one["step_s"] for name, one in found["placements"].items()}


@pytest.mark.parametrize(
    ("words", "given", "why"),
    [
        (SMALL, ["--micro-tokens", "4k"], "holds the longest rollout whole, prompt and observations with it, which is"),
        (SMALL, ["--micro-tokens", "64k"], "memory of the trainer alone"),
        (SMALL, ["--slots", "1000"], "a replica has at most"),
        ([*SMALL, "--compare", "colocated"], ["--max-staleness", "3"], "no batches overlap in colocated"),
        ([*SMALL, "--compare", "async"], ["--sleep", "level1"], "hands memory over"),
        (SMALL, ["--sleep", "release"], "what level2 does"),
        (SMALL, ["--serve-dtype", "stored"], "those of the usual type"),
        ([*SMALL, "--cv", "0"], ["--icc", "0.9"], "all lengths are alike"),
        ([*SMALL, "--group-size", "1"], ["--icc", "0.9"], "a group of one has no siblings"),
        (SMALL, ["--efficiency", "train_experts=0.3"], "nothing in this plan is priced by it"),
        ([*AGENT, "--tool-seconds", "0"], ["--tool-sigma", "0.5"], "a tool call takes no time"),
    ],
)
def test_what_changes_nothing_is_said_with_why(capsys, words, given, why):
    found = answer(capsys, *words, *given)
    (said,) = found["without_effect"]
    assert said.startswith(given[0])
    assert why in said
    assert steps(found) == pytest.approx(steps(answer(capsys, *words)), rel=1e-5)
    shown = " ".join(planned(capsys, *words, *given)[1].split())
    assert f"Without effect: {said}" in shown


def test_the_page_says_it_too(capsys, tmp_path):
    file = tmp_path / "plan.html"
    assert planned(capsys, *SMALL, "--sleep", "release", "--sweep", "cv=1,2", "--html", str(file))[0] == 0
    assert "Without effect: --sleep release changes nothing here" in file.read_text()


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (SMALL, ["--slots", "8"]),
        (SMALL, ["--slots", "256"]),
        (SMALL, ["--micro-tokens", "32k"]),
        (SMALL, ["--cv", "1.0"]),
        (SMALL, ["--icc", "0.9"]),
        (SMALL, ["--kv-dtype", "fp8"]),
        (SMALL, ["--sleep", "level1"]),
        (SMALL, ["--sync", "reshard"]),
        (SMALL, ["--max-staleness", "3"]),
        (SMALL, ["--efficiency", "engine=0.5"]),
        (SMALL, ["--efficiency", "engine=1"]),
        (SMALL, ["--sandbox-seconds", "3"]),
        (AGENT, ["--sandbox-cores", "2"]),
        (AGENT, ["--tool-sigma", "1.7"]),
        ([*SMALL, "--train", "tp1 pp4", "--compare", "colocated"], ["--micro-tokens", "64k"]),
    ],
)
def test_what_changes_something_or_is_as_usual_is_not_named(capsys, words, given):
    assert answer(capsys, *words, *given)["without_effect"] == []


def test_points_of_a_sweep_are_kept_apart(capsys):
    (said,) = answer(capsys, *SMALL, "--micro-tokens", "8k", "--sweep", "mean_tokens=1k,2k")["without_effect"]
    assert said.endswith("; at the points of --sweep it may.")


@pytest.mark.parametrize(
    ("only", "given", "named"),
    [
        ("kv", ["--slots", "20", "--serve-dtype", "fp8", "--kv-dtype", "fp8"], "--serve-dtype fp8, --slots 20"),
        ("kv", ["--mean-tokens", "4k", "--prompts", "3"], ""),
        ("switch", ["--split", "8:8", "--sleep", "level1"], "--split 8:8"),
        ("sync", ["--sleep", "release", "--critic"], "--sleep release, --critic"),
        ("sync", ["--serve", "tp1", "--density", "0.02", "--sync", "reshard"], ""),
        ("switch", ["--reference"], "--reference"),
    ],
)
def test_one_account_names_what_it_does_not_read(capsys, only, given, named):
    found = answer(capsys, *SMALL[:4], "--only", only, *given)
    assert found["without_effect"] == ([f"--only {only} is the same without {named}."] if named else [])
    assert (f"is the same without {named}." in planned(capsys, *SMALL[:4], "--only", only, *given)[1]) == bool(named)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*SMALL, "--sandbox-cores", "4"], "--sandbox-cores: nothing is executed; write --sandbox-seconds 10"),
        ([*SMALL, "--only", "kv", "--step", "5m"], "--step with --only kv: no part of a step is told"),
        (
            [*SMALL[:2], "--against", "runs/x", "--prompts", "9"],
            "--prompts with --against runs/x, which is of a run as",
        ),
        ([*SMALL[:2], "--against", "runs/x", "--html", "p.html"], "--html with --against runs/x, which is of a run as"),
        ([*SMALL[:2], "--against", "runs/x", "--json", "/no/x"], "--json /no/x cannot be written: no folder /no"),
    ],
)
def test_what_nothing_reads_is_refused(capsys, words, says):
    code, out, err = planned(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1
