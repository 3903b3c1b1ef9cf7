"""Malformed traces: one line each, with the file, the row and what to write instead."""

import json
import os
from pathlib import Path

import pytest

from gruppetto.errors import UserError
from gruppetto.sim.replay import read_trace

OURS = '{"rollout": "g0.0", "group": 0, "fate": "trained", "tokens": %s}\n'
VERL = '{"input": "p", "output": %s, "score": %s, "step": 1, "response_length": %s}\n'
SLIME = '{"rollout_id": 1, "samples": %s}'

FILES = {
    "empty": (b"", r"t is empty; write a run folder or a rollout dump"),
    "blank": (b" \n\n", r"t is empty"),
    "cut off": (b'{"length": 3}\n{"length": 4', r"t row 2: is cut off"),
    "not json": (b'{"length": 3}\n{"length": }\n', r"t row 2: is not JSON"),
    "not an object": (b'{"length": 3}\n[4]\n', r"t row 2: holds a list"),
    "array": (b'[{"length": 3}]', r"t line 1 begins a JSON array"),
    "nan": (b'{"length": NaN}\n', r"t row 1: NaN is not a JSON value"),
    "latin-1": (b'{"length": 3, "task": "\xe9"}\n', r"t row 1: byte 0xe9 at column 24 is not UTF-8"),
    "latin-1 csv": (b"length,task\n3,\xe9\n", r"t: byte 0xe9 is not UTF-8"),
    "no length": (b'{"a": 3, "b": 4}\n', r"t has no length column among a, b; name it one of length, response_length"),
    "two lengths": (
        b"tokens,length\n3,4\n",
        r"t: length and tokens could each be the length; say which: --column length=",
    ),
    "negative": (b"length\n4\n-3\n", r"t row 3: length = '-3' is no count"),
    "fraction": (b'{"length": 3.5}\n', r"t row 1: length = 3\.5 is no count"),
    "word": (b"length\nmany\n", r"t row 2: length = 'many' is not a number"),
    "inf": (b"length\ninf\n", r"t row 2: length = 'inf' is not a number"),
    "1e308": (b"length\n1e308\n", r"t row 2: length = '1e308' is not a number \(of 1e\+30 at most\)"),
    "long integer": (b'{"length": 1%s}\n' % (b"0" * 400), r"t row 1: length = 10+… is not a number"),
    "10^12 tokens": (b"length\n1e12\n", r"t row 2: length = '1e12' is more than any model writes; write tokens"),
    "10^12 tokens of a prompt": (
        b"length,prompt_tokens\n3,1e12\n",
        r"t row 2: prompt_tokens = '1e12' is more than any",
    ),
    "10^12 tokens of a turn": (
        b'{"turns": [{"tokens": 1000000000000}]}\n',
        r"t row 1 turn 0: tokens = 10+ is more than",
    ),
    "10^12 seconds": (b"length,tool_s\n3,1e12\n", r"t row 2: tool_s = '1e12' is longer than any tool; write seconds"),
    "1e300 of reward": (b"length,reward\n3,-1e300\n", r"t row 2: reward = '-1e300' is not a number"),
    "deep json": (b'{"samples": %s' % (b"[" * 99_999), r"t row 1: maximum recursion depth"),
    "boolean": (b'{"length": true}\n', r"t row 1: length = True is not a number"),
    "list": (b'{"length": [3]}\n', r"t row 1: length = \[3\] is not a number"),
    "empty length": (b"group,length\n0,\n", r"t row 2: length is empty; write the model tokens"),
    "empty group": (b"group,length\n,3\n", r"t row 2: group is empty; write the group"),
    "empty member": (b"group,member,length\n0,,3\n", r"t row 2: member is empty; number the members"),
    "group of objects": (b'{"group": {}, "length": 3}\n', r"t row 1: group holds a dict; write a name or a number"),
    "negative seconds": (b"length,tool_s\n3,-1\n", r"t row 2: tool_s = '-1' is no time"),
    "no rows": (b"group,length\n", r"t holds no rows; write one for each rollout"),
    "no header": (b"3,4\n5,6\n", r"t row 1 holds values, not column names; write a header such as"),
    "column twice": (b"length,length\n3,4\n", r"t row 1 names column 'length' twice"),
    "too few fields": (b"group,length\n0,3\n0\n", r"t row 3: has 1 fields, but the header names 2"),
    "too many fields": (b"group,length\n0,3,9\n", r"t row 2: has 3 fields, but the header names 2"),
    "open quote": (b'group,length\n"0,3\n', r"t row \d: is no CSV"),
    "member twice": (
        b"group,member,length\n0,0,3\n0,1,4\n0,0,5\n",
        r"t row 4: repeats member 0 of the group of .*t row 2;",
    ),
    "turn twice": (b"group,member,turn,length\n0,0,0,3\n0,0,0,4\n", r"t row 3: repeats turn 0 of .*t row 2;"),
    "empty turn": (b"group,member,turn,length\n0,0,,3\n", r"t row 2: turn is empty"),
    "turn without member": (
        b"group,turn,length\n0,0,3\n",
        r"t row 2: a row is a turn \(turn\), but no column .* named member",
    ),
    "turns are numbers": (b'{"turns": [3, 4]}\n', r"t row 1: turns is no list of objects"),
    "no turns": (b'{"turns": []}\n', r"t row 1: turns is no list of objects; .* at least one"),
    "turn without tokens": (b'{"turns": [{"env_s": 1}]}\n', r"t row 1 turn 0: has no model tokens"),
    "turn below 0": (b'{"turns": [{"tokens": 1}, {"tokens": -1}]}\n', r"t row 1 turn 1: tokens = -1 is no count"),
    "turns do not add up": (b'{"length": 5, "turns": [{"tokens": 4}]}\n', r"t row 1: length = 5, but its turns make 4"),
    "ours without tokens": (OURS % "null", r"t row 1: has no tokens; this is no row of a run's"),
    "ours with bad turns": (OURS % '3, "turns": [4]', r"t row 1: turns is no list of \[model tokens"),
    "verl output": (VERL % ("3", "1", "4"), r"t row 1: input and output are not both text"),
    "verl score": (VERL % ('"a"', '"good"', "4"), r"t row 1: score = 'good' is not a number"),
    "verl length": (VERL % ('"a"', "1", "null"), r"t row 1: response_length is empty"),
    "slime without samples": (SLIME % "[]", r"t is no slime debug rollout: it has no samples"),
    "slime of numbers": (SLIME % "[3]", r"t sample 0: holds a int; write Sample\.to_dict"),
    "slime without length": (SLIME % '[{"status": "completed"}]', r"t sample 0: response_length is empty"),
    "slime too short": (SLIME % '[{"response_length": 3, "tokens": [1]}]', r"t sample 0: .* there are only 1 tokens"),
    "other json": (b'{\n "a": 1\n}\n', r"t is no slime debug rollout"),
    "damaged indented json": (b'{\n "a": \n', r"t row 1: is not JSON"),
}


