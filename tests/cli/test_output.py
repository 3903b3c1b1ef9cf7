"""Where commands write: a target is looked at before any work, and no stream makes an output an error."""

import errno
import json
import os
import subprocess
import sys

import pytest

from gruppetto.cli import config as config_command
from gruppetto.cli import simulate as simulate_command
from gruppetto.cli.main import main
from gruppetto.cli.output import check_json, write_json
from gruppetto.errors import UserError

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def command(*argv, env=(), redirect=""):
    """The command in a process of its own, whose streams the shell redirects."""
    line = f'exec "$0" -m gruppetto "$@" {redirect}'
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    return subprocess.run(
        ["bash", "-c", line, sys.executable, *argv], capture_output=True, env={**environment, **dict(env)}, timeout=120
    )


COMMANDS = [
    ["reproduce", "april"],
    ["reproduce", "ledger"],
    ["simulate", "reasoning-32k"],
    ["replay", "rows.csv"],
    ["explain", "runs/x"],
    ["check-data", "rows.jsonl"],
]


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere/x.json", "--json nowhere/x.json cannot be written: no folder nowhere; write another path"),
        ("file/x.json", "--json file/x.json cannot be written: file is no folder; write another path"),
        (".", "--json . cannot be written: it is a folder; write another path"),
        ("", "--json '': no name of a file; write --json out.json"),
    ],
)
def test_a_target_is_refused_before_any_work(tmp_path, monkeypatch, capsys, argv, target, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main([*argv, "--json", target]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {said}")


def test_a_target_that_is_there_is_left_until_there_is_something_to_write(tmp_path):
    target = tmp_path / "x.json"
    check_json(str(target))
    assert not target.exists()
    target.write_text("old")
    check_json(str(target))
    assert target.read_text() == "old"
    write_json('"é"\n', str(target))
    assert target.read_bytes() == '"é"\n'.encode()
    for fine in (None, "-", "/dev/null"):
        check_json(fine)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_told_as_the_command_is(tmp_path, capsys, monkeypatch):
    with pytest.raises(UserError, match="--json /dev/full cannot be written: No space left on device; write another"):
        write_json("{}", "/dev/full")

    def fail(args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(simulate_command, "run", fail)
    assert main(["simulate", "reasoning-32k"]) == 1
    said = "error: the disk is full ([Errno 28] No space left on device); free space, and run the command again\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("names", [[""], ["ledger", ""], ["april", " "]])
def test_an_empty_name_reproduces_nothing(capsys, names):
    assert main(["reproduce", *names]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: a name is empty, which every record would match; write part of one, or none for all\n"
    )


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_what_may_not_be_read_is_one_line_with_its_name(capsys, monkeypatch, number):
    def fail(args):
        raise OSError(number, os.strerror(number), "runs/x/metrics.jsonl")

    monkeypatch.setattr(config_command, "run", fail)
    assert main(["config"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: runs/x/metrics.jsonl: ")
    assert "not foreseen" not in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_rights_is_one_line(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    rows.chmod(0)
    for argv in (["check-data", str(rows)], ["replay", str(rows)]):
        assert main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {rows}: may not be read")


@pytest.mark.parametrize("redirect", [">&-", ">&- 2>&-"])
@pytest.mark.parametrize("argv", [["--version"], ["config", "--help-all"], ["reproduce", "ledger", "sync"]])
def test_closed_streams_are_no_error(argv, redirect):
    done = command(*argv, redirect=redirect)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("argv", [["check-data", "--help"], ["config", "--help-all"], ["plan", "--help"]])
def test_what_a_terminal_cannot_show_is_escaped(argv):
    done = command(*argv, env=ASCII)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("ascii")
    if "--help-all" in argv:
        assert b"\\u2026" in done.stdout


def test_json_is_json_whatever_the_terminal_can_show(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "é", "answer": "😀"}\n{"prompt": "é😀", "answer": 1}\n'.encode())
    argv = ["check-data", str(tmp_path / "rows.jsonl"), "--json", "-"]
    plain, narrow = (command(*argv, env=env) for env in ({"LC_ALL": "C.UTF-8"}, ASCII))
    assert json.loads(narrow.stdout.decode("ascii")) == json.loads(plain.stdout)


@pytest.mark.parametrize("env", [{"LC_ALL": "C.UTF-8"}, ASCII])
def test_names_are_shown_as_they_are(env):
    """Also a name that is no text in this locale: its bytes are its name."""
    for name in ("nö".encode(), b"b\xff"):
        done = command("explain", name, env=env)
        assert done.returncode == 2
        assert done.stderr.startswith(b"error: " + name + b" does not exist")


def test_json_beside_ascii_keeps_what_is_outside_of_it(monkeypatch, capsys):
    class Narrow:
        encoding = "ascii"

        def write(self, text):
            self.text = getattr(self, "text", "") + text

    monkeypatch.setattr(sys, "stdout", narrow := Narrow())
    write_json('{"a": "é😀"}\n', "-")
    assert json.loads(narrow.text) == {"a": "é😀"}
    assert narrow.text.isascii()
