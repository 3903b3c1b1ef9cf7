"""`gruppetto plan` as a user meets it: answers, files, refusals; what `--write` writes is the run that was forecast."""

import gc
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli.planned import planned

from gruppetto.cli.plan_numbers import NUMBERS
from gruppetto.cli.stepping import steps_shown
from gruppetto.config.loader import load
from gruppetto.errors import UserError
from gruppetto.ledger.models.figures import FIGURES
from gruppetto.ledger.plan.advice import MOST
from gruppetto.ledger.plan.plan import Simulated

ROOT = Path(__file__).parents[2]
SMALL = ["plan", "Qwen3-8B", "--gpus", "16", "--prompts", "64", "--mean-tokens", "2k", "--max-tokens", "8k"]


def test_the_answer_stands_on_the_terminal(capsys):
    code, out, _ = planned(capsys, *SMALL)
    assert code == 0
    assert "8,190,735,360 parameters" in out
    assert "KV 147,456 bytes a token" in out
    assert "64 prompts x 8 = 512 rollouts" in out
    for word in (
        "generate",
        "old_logprobs",
        "train",
        "sync",
        "colocated",
        "disaggregated",
        "async",
        "Take ",
        "Assumed:",
    ):
        assert word in out


def test_why_has_the_arithmetic_and_the_sources(capsys):
    _, out, _ = planned(capsys, *SMALL, "--why")
    assert "TensorRT-LLM docs" in out
    assert "8,190,735,360 parameters" in out
    assert "useful FLOP" in out
    assert "waves of KV" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "Qwen3-80B"], "did you mean"),
        (["plan", "no/such/config.json"], "config.json"),
        ([*SMALL, "--gpu", "h10"], "H100"),
        ([*SMALL, "--gpus", "0"], "write --gpus 1 or more"),
        ([*SMALL, "--split", "16:0"], "nothing trains on 0 GPUs"),
        ([*SMALL, "--split", "16"], "write rollout:trainer"),
        (
            ["plan", "Qwen3-8B", "--mean-tokens", "8k", "--max-tokens", "4k"],
            "--max-tokens 4,096 is below the mean of 8,192",
        ),
        ([*SMALL, "--mean-tokens", "many"], "--mean-tokens"),
        ([*SMALL, "--compare", "colocated,asink"], "write async"),
        ([*SMALL, "--workload", "reasonig"], "write --workload reasoning"),
        ([*SMALL, "--serve", "tp0"], "no part of a layout"),
        ([*SMALL, "--train", "tp3"], "--train tp3"),
        ([*SMALL, "--efficiency", "trtlm"], "did you mean trtllm"),
        ([*SMALL, "--efficiency", "engine=fast"], "write engine=0.5"),
        ([*SMALL, "--sweep", "width=1..4"], "write one of cv"),
        ([*SMALL, "--efficiency", "engine=1e-300"], "write engine=0.5"),
        ([*SMALL, "--efficiency", "graphs=nan"], "graphs = nan"),
        ([*SMALL, "--efficiency", "=1"], "write one of all_reduce_s"),
        ([*SMALL, "--cv", "-1"], "cv"),
        ([*SMALL, "--turns", "0"], "--turns 1 or more"),
        ([*SMALL, "--serve-dtype", "fp7"], "fp7"),
        ([*SMALL, "--workload", "A"], "which has lengths of its own"),
        (["plan", "Llama-3.1-405B", "--gpus", "8"], "write --serve-dtype fp8 --gpus 32"),
        ([*SMALL, "--placement", "elastic", "--write", "x.toml"], "not among the placements"),
        ([*SMALL, "--write", "/no/such/folder/run.toml"], "cannot be written"),
        ([*SMALL, "--max-staleness", "0", "--compare", "async"], "write --max-staleness 1"),
        ([*SMALL, "--gpus", "9" * 5000], "--gpus"),
        ([*SMALL, "--prompts", "1.5"], "not a whole number; write one from 1 to"),
        ([*SMALL, "--prompts", "10000000"], "are followed one by one; write --prompts"),
        ([*SMALL, "--mean-tokens", "1e308k"], "too large for a number"),
        ([*SMALL, "--turns", "nan"], "--turns 'nan': not a number"),
        ([*SMALL, "--turns", "4000"], "less than a token a turn; write --turns 2048 or less"),
        ([*SMALL, "--tool-seconds", "30"], "calls no tool; write --turns 20"),
        ([*SMALL, "--depth", "9"], "write a depth from 1 to 2"),
        ([*SMALL, "--depth", "1.5", "--compare", "colocated"], "--depth 1.5 is of async"),
        ([*SMALL, "--split", "8:8", "--compare", "colocated"], "which has no sides"),
        ([*SMALL, "--density", "inf"], "--density"),
        ([*SMALL, "--wall", "1h"], "nothing is executed; write --sandbox-seconds 10"),
        ([*SMALL, "--images", "3"], "write --image-size"),
        ([*SMALL, "--placement", "async"], "write --write run.toml"),
        ([*SMALL, "--step", "5m"], "--step without --only"),
        ([*SMALL, "--only", "kv", "--html", "plan.html"], "--html with --only kv"),
        ([*SMALL, "--json", "x.json", "--html", "x.json"], "both write x.json"),
        ([*SMALL, "--json", "-", "--request", "-"], "both write -"),
        ([*SMALL, "--html", "-"], "no name of a file"),
        ([*SMALL, "--json", "a\0b"], "no name of a file"),
        ([*SMALL, "--json", "/"], "it is a folder"),
        ([*SMALL, "--write", "x.toml", "--group-size", "1"], "write --group-size 2"),
        ([*SMALL, "--write", "x.toml", "--compare", "elastic"], "write --compare async,elastic"),
        ([*SMALL, "--serve", "tp2 tp4"], "tp stands there twice"),
        ([*SMALL, "--train", "tp2 dp4"], "leave dp4 out"),
        ([*SMALL, "--sweep", "cv=1..inf"], "no spread from 0 to 20"),
        ([*SMALL, "--sweep", "cv=nan"], "no spread"),
        ([*SMALL, "--sweep", "gpus=1.." + "9" * 30], "is planned; write gpus=1..8"),
        ([*SMALL, "--sweep", "gpus=" + ",".join(map(str, range(1, 40)))], "write at most 32"),
        ([*SMALL, "--sweep", "model=Qwen3-8B,Qwen3-80B"], "did you mean"),
        ([*SMALL, "--sweep", "mean_tokens=8m"], "at 8,388,608: "),
        ([*SMALL, "--workload", "a\0b"], "no kind"),
        (["plan", "Qwen3-8B", "--max-tokens", "1"], "--mean-tokens 1 under --max-tokens 1"),
        (
            ["plan", "Qwen3-8B", "--mean-tokens", "8k", "--max-tokens", "8k"],
            "write --mean-tokens 6,442 or less, --max-tokens 10,417, or a smaller --cv",
        ),
        ([*SMALL, "--serve-dtype", "x"], "--serve-dtype 'x': no type of weights"),
        ([*SMALL, "--depth", "9"], "--depth 9 with --max-staleness 1: "),
        ([*SMALL, "--sweep", "gpus=0"], "from 1 to 1,000,000 is planned"),
        ([*SMALL, "--sweep", "gpus=2000000"], "from 1 to 1,000,000 is planned"),
        *(
            ([*SMALL, f"--{name}", ""], f"--{name} '': nothing is named; leave it out, or write --{name} ")
            for name in (
                "gpu",
                "judge",
                "serve",
                "train",
                "compare",
                "serve-dtype",
                "kv-dtype",
                "placement",
                "against",
            )
        ),
    ],
)
def test_impossible_asks_get_one_line_with_what_works(capsys, words, says):
    code, _, err = planned(capsys, *words)
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, err
    assert says in lines[0]
    assert "not foreseen" not in err


