"""What `gruppetto plan` says of its own figures: products are right, and what it assumes is what it was told."""

import re

import pytest

from gruppetto.cli.main import main

SMALL = ["plan", "Qwen3-8B", "--gpus", "16", "--prompts", "64", "--mean-tokens", "2k", "--max-tokens", "8k"]
NUMBER = r"([\d,.]+(?:e-\d+)?)"


def printed(capsys, *words):
    assert main([*words]) == 0
    return " ".join(capsys.readouterr().out.split())


def numbers(found):
    return [float(part.replace(",", "")) for part in found]


def test_what_is_left_of_training_is_not_called_as_the_stage_and_multiplies_out(capsys, tmp_path):
    file = tmp_path / "run.toml"
    out = printed(capsys, *SMALL, "--why", "--write", str(file), "--placement", "async")
    left = rf"training left = {NUMBER} (us|ms|s): {NUMBER} tokens \([^)]*\) x {NUMBER} s - {NUMBER} s (hidden|beside)"
    found = re.findall(left, out)
    assert len(found) == 3
    for value, unit, tokens, price, hidden, _ in found:
        seconds, made, each, away = numbers((value, tokens, price, hidden))
        seconds *= {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
        assert seconds == pytest.approx(made * each - away, abs=0.01 * made * each)
    assert found[2][0] == "0"  # beside the rollouts all of it
    sums = re.findall(
        rf"step = {NUMBER} s: rollouts {NUMBER} \+ training left {NUMBER} \+ publish {NUMBER} \+ switch {NUMBER}", out
    )
    assert len(sums) == 3
    for step, *parts in map(numbers, sums):
        assert step == pytest.approx(sum(parts), abs=1.6)
    assert "training left 0.0 +" in file.read_text().splitlines()[1]
    assert not re.search(r"\+ train [\d.]+ \+ publish", out + file.read_text())


@pytest.mark.parametrize(("words", "share"), [((), "75%"), (("engine=0.5",), "38%"), (("prime-rl", "engine=0.3"), "")])
def test_the_share_that_is_assumed_is_the_one_that_was_asked_for(capsys, words, share):
    asked = [word for one in words for word in ("--efficiency", one)]
    out = printed(capsys, *SMALL, *asked)
    assert f"engines read at {share}" in out
    assert ("--efficiency engine=0.5" in out) == (not words)
    assert ("x engine = " in out) == bool(words)


def test_shares_with_a_comma_between_them_are_told_that_the_option_repeats(capsys):
    assert main([*SMALL, "--efficiency", "engine=0.5,train=0.3"]) == 2
    err = capsys.readouterr().err
    assert "write --efficiency engine=0.5 --efficiency train=0.3" in err
    assert main([*SMALL, "--efficiency", "engine=0.5", "--efficiency", "train=0.3"]) == 0
