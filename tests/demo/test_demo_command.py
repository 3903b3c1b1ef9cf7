"""`gruppetto demo` from an empty cache to its table, with a warm start and a run that are only a few steps long."""

import json

import pytest

pytest.importorskip("torch", reason="needs the train extra")

from gruppetto.cli.main import main
from gruppetto.demo import warmstart


@pytest.fixture
def short(monkeypatch, tmp_path):
    monkeypatch.setattr(warmstart, "STEPS", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ["demo", "--steps", "2", "--out", str(tmp_path / "runs"), "eval.tasks=8", "log.screen=none"]


def test_demo_makes_a_model_once_trains_and_tells(short, tmp_path, capsys):
    assert main(short) == 0
    first = capsys.readouterr().out
    assert "taught the form of an answer" in first
    assert "accuracy on 8 held-out tasks, before" in first
    assert "excess over that bound" in first
    assert "try next:" in first
    assert main([*short, "--scheduler", "sync"]) == 0
    assert "warm-started before" in capsys.readouterr().out
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert runs == ["demo", "demo-2", "latest"]
    resolved = json.loads((tmp_path / "runs" / "demo-2" / "config.resolved.json").read_text())
    assert resolved["scheduler"]["type"] == "sync"


def test_the_same_seed_warm_starts_the_same_model(short, tmp_path):
    warmstart.warm_start(5, tmp_path / "a")
    warmstart.warm_start(5, tmp_path / "b")
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


def test_demo_refuses_what_train_refuses(short, capsys):
    assert main([*short, "rollout.group_sise=2"]) == 2
    assert "did you mean 'rollout.group_size'?" in capsys.readouterr().err