def test_an_axis_of_a_sweep_ends_where_its_option_does():
    assert {name: NUMBERS[name].most for name in MOST} == MOST


@pytest.mark.parametrize("words", [["--group-size", "1"], ["--mean-tokens", "1", "--max-tokens", "1", "--cv", "0"]])
def test_what_cannot_be_simulated_is_refused_before_anything_is_shown(capsys, monkeypatch, words):
    def refused(files, settings=()):
        raise UserError(f"rollout.x = 1: not in this test; write rollout.x = 2 (rollout.x: {files[0]}:10)")

    monkeypatch.setattr("gruppetto.cli.plan_simulated.load", refused)
    code, out, err = planned(capsys, "plan", "Qwen3-8B", "--prompts", "8", "--simulate", *words)
    assert code == 2
    assert not out
    assert err.startswith("error: --simulate ")
    assert err.count("\n") == 1
    assert "run.toml" not in err


@pytest.mark.parametrize("text", ["[]", "3", '{"gpus": 3}', '{"gpus": {}, "simulated": "no'])
def test_a_run_that_does_not_say_where_it_ran_gets_one_line(capsys, tmp_path, text):
    (tmp_path / "env.json").write_text(text)
    (tmp_path / "config.resolved.json").write_text('{"model": {"device": "cuda"}}')
    code, _, err = planned(capsys, "plan", "--against", str(tmp_path))
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "not foreseen" not in err


def test_json_on_standard_output_is_json_alone(capsys):
    _, out, _ = planned(capsys, *SMALL, "--json", "-")
    data = json.loads(out)
    assert data["model"]["params"] == 8_190_735_360
    assert data["recommendation"]["placement"] in data["placements"]