@pytest.mark.parametrize("name", FILES)
def test_each_malformed_file_is_one_line_with_file_and_row(tmp_path, name):
    content, message = FILES[name]
    (tmp_path / "t").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        read_trace(tmp_path / "t")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match=r"there is no trace at .*gone; write a run folder"):
        read_trace(tmp_path / "gone")
    with pytest.raises(UserError, match=r"is no run folder and holds no numbered dumps such as 12\.jsonl"):
        read_trace(tmp_path)


def test_what_is_no_file_is_one_line(tmp_path):
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "1.jsonl").write_text('{"length": 3}\n')
    (tmp_path / "dumps" / "2.jsonl").symlink_to("nothing")
    with pytest.raises(UserError, match=r"dumps/2\.jsonl is a link to nothing, and a trace is a file"):
        read_trace(tmp_path / "dumps")
    (tmp_path / "dumps" / "2.jsonl").unlink()
    (tmp_path / "dumps" / "2.csv").mkdir()
    with pytest.raises(UserError, match=r"dumps/2\.csv is a folder, and a trace is a file"):
        read_trace(tmp_path / "dumps")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UserError, match="is a pipe or a device, and a trace is a file that is read more than once"):
            read_trace(path)
    with pytest.raises(UserError, match="there is no trace at ''; write a run folder"):
        read_trace("")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "t").write_text('{"length": 3}\n')

    def broken(path, *args, **named):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", broken)
    with pytest.raises(UserError, match=r"t cannot be read: permission denied; write a run folder"):
        read_trace(tmp_path / "t")


