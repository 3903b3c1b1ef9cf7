"""The command line: exact text, exit codes, nothing heavy imported for --help."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gruppetto.cli import config as config_command
from gruppetto.cli.main import build_parser, main
from gruppetto.cli.settings import quiet_threads
from gruppetto.config.loader import load
from gruppetto.config.scheduling import SchedulerSection
from gruppetto.errors import RunError
from gruppetto.presets import PRESETS, compose


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with a model folder, tasks and a config that fits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRUPPETTO_DEBUG", raising=False)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    Path("run.toml").write_text(
        '[model]\npath = "model"\n[data]\npath = "tasks.jsonl@[0:1]"\n[rollout]\ngroup_size = 4\n'
    )
    monkeypatch.setattr("gruppetto.config.preflight.find_spec", lambda module: module)
    return tmp_path


def err(capsys) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_help_imports_the_standard_library_only():
    code = (
        "import sys\nfrom gruppetto.cli.main import build_parser\ntext = build_parser().format_help()\n"
        "heavy = {'pydantic', 'numpy', 'torch', 'aiohttp', 'msgspec', 'rich', 'transformers'}\n"
        "assert 'train' in text\nprint(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_every_command_has_help_and_an_example():
    choices = build_parser()._subparsers._group_actions[0].choices
    assert {"train", "config"} <= set(choices)
    for command in choices.values():
        assert "gruppetto" in command.format_help()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["train"], "error: no config file given; write gruppetto train run.toml (or a recipe's name)"),
        (
            ["train", "run.toml", "run.step=5"],
            "error: unknown key 'run.step' (command line) - did you mean 'run.steps'?",
        ),
        (["train", "run.toml", "--dryrun"], "error: unknown argument --dryrun (see gruppetto train --help)"),
        (
            ["train", "run.toml", "model.path=nowhere"],
            'error: model.path = "nowhere" (command line): no such folder; write the path of a Hugging Face folder',
        ),
        (
            ["train", "run.toml", "data.path=nowhere.jsonl"],
            'error: data.path = "nowhere.jsonl" (command line): no such file; '
            "write the path of a JSONL or Parquet file",
        ),
        (
            ["train", "run.toml", "run.name=a/b"],
            'error: run.name = "a/b" cannot name a folder; write a plain word, as in run.name = "first"',
        ),
        (
            ["config", "--diff", "run.toml"],
            "error: --diff compares two files, not 1; write gruppetto config --diff a.toml b.toml",
        ),
        (["config", "nowhere.toml", "x"], None),
    ],
)
def test_bad_input_is_one_line_and_exit_2(here, capsys, argv, line):
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    found = err(capsys)
    assert code == 2
    assert len(found) == 1
    assert found[0].startswith("error: ")
    assert line is None or found == [line]


def test_all_that_is_missing_is_told_at_once(here, capsys, monkeypatch):
    monkeypatch.setattr("gruppetto.config.preflight.find_spec", lambda module: None if module == "torch" else module)
    assert main(["train", "run.toml", "model.path=tasks", "reward.type=regex"]) == 2
    assert err(capsys) == [
        'error: model.path = "tasks" (command line): no such folder; write the path of a Hugging Face folder',
        "error: reward.pattern is not set, and reward.type = \"regex\" needs it; write reward.pattern = 'answer: (.*)'",
        'error: training needs torch, which is not installed; run: pip install "gruppetto[train]"',
    ]


def test_a_run_folder_that_exists_is_refused_but_not_for_a_resume(here, capsys):
    Path("runs/run").mkdir(parents=True)
    assert main(["train", "run.toml", "--dry-run"]) == 2
    assert err(capsys) == [
        "error: run folder runs/run exists; add --resume to go on with that run, or write run.name = another name"
    ]
    assert main(["train", "run.toml", "--dry-run", "--resume"]) == 2
    assert err(capsys) == [
        "error: runs/run is no run folder (it has no config.resolved.json); leave --resume out to begin it"
    ]


@pytest.fixture
def dry_run(here, tiny_model, monkeypatch):
    """dry_run(*settings) -> exit code of a dry run on a model folder that is real, but for its weights."""
    monkeypatch.setattr("gruppetto.cli.train.quiet_threads", lambda config: None)
    shutil.copytree(tiny_model, "model", dirs_exist_ok=True)
    Path("model/model.safetensors").unlink()
    return lambda *settings: main(["train", "run.toml", "--dry-run", *settings])


def test_a_dry_run_prints_the_resolved_config_and_makes_nothing(here, dry_run, capsys):
    before = sorted(p.name for p in here.iterdir())
    assert dry_run("rollout.max_tokens=99") == 0
    resolved = json.loads(capsys.readouterr().out)
    assert (resolved["rollout"]["group_size"], resolved["rollout"]["max_tokens"]) == (4, 99)
    assert sorted(p.name for p in here.iterdir()) == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["eval.tasks=4"], "eval.tasks = 4, but data.eval_path is not set"),
        (["engine.args.x=1"], "engine.args = {x = 1}: the embedded engine takes none; leave engine.args out"),
        (["run.deterministic=true", "engine.prefill_chunk=100"], "write engine.prefill_chunk = 128"),
        (["data.path=bad.jsonl"], "bad.jsonl"),
        (["data.eval_path=tasks.jsonl", "eval.tasks=9"], "write eval.tasks = 1 or fewer"),
        (["reward.type=function", "reward.path=nowhere_at_all:score"], "nowhere_at_all"),
        (["reward.type=function", "reward.path=reward.py:scoer"], "scoer"),
        (["model.device=abacus"], "model.device = 'abacus' cannot be used"),
        (["model.path=sliding"], "sliding window"),
        (["model.path=plain"], "tokenizer"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(here, dry_run, capsys, settings, said):
    Path("bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": 7}\n')
    Path("reward.py").write_text("def score(response):\n    return 1.0\n")
    shutil.copytree("model", "sliding")
    config = json.loads(Path("model/config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 64, "layer_types": None, "max_window_layers": 0}
    Path("sliding/config.json").write_text(json.dumps(config))
    Path("plain").mkdir()
    shutil.copy("model/config.json", "plain")
    assert dry_run(*settings) == 2
    lines = err(capsys)
    assert len(lines) == 1
    assert said in lines[0]
    assert not Path("runs").exists()


def test_a_dry_run_of_a_resume_refuses_what_a_run_keeps(here, dry_run, capsys):
    saved = load(["run.toml"]).resolved()
    Path("runs/run").mkdir(parents=True)
    Path("runs/run/config.resolved.json").write_text(json.dumps(saved))
    assert dry_run("--resume", "run.steps=7", "scheduler.type=partial", "train.lr=1", "eval.every=3") == 0
    capsys.readouterr()
    assert dry_run("--resume", "rollout.group_size=8", "data.args.a=1", "run.seed=5") == 2
    assert err(capsys) == [
        f"error: --resume: {key} was {old} in runs/run and is {new} now, and one run cannot mix them; "
        f"write {key} = {old}, or another run.name without --resume"
        for key, old, new in [("run.seed", 0, 5), ("data.args", "{}", "{a = 1}"), ("rollout.group_size", 4, 8)]
    ]
    for text in ("{", "[]", '{"run": 3}'):
        Path("runs/run/config.resolved.json").write_text(text)
        assert dry_run("--resume") == 2
        assert "runs/run/config.resolved.json cannot be read" in err(capsys)[0]


def test_config_says_where_each_value_came_from(here, capsys):
    assert main(["config", "run.toml", "scheduler.type=partial"]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "group_size = 4 # run.toml:6" in lines
    assert 'type = "partial" # command line' in lines
    assert 'max_staleness = "none" # default' in lines
    assert "depth = 1.5 # preset partial" in lines
    assert not any(line.startswith("over_age") and "preset" in line for line in lines)  # nothing is over age
    Path("again.toml").write_text(text)
    assert main(["config", "again.toml", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rollout.group_size"]["value"] == 4
    assert again["scheduler.max_staleness"]["value"] is None


@pytest.mark.parametrize("more", [(), ("scheduler.boundary=frozen",)])
@pytest.mark.parametrize("preset", [*PRESETS, "auto"])
def test_what_config_shows_of_a_preset_can_be_written_out(here, capsys, preset, more):
    settings = ["run.placement=disaggregated", f"scheduler.type={preset}", *(more if preset == "tail_batch" else ())]
    assert main(["config", "run.toml", *settings]) == 0
    Path("again.toml").write_text(capsys.readouterr().out)
    assert main(["config", "again.toml", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    shown = {key.split(".")[1]: entry["value"] for key, entry in again.items() if key.startswith("scheduler.")}
    written = SchedulerSection.model_validate(dict(entry.split(".")[1].split("=") for entry in settings[1:]))
    assert compose(SchedulerSection.model_validate(shown)) == compose(written)


def test_choices_that_do_not_go_together_are_refused_at_once(here, capsys):
    settings = ["scheduler.type=partial", "scheduler.rounds=3", "scheduler.versions=own", "scheduler.max_staleness=1"]
    for command in ("config", "train"):
        assert main([command, "run.toml", *settings]) == 2
        found = err(capsys)
        assert any(line.startswith("error: scheduler.rounds belongs to the rounds of tail_batch") for line in found)
        assert any(line.startswith("error: scheduler.versions: versions = 'own' needs engines") for line in found)


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        (["scheduler.depth=2"], ["depth"]),
        (["scheduler.rounds=2", "scheduler.over_members=1.5", "scheduler.defer_steps=4"], ["rounds"]),
        (
            ["scheduler.boundary=frozen", "scheduler.over_members=2", "scheduler.defer_steps=4", "scheduler.rounds=2"],
            ["over_members", "defer_steps"],
        ),
    ],
)
def test_settings_without_a_use_are_refused(here, capsys, settings, idle):
    assert main(["config", "run.toml", "scheduler.type=tail_batch", *settings]) == 2
    assert [line.split()[1] for line in err(capsys)] == [f"scheduler.{name}" for name in idle]


def test_diff_shows_what_differs_with_both_origins(here, capsys):
    Path("b.toml").write_text('extends = "run.toml"\n[scheduler]\ntype = "partial"\n[rollout]\ngroup_size = 8\n')
    assert main(["config", "--diff", "run.toml", "b.toml"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rollout.group_size: 4 (run.toml:6) -> 8 (b.toml:5)",
        'scheduler.type: "sync" (default) -> "partial" (b.toml:3)',
    ]


def test_the_reference_has_every_field(capsys):
    from gruppetto.config.fields import fields

    assert main(["config", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert "[scheduler]" in text
    assert (
        "  group_size = 8\n      a whole number, at least 1, at most 1,000,000\n      Rollouts of one task.\n" in text
    )
    assert text.count("\n  ") - text.count("\n      ") == len(fields())


@pytest.mark.parametrize(
    ("failure", "code", "lines"),
    [
        (RunError("engine e0: died"), 1, ["error: engine e0: died"]),
        (KeyboardInterrupt(), 130, ["error: interrupted"]),
        (ValueError("bad\nmore"), 1, ["error: ValueError: bad (not foreseen; add --debug to see where)"]),
    ],
)
def test_failures_end_in_one_line_and_their_exit_code(here, capsys, monkeypatch, failure, code, lines):
    def fail(args):
        raise failure

    monkeypatch.setattr(config_command, "run", fail)
    assert main(["config", "run.toml"]) == code
    assert err(capsys) == lines


def test_debug_shows_the_traceback(here, monkeypatch):
    def fail(args):
        raise RunError("engine e0: died")

    monkeypatch.setattr(config_command, "run", fail)
    with pytest.raises(RunError):
        main(["config", "--debug", "run.toml"])
    monkeypatch.setenv("GRUPPETTO_DEBUG", "1")
    with pytest.raises(RunError):
        main(["config", "run.toml"])


def test_settings_may_stand_behind_options(here, capsys):
    assert main(["config", "run.toml", "--json", "rollout.group_size=16"]) == 0
    assert json.loads(capsys.readouterr().out)["rollout.group_size"] == {"value": 16, "origin": "command line"}


@pytest.mark.parametrize("argv", [["config", "--help-all"], ["config", "--diff", "run.toml", "b.toml"]])
def test_a_closed_pipe_is_not_an_error(here, argv):
    """Long output breaks while it is printed, short output when it is flushed."""
    Path("b.toml").write_text("")
    script = "import sys\nfrom gruppetto.cli.main import run\nsys.argv[0:1] = ['gruppetto']\nrun()"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_threads_are_set_before_torch_and_the_users_choice_stands(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    quiet_threads(load([], ["run.threads=3"]).config)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("3", "ACTIVE")


def test_the_demo_takes_every_preset(capsys):
    from gruppetto.cli.demo import SCHEDULERS, _settings
    from gruppetto.config.preflight import refuse_scheduler
    from gruppetto.config.schema import SchedulerSection

    assert SchedulerSection.model_fields["type"].annotation.__args__ == SCHEDULERS
    for name in SCHEDULERS:
        args = build_parser().parse_args(["demo", "--scheduler", name, "scheduler.kv_pool=true"])
        config = load(["demo"], _settings(args)).config
        refuse_scheduler(config)
        assert (config.scheduler.type, config.scheduler.kv_pool) == (name, True)
        assert (config.run.placement == "disaggregated") == (name in ("async_bounded", "windowed"))