def test_what_a_step_costs_in_gpu_hours_is_its_gpus_times_its_seconds(capsys, tmp_path):
    file = tmp_path / "plan.json"
    _, out, _ = planned(capsys, *SMALL, "--json", str(file))
    data = json.loads(file.read_text())
    one = data["placements"][data["recommendation"]["placement"]]
    assert one["gpu_hours"] == pytest.approx(16 * one["step_s"] / 3600)
    assert f"A step is {one['gpu_hours']:,.3g} GPU-hours on 16 GPUs" in out
    assert f"{data['workload']['tokens'] / (16 * one['step_s']):,.0f} a GPU-second." in " ".join(out.split())


def test_the_data_has_what_was_asked_for_and_what_sandboxes_take(capsys):
    words = ["--workload", "agent", "--turns", "5", "--slots", "64", "--critic", "--efficiency", "engine=0.5"]
    _, out, _ = planned(capsys, "plan", "Qwen3-8B", "--gpus", "16", "--prompts", "64", *words, "--json", "-")
    data = json.loads(out)
    assert data["environment"]["executions"] == 64 * 8 * 5
    assert data["environment"]["cpu_hours"] == pytest.approx(64 * 8 * 5 * 5 / 3600, rel=0.01)
    assert {figure["name"] for figure in data["environment"]["figures"]} >= {"executions", "busy", "live"}
    assert (data["ask"]["slots"], data["ask"]["critic"], data["ask"]["serve"]) == (64, True, None)
    assert data["ask"]["shares"]["engine"]["value"] == 0.5
    assert data["ask"]["shares"]["decode_bandwidth"]["source"]
    assert json.loads(planned(capsys, *SMALL, "--json", "-")[1])["environment"] is None


@pytest.mark.parametrize("name", sorted(NUMBERS))
@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-1", "1e400", "9" * 40, "1\n2"])
def test_no_number_is_taken_that_is_none_or_out_of_sense(capsys, name, text):
    option = "--" + name.replace("_", "-")
    code, _, err = planned(capsys, *SMALL, f"{option}={text}")
    assert code == 2
    assert err.startswith("error: --")
    assert err.count("\n") == 1
    assert option in err
    assert "write " in err


def test_what_cannot_be_placed_is_said(capsys):
    _, out, _ = planned(capsys, "plan", "Qwen3-8B", "--gpus", "1", "--prompts", "4", "--mean-tokens", "500")
    assert "async is left out: async needs two GPUs" in out
    _, out, err = planned(capsys, *SMALL, "--compare", "colocated", "--sweep", "mean_tokens=1k,8m")
    assert "mean_tokens = 8,388,608 is left out: " in out
    assert "a whole plan at each point" in err


def test_a_config_with_a_number_of_thousands_of_digits_is_refused(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": ' + "9" * 5000 + "}")
    code, _, err = planned(capsys, "plan", str(config))
    assert code == 2
    assert "is no JSON" in err


def test_a_page_and_a_request_are_written(capsys, tmp_path):
    page, ask = tmp_path / "plan.html", tmp_path / "request.json"
    code, _, _ = planned(capsys, *SMALL, "--sweep", "cv=0.5,2", "--html", str(page), "--request", str(ask))
    assert code == 0
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert json.loads(ask.read_text())["ray"]["placement_groups"]


def test_what_is_written_runs_at_once(capsys, tmp_path):
    file = tmp_path / "run.toml"
    assert planned(capsys, *SMALL, "--write", str(file), "--placement", "async")[0] == 0
    written = tomllib.loads(file.read_text())
    assert written["scheduler"] == {"type": "layered", "max_staleness": 1, "depth": 2.0}
    assert written["sim"]["lengths"]["mean_tokens"] == pytest.approx(2048, rel=1e-3)
    code, out, _ = planned(capsys, "simulate", str(file), "run.steps=3", f"run.dir={tmp_path}", "log.rollouts=false")
    assert code == 0
    assert "layered" in out


def test_the_forecast_stands_before_the_simulations_begin(capsys, monkeypatch):
    before = []

    def simulated(found, workload):
        before.append(capsys.readouterr().out)
        return {name: Simulated((one.step_s.value, 1.2 * one.step_s.value)) for name, one in found.placed.items()}

    monkeypatch.setattr("gruppetto.cli.plan_simulated.simulated", simulated)
    code, out, _ = planned(capsys, *SMALL, "--simulate")
    assert code == 0
    assert "Take " in before[0]
    assert "simulated" in out
    assert "+10.0% +- 10.0%" in out
    assert "the mean of 2 steps" in out
    assert gc.isenabled()


