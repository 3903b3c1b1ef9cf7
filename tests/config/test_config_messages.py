"""The exact line for each thing that can be wrong in a config."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.config.loader import load
from gruppetto.errors import UserError


def lines(files, overrides=()) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(files, overrides)
    return str(caught.value).splitlines()


@pytest.fixture
def run_toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> list[str]:
        Path("run.toml").write_bytes(text.encode() if isinstance(text, str) else text)
        return lines(["run.toml"])

    return write


def test_everything_wrong_is_reported_at_once(run_toml):
    text = '[run]\nsteps = 0\n\n[rollout]\nmax_tokens = "many"\n\ngroup_sise = 8\n[model]\ndtype = "float23"\n'
    assert run_toml(text) == [
        "run.steps = 0 (run.toml:2): must be a whole number, at least 1; write run.steps = 1",
        'model.dtype = "float23" (run.toml:9): must be "float32" or "bfloat16"; write model.dtype = "float32"',
        'rollout.max_tokens = "many" (run.toml:5): must be a whole number, at least 1; write rollout.max_tokens = 256',
        "unknown key 'rollout.group_sise' (run.toml:7) - did you mean 'rollout.group_size'?",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "rollout.group_sise=8",
            "unknown key 'rollout.group_sise' (command line) - did you mean 'rollout.group_size'?",
        ),
        ("lr=1", "unknown key 'lr' (command line) - did you mean 'train.lr'?"),
        ("train.clip_high=1", "unknown key 'train.clip_high' (command line) - did you mean 'train.loss.clip_high'?"),
        (
            "rollout.num_generations=8",
            "unknown key 'rollout.num_generations' (command line) - did you mean 'rollout.group_size'?",
        ),
        ("rolout.group_size=8", "unknown key 'rolout' (command line) - did you mean 'rollout'?"),
        (
            "weights.zzz=8",
            "unknown key 'weights.zzz' (command line) - [weights] has channel, mode, bucket_mb, verify_every, "
            "probe_kl, pause, release_kv",
        ),
        (
            "rollout=5",
            "rollout = 5 (command line): must be a table of settings; write rollout.<setting> = <value>",
        ),
        (
            "run.deterministic=1",
            "run.deterministic = 1 (command line): must be true or false; write run.deterministic = true",
        ),
        (
            "run.steps=true",
            "run.steps = true (command line): must be a whole number, at least 1; write run.steps = 100",
        ),
        (
            "eval.every=5.0",
            "eval.every = 5.0 (command line): must be a whole number, at least 0; write eval.every = 5",
        ),
        (
            "rollout.top_p=1.5",
            "rollout.top_p = 1.5 (command line): must be a number, above 0, at most 1; write rollout.top_p = 1",
        ),
        (
            "train.lr=inf",
            "train.lr = inf (command line): must be a number, at least 0; write train.lr = 1e-06",
        ),
        (
            "rollout.stop=END",
            'rollout.stop = "END" (command line): must be a list of texts; write rollout.stop = ["END"]',
        ),
        (
            "rollout.stop=[1]",
            "rollout.stop = [1] (command line): must be a list of texts; write rollout.stop = []",
        ),
        (
            "train.betas=[0.9]",
            "train.betas = [0.9] (command line): must be a list of 2 numbers; write train.betas = [0.9, 0.999]",
        ),
        (
            "log.sinks=wandb",
            'log.sinks = "wandb" (command line): must be a list of "tensorboard"; write log.sinks = ["tensorboard"]',
        ),
        (
            "scheduler.type=partail",
            'scheduler.type = "partail" (command line): must be "sync", "partial", "tail_batch", "divided", '
            '"async_bounded", "windowed", "layered" or "auto"; write scheduler.type = "partial"',
        ),
        (
            "scheduler.over_provision=2",
            "scheduler.over_provision = 2 (command line): scheduler.over_provision is now scheduler.depth; "
            "write scheduler.depth = 2",
        ),
        (
            "scheduler.max_stalenes=1",
            "unknown key 'scheduler.max_stalenes' (command line) - did you mean 'scheduler.max_staleness'?",
        ),
        (
            "scheduler.over_age=later",
            'scheduler.over_age = "later" (command line): must be "wait", "mask" or "drop" or "none"; '
            'write scheduler.over_age = "none"',
        ),
        (
            "rollout.group_size=1",
            "rollout.group_size = 1: a group of one has no baseline and weight 0; write rollout.group_size = 2 or more "
            "(rollout.group_size: command line)",
        ),
        (
            "data.max_prompt_tokens=1000",
            "data.max_prompt_tokens + rollout.max_tokens = 1000 + 256 = 1256 exceeds engine.context = 1024; write "
            "engine.context = 1256 (data.max_prompt_tokens: command line, rollout.max_tokens: default, "
            "engine.context: default)",
        ),
        ("rollout.group_size", "'rollout.group_size' is no setting; write key=value, as in rollout.group_size=8"),
        ("rollout..x=1", "'rollout..x=1' is no setting; write key=value, as in rollout.group_size=8"),
    ],
)
def test_one_line_for_one_override(override, line):
    assert lines([], [override]) == [line]


def test_ranges_of_settings_that_may_be_unset():
    assert lines([], ["scheduler.depth=0.5", "scheduler.max_staleness=-1"]) == [
        'scheduler.depth = 0.5 (command line): must be a number, at least 1, at most 64 or "none"; '
        "write scheduler.depth = 1",
        'scheduler.max_staleness = -1 (command line): must be a whole number, at least 0 or "none"; '
        "write scheduler.max_staleness = 0",
    ]


def test_lockstep_needs_turns():
    (line,) = lines([], ["run.deterministic=true", "run.placement=disaggregated"])
    assert line.startswith("run.deterministic = true needs engine and trainer to take turns")
    assert "write run.placement = 'colocated' or run.deterministic = false" in line


def test_several_misfits_are_all_reported():
    found = lines([], ["rollout.group_size=1", "rollout.max_tokens=5000"])
    assert [line.split(" ")[0] for line in found] == ["rollout.max_tokens", "rollout.group_size"]


def test_toml_errors_name_the_line(run_toml):
    assert run_toml("[run]\nname = abc\n") == [
        "run.toml:2: not valid TOML at column 8: invalid value; text needs quotes, true and false are lower case"
    ]
    assert run_toml("[run]\nsteps = 1\nsteps = 2\n") == [
        "run.toml:3: not valid TOML at column 10: cannot overwrite a value"
    ]
    assert run_toml("[run\n")[0].startswith("run.toml:1: not valid TOML at column 5: expected ']'")
    assert run_toml('[run]\nname = "a')[0].startswith("run.toml:2: not valid TOML: ")


def test_unreadable_files(run_toml, tmp_path):
    assert run_toml(b"[run]\nname = '\xe9'\n") == ["run.toml: byte 14 is not UTF-8; save the file as UTF-8"]
    assert lines(["missing.toml"])[0].startswith("missing.toml: no such config file; write the path of a .toml file")
    assert lines([tmp_path]) == [f"{tmp_path}: cannot be read: is a directory"]
    assert lines(["no_such_recipe"])[0].startswith("no recipe 'no_such_recipe' - ")
    assert run_toml("extends = 5\n") == ["run.toml:1: extends = 5 must be one name or path, as text"]


def test_a_long_value_is_cut():
    assert len(lines([], [f"model.dtype={'x' * 500}"])[0]) < 200


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["run.steps", "scheduler.type", "scheduler", "train.loss", "engine.args.x", "run.x.y", "a"])
            | st.text("ab._-é", min_size=1, max_size=8),
            st.sampled_from(["", "1", "-1", "nan", "none", "x", "[1]", "{a = 1}", "1979-05-27", "{type = 'partial'}"])
            | st.text(max_size=6),
        ),
        max_size=4,
    )
)
def test_any_override_loads_or_ends_in_a_user_error(pairs):
    with contextlib.suppress(UserError):
        load([], [f"{key}={value}" for key, value in pairs])


@pytest.mark.parametrize(("text", "line"), [("run = 5\n", "run = 5"), ("[[run]]\nsteps = 3\n", "run = [{steps = 3}]")])
def test_what_is_no_table_is_refused_also_under_a_setting_of_it(run_toml, tmp_path, text, line):
    wrong = f"{line} (run.toml:1): must be a table of settings; write run.<setting> = <value>"
    assert run_toml(text) == [wrong]
    assert lines(["run.toml"], ["run.dir=x"]) == [wrong]


def test_nothing_is_named_by_nul(run_toml):
    said = "holds the character NUL; leave it out"
    assert run_toml('[run]\ndir = "a\\u0000b"\n') == [f'run.dir = "a\\u0000b" (run.toml:2): {said}']
    assert lines([], ['engine.urls=["a\\u0000b"]']) == [f'engine.urls = ["a\\u0000b"] (command line): {said}']


def test_bytes_that_the_locale_cannot_read_are_said():
    """`d\xc3\xa4t` on a command line under an ASCII locale."""
    said = "holds what is no text in this locale; set LC_ALL=C.UTF-8, or write another name"
    assert lines([], ["run.name=d\udcc3\udca4t"]) == [f'run.name = "d\udcc3\udca4t" (command line): {said}']
    assert lines([], ['engine.urls=["d\udcc3"]']) == [f'engine.urls = ["d\udcc3"] (command line): {said}']
