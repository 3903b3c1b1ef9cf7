"""`gruppetto doctor`: every check answers, what is missing is named with what to install; a profile that is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from gruppetto import doctor
from gruppetto.cli.main import main


def lines_of(capsys):
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_what_there_is(capsys, here):
    assert main(["doctor"]) == 0
    out, err = lines_of(capsys)
    assert err == []
    text = "\n".join(out)
    for name in ("python", "processor", "memory", "disk", "GPUs", *(f"extra {extra}" for extra in doctor.EXTRAS)):
        assert name in text


def test_an_extra_that_is_missing_is_named_with_what_needs_it(monkeypatch):
    present = {"torch", "transformers", "tokenizers", "safetensors"}
    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name in present else None)
    found = {one.name: one for one in doctor.check_extras()}
    assert found["extra train"].works
    gym = found["extra gym"]
    assert not gym.works
    assert gym.without == 'data.type and reward.type = "reasoning_gym": run pip install "gruppetto[gym]"'


def test_what_does_not_work_is_listed_at_the_end(capsys, here, monkeypatch):
    monkeypatch.setattr(
        doctor, "CHECKS", [lambda: [doctor.Finding("a", True, "b"), doctor.Finding("c", False, "d", "e: f")]]
    )
    assert main(["doctor"]) == 0
    out, _ = lines_of(capsys)
    assert out == ["ok  a  b", "no  c  d", "", "would not work here:", "  e: f"]


def test_every_extra_of_the_package_is_checked():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(doctor.EXTRAS) == set(project["optional-dependencies"]) - {"dev"}


def test_a_profile_without_torch_names_the_extra(here):
    code = (
        "import sys, importlib.util as u\\nreal = u.find_spec\\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\\n"
        "from gruppetto.cli.main import main\\nsys.exit(main(['doctor', '--profile']))"
    ).replace("\\n", "\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: --profile needs torch, which is not installed: it measures the embedded engine and trainer; "
        'run: pip install "gruppetto[train]"\n'
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "m"], "--model without --profile does nothing"),
        (["--deterministic"], "--deterministic without --profile does nothing"),
        (["--profile", "--out", "p.json"], "write --out p.toml"),
        (["--profile", "--out", "no/p.toml"], "there is no folder no"),
        (["--profile", "--model", "m"], "--model m: no config.json there"),
        (["--profile", "--deterministic", "--dtype", "bfloat16"], "such a run is in float32"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(capsys, here, argv, says):
    pytest.importorskip("torch")
    assert main(["doctor", *argv]) == 2
    out, err = lines_of(capsys)
    assert out == []
    assert len(err) == 1
    assert says in err[0]