def test_a_name_that_is_no_text(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xe9.csv")
    Path(path).write_text("length\n3\n")
    with pytest.raises(UserError, match=r"the name of .*\\udce9\.csv is no text in UTF-8; rename it"):
        read_trace(path)


@pytest.mark.parametrize("text", ["length\n0\n0\n", '{"length": 0}\n{"length": 0}\n'])
def test_where_nobody_made_a_token_that_is_said(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(UserError, match=r"t: no rollout made a token \(its 2 lengths are all 0\); write the tokens"):
        read_trace(tmp_path / "t").workload()


@pytest.mark.parametrize("characters", [0, -1, 1e-300, 1e9, float("inf"), float("nan")])
def test_characters_that_no_token_has(tmp_path, characters):
    (tmp_path / "t").write_text(VERL.replace(', "response_length": %s', "") % ('"abcd"', "1"))
    with pytest.raises(UserError, match=r"characters_per_token = .* cannot be; write a number from 0\.1 to 100"):
        read_trace(tmp_path / "t", characters_per_token=characters)
    assert read_trace(tmp_path / "t", characters_per_token=100).rollouts[0].tokens == 1


# -- what says nothing of a trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        (VERL % ('"a"', "1", "3"), ("foo", "input"), "foo is no role; write one of"),
        (
            VERL % ('"a"', "1", "3"),
            ("turn", "input"),
            r"is a verl dump, .* turn says nothing; leave it out \(there are",
        ),
        (VERL % ('"a"', "1", "3"), ("group", "uid"), "but .*t has input, output"),
        (OURS % 3, ("length", "tokens"), "is a rollouts file of ours, whose fields are known; leave it out"),
        (SLIME % '[{"response_length": 3}]', ("length", "x"), "is a slime dump, whose fields are known; leave it out"),
        ("length,m\n3,0\n", ("member", "m"), "says nothing of .*t: no column says which group a member belongs to"),
        (
            "group,member,turn,length,t\n0,0,0,3,0\n",
            ("turns", "t"),
            r"says nothing of .*t: its rows are turns \(turn\)",
        ),
    ],
)
def test_a_column_that_nobody_takes_notice_of_is_refused(tmp_path, text, column, said):
    (tmp_path / "t").write_text(text)
    role, name = column
    with pytest.raises(UserError, match=rf"^--column {role}={name}.*{said}"):
        read_trace(tmp_path / "t", columns={role: name})


def test_options_of_a_trace_say_nothing_of_a_run_folder_or_of_tokens(tmp_path):
    (tmp_path / "config.resolved.json").write_text('{"rollout": {"max_tokens": 9}}')
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(OURS % 3)
    with pytest.raises(UserError, match=r"--column length=tokens: .* is a run folder, whose fields are known"):
        read_trace(tmp_path, columns={"length": "tokens"})
    (tmp_path / "t").write_text("length\n3\n")
    for path in (tmp_path, tmp_path / "t"):
        with pytest.raises(UserError, match=r"--characters-per-token 4: the lengths of .* are tokens; leave it out"):
            read_trace(path, characters_per_token=4)


