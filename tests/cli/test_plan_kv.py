"""KV of models whose layers end at a window or keep a state: said in rollouts, so that products are right."""

import json
import re
import tomllib

import pytest

from gruppetto.cli.main import main

MODELS = (
    "Mistral-7B-v0.1",
    "gpt-oss-20b",
    "gemma-3-4b",
    "Nemotron-H-56B",
    "Qwen3-Next-80B-A3B",
    "DeepSeek-V3.2",
    "Qwen3-8B",
)


def printed(capsys, *words):
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def product(formula):
    """The value of `1,536 tokens (…) x 23,040 bytes + 12 bytes of states`."""
    bare = re.sub(r"\([^)]*\)|[,a-wyz]|of", "", formula)
    return sum(eval(part.replace("x", "*")) for part in bare.split("+"))


@pytest.mark.parametrize("tokens", ["300", "9000"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_sequence_keeps_multiplies_out(capsys, tmp_path, name, tokens):
    file = tmp_path / "kv.json"
    printed(capsys, name, "--only", "kv", "--mean-tokens", tokens, "--json", str(file))
    each = json.loads(file.read_text())["kv"]["sequence"]
    assert product(each["formula"]) == pytest.approx(each["value"], rel=1e-3)
    assert " x 0 " not in each["formula"]


def test_engines_of_a_model_of_windows_take_rollouts(capsys, tmp_path):
    file = tmp_path / "run.toml"
    out = printed(capsys, MODELS[0], "--gpus", "8", "--why", "--write", str(file), "--compare", "colocated")
    line = next(line for line in out.splitlines() if "all rollouts at their mean length" in line)
    assert "0 tokens" not in line
    engines = int(line.split(" engines")[0].split()[-1])
    fit = int(re.search(r"the KV of ([\d,]+) rollouts each", line)[1].replace(",", ""))
    assert float(re.search(r"= ([\d.]+) waves", line)[1]) == pytest.approx(1024 / (engines * fit), abs=0.06)
    formula = re.search(
        r"waves of KV = ([\d.]+): ([\d,]+) rollouts x ([\d.]+) MB .*\((\d+) engines x 1 x (.*) GB\)", out
    )
    waves, rollouts, each, count, pool = (float(part.replace(",", "")) for part in formula.groups())
    assert waves == pytest.approx(rollouts * each / (count * pool * 1000), rel=0.02)
    written = tomllib.loads(file.read_text())
    assert written["engine"]["slots"] <= fit
    assert written["sim"]["kv_tokens"] == 0
    assert "the KV of a rollout ends at its window" in file.read_text()


@pytest.mark.parametrize("name", MODELS)
def test_the_data_says_what_the_text_says_of_an_engine(capsys, tmp_path, name):
    file = tmp_path / "plan.json"
    out = printed(capsys, name, "--gpus", "64", "--gpu", "h200", "--compare", "colocated", "--json", str(file))
    kv = json.loads(file.read_text())["kv"]
    engines, what = re.search(r": (\d+) engines of \d+ GPUs take (.*) each;", out).groups()
    assert kv["engines"] == int(engines)
    assert kv["waves"] == pytest.approx(1024 / kv["engines"] / kv["rollouts_per_engine"], rel=0.02)
    tokens, rollouts = re.fullmatch(r"([\d,]+) tokens of KV", what), re.fullmatch(r"the KV of ([\d,]+) rollouts", what)
    assert (tokens is None) == (kv["tokens_per_engine"] is None)
    if tokens is None:
        assert int(rollouts[1].replace(",", "")) == round(kv["rollouts_per_engine"])
    else:
        assert int(tokens[1].replace(",", "")) == kv["tokens_per_engine"] > 0
