"""The command line without an extra: what needs it says so in one line, what does not need it works."""

import shlex
import subprocess
import sys

import pytest

from gruppetto.data.parquet import read_parquet
from gruppetto.data.procedural import gym_rows
from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.errors import UserError
from gruppetto.rewards.verifiers import VerifierSpec, load_verifier

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("torch", "transformers", "tokenizers", "safetensors")
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
"""As in an environment that has the base install alone."""
MAIN = "from gruppetto.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"


def base_install(line, code=MAIN):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *shlex.split(line)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("line", "who"),
    [
        ("serve model", "serving"),
        ("doctor --profile", "--profile"),
        ("doctor --engine http://127.0.0.1:9 --model model", "--model"),
        ("doctor --engine http://127.0.0.1:9 --model model --out t.md", "--model"),
    ],
)
def test_what_needs_torch_names_the_extra_in_one_line(tmp_path, monkeypatch, line, who):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = base_install(line)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {who} needs torch, which is not installed")
    assert done.stderr.endswith('run: pip install "gruppetto[train]"\n')
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("how", ["", "--load model"])
def test_a_server_is_tried_without_torch(tmp_path, monkeypatch, how):
    """The base install is enough: what comes is the server's absence, not a package's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = base_install(f"doctor --engine http://127.0.0.1:9 {how}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --engine http://127.0.0.1:9: ")
    assert "torch" not in done.stderr


def test_a_module_of_an_extra_that_nobody_asked_for_first_is_named_with_it(tmp_path):
    """Whichever command it is: a gap in what was asked for before is no failure that nobody foresaw."""
    code = (
        "import gruppetto.cli.explain as explain\n"
        "def run(args):\n    import safetensors.numpy\n"
        "explain.run = run\n" + MAIN
    )
    done = base_install("explain runs/latest", code)
    assert done.returncode == 2
    assert done.stderr == (
        'error: gruppetto explain needs safetensors, which is not installed; run: pip install "gruppetto[train]"\n'
    )


def reads_parquet(folder):
    return next(read_parquet(folder / "rows.parquet"))


def draws_tasks(folder):
    return gym_rows("chain_sum", 0, 1, {})


def verifies_mathematics(folder):
    return load_verifier(VerifierSpec(type="math"))


def verifies_exercises(folder):
    return load_verifier(VerifierSpec(type="reasoning_gym"))


def tokenizes(folder):
    return HFTokenizer(folder)


@pytest.mark.parametrize(
    ("use", "module", "extra"),
    [
        (reads_parquet, "pyarrow", "parquet"),
        (draws_tasks, "reasoning_gym", "gym"),
        (verifies_mathematics, "math_verify", "math"),
        (verifies_exercises, "reasoning_gym", "gym"),
        (tokenizes, "transformers", "train"),
    ],
)
def test_data_and_rewards_name_their_extra(tmp_path, monkeypatch, use, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError) as caught:
        use(tmp_path)
    said = str(caught.value)
    assert f" needs {module}, which is not installed; " in said
    assert said.endswith(f'run: pip install "gruppetto[{extra}]"')