def test_columns_of_a_verl_dump_play_the_roles_they_are_given(tmp_path):
    rows = [{"input": "p", "output": "x", "score": 1, "step": 1, "uid": uid, "n": n} for n, uid in enumerate("aabb", 3)]
    (tmp_path / "t").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(tmp_path / "t", columns={"length": "n", "group": "uid", "tool": "n", "reward": "n"})
    assert [(r.group, r.member, r.tokens, r.tool_s, r.reward) for r in trace.rollouts] == [
        (0, 0, 3, 3, 3), (0, 1, 4, 4, 4), (1, 0, 5, 5, 5), (1, 1, 6, 6, 6)
    ]  # fmt: skip
    assert not any("group" in word for word in trace.missing)
    assert any("group" in word for word in read_trace(tmp_path / "t", columns={"length": "n"}).missing)


def test_observations_without_turns_are_left_out_and_that_is_said(tmp_path):
    (tmp_path / "t").write_text("length,obs_tokens\n3,9\n")
    assert (
        "after which turns the tokens of obs_tokens were read (they are left out)" in read_trace(tmp_path / "t").missing
    )


def test_a_run_without_rollouts_or_with_a_damaged_config(tmp_path):
    (tmp_path / "config.resolved.json").write_text('{"rollout": {}}')
    with pytest.raises(UserError, match="no step was finished"):
        read_trace(tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(OURS % 3)
    with pytest.raises(UserError, match=r"config\.resolved\.json is damaged: it has no rollout\.max_tokens"):
        read_trace(tmp_path)
    (tmp_path / "config.resolved.json").write_text('{"rollout": {"max_tokens": 9}}')
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no rollouts"):
        read_trace(tmp_path)
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text((OURS % 3) + OURS % "-1")
    with pytest.raises(UserError, match=r"step_000001\.jsonl row 2: tokens = -1 is no count"):
        read_trace(tmp_path)


def test_columns_that_cannot_be_mapped(tmp_path):
    (tmp_path / "t").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"^--column lenght=a: lenght is no role; write --column length=a \(there are"):
        read_trace(tmp_path / "t", columns={"lenght": "a"})
    with pytest.raises(UserError, match=r"^--column foo=a: foo is no role; write one of length, group, member, turn"):
        read_trace(tmp_path / "t", columns={"foo": "a"})
    with pytest.raises(UserError, match=r"--column length=c, but .*t has a, b; write one of those"):
        read_trace(tmp_path / "t", columns={"length": "c"})
    (tmp_path / "t").write_text(VERL % ('"a"', "1", "3"))
    with pytest.raises(UserError, match=r"--column length=c, but .*t has input, output"):
        read_trace(tmp_path / "t", columns={"length": "c"})
    with pytest.raises(UserError, match="characters_per_token = 0 cannot be"):
        read_trace(tmp_path / "t", characters_per_token=0)


def test_a_pytorch_file_without_pytorch(tmp_path, monkeypatch):
    (tmp_path / "t.pt").write_bytes(b"PK\x03\x04rest")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(UserError, match=r"t\.pt, a PyTorch file, needs torch, .*\[train\]"):
        read_trace(tmp_path / "t.pt")


def test_a_damaged_pytorch_file_and_one_that_holds_code(tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "t.pt").write_bytes(b"PK\x03\x04rest")
    with pytest.raises(UserError, match=r"t\.pt cannot be read as a PyTorch file of plain data"):
        read_trace(tmp_path / "t.pt")
    torch.save({"samples": [_Touches(str(tmp_path / "ran"))]}, tmp_path / "t.pt")
    with pytest.raises(UserError, match=r"t\.pt cannot be read as a PyTorch file of plain data") as caught:
        read_trace(tmp_path / "t.pt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


class _Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_the_base_install_reads_what_needs_no_pytorch(tmp_path):
    import subprocess
    import sys

    (tmp_path / "t").write_text(
        json.dumps({"rollout_id": 1, "samples": [{"response_length": 3, "status": "completed"}]})
    )
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gruppetto.sim.replay import read_trace\n"
        f"print(read_trace({str(tmp_path / 't')!r}).summary().tokens)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"