@pytest.mark.parametrize("looking", [True, False])
def test_cycles_are_collected_as_they_were_before(capsys, monkeypatch, looking):
    """In the simulations too: a caller that has it off wants it off."""
    seen = []

    def simulated(found, workload):
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr("gruppetto.cli.plan_simulated.simulated", simulated)
    (gc.enable if looking else gc.disable)()
    try:
        planned(capsys, *SMALL, "--simulate")
        assert [*seen, gc.isenabled()] == [looking, looking]
    finally:
        gc.enable()


@pytest.mark.parametrize("own", [None, "8"])
def test_the_matrix_library_starts_one_thread_unless_somebody_says_how_many(capsys, monkeypatch, own):
    """Seen where numpy is imported; afterwards the environment is as it was."""
    name, seen = "OPENBLAS_NUM_THREADS", []
    monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(name, own)
    monkeypatch.setattr("gruppetto.cli.plan_text.show", lambda found, why: seen.append(os.environ.get(name)))
    planned(capsys, *SMALL)
    assert [*seen, os.environ.get(name)] == [own or "1", own]


def test_a_terminal_sees_the_steps(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with steps_shown("sync", tmp_path, 4):
        (tmp_path / "metrics.jsonl").write_text("{}\n{}\n{}\n")
    assert "sync: step 3 of 4" in capsys.readouterr().err


def test_what_is_written_is_within_the_models_positions(capsys, tmp_path):
    file = tmp_path / "run.toml"
    agents = ["plan", "Qwen3-8B", "--workload", "agent", "--turns", "20", "--gpus", "16", "--prompts", "16"]
    assert planned(capsys, *agents, "--write", str(file))[0] == 0
    text = file.read_text()
    loaded = load([str(file)]).config
    assert loaded.engine.context == 40_960
    assert loaded.rollout.max_tokens == 32_768
    assert loaded.run.name.startswith("Qwen3-8B-")
    assert "positions for 40,960 tokens" in text
    assert "train runs single turns" in text
    assert "# [data]" in text


def test_a_run_that_no_position_is_left_for_is_not_written(capsys, tmp_path):
    config = {**FIGURES["Qwen/Qwen3-8B"], "max_position_embeddings": 600}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", str(tmp_path), "--gpus", "8", "--prompts", "8", "--write", str(tmp_path / "run.toml")]
    code, _, err = planned(capsys, *words, "--mean-tokens", "100", "--max-tokens", "400")
    assert code == 2
    assert "positions for 600 tokens, of which a prompt takes 512" in err
    code, _, _ = planned(capsys, *words, "--mean-tokens", "100", "--max-tokens", "800", "--prompt-tokens", "100")
    assert code == 0
    loaded = load([str(tmp_path / "run.toml")]).config
    assert (loaded.engine.context, loaded.rollout.max_tokens) == (600, 500)


def test_weights_published_in_few_bits_are_told(capsys):
    words = ["plan", "gpt-oss-20b", "--gpus", "8", "--prompts", "16"]
    _, out, _ = planned(capsys, *words)
    assert "published with its experts in mxfp4" in " ".join(out.split())
    _, out, _ = planned(capsys, *words, "--serve-dtype", "stored")
    assert "weights as published, in mxfp4" in out
    assert "--serve-dtype stored plans them" not in out


def test_a_recorded_workload_is_planned_with_its_own_lengths(capsys, tmp_path):
    trace = tmp_path / "lengths.csv"
    rows = [f"{group},{100 * (group + 1) + member}" for group in range(8) for member in range(4)]
    trace.write_text("group,length\n" + "\n".join(rows) + "\n")
    words = ["plan", "Qwen3-8B", "--gpus", "8", "--prompts", "8", "--group-size", "4", "--workload", str(trace)]
    _, out, _ = planned(capsys, *words, "--json", "-")
    data = json.loads(out)
    assert data["workload"]["mean_tokens"] == pytest.approx(451.5)
    assert data["workload"]["cap"] == 803


@pytest.mark.slow
@pytest.mark.parametrize("family", ["A", "D"])
def test_the_simulated_step_is_the_forecast(capsys, family):
    """Within 10 %, for all three placements, on families with a tail."""
    words = ["plan", "Qwen3-32B", "--gpu", "h800", "--gpus", "64", "--prompts", "128", "--workload", family]
    _, out, _ = planned(capsys, *words, "--simulate", "--json", "-")
    for name, one in json.loads(out)["placements"].items():
        assert one["step_s"] == pytest.approx(one["simulated_s"], rel=0.10), name


@pytest.mark.slow
def test_the_page_of_the_ledger_quotes_what_its_commands_print():
    done = subprocess.run(
        [sys.executable, "scripts/quote_commands.py", "docs/ledger.md", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "150"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_cold_plan_needs_neither_torch_nor_pydantic():
    code = (
        "import sys; from gruppetto.cli.main import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'pydantic', 'msgspec', 'aiohttp', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *SMALL], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
