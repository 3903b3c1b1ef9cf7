"""`gruppetto doctor --engine`: what a running server can do, tried."""

import asyncio
import json

import pytest
from engines.contract.scripted import Scripted

from gruppetto.cli.main import main

pytest.importorskip("torch", reason="needs the train extra")


def tried(capsys, url, model, out):
    """The first line, the marks by capability, and what was written."""
    assert main(["doctor", "--engine", url, "--load", str(model), "--out", str(out)]) == 0
    head, *rows, written = capsys.readouterr().out.splitlines()
    assert written == f"written: {out}"
    return head, {row[4:26].split("  ")[0].strip(): row[:2].strip() for row in rows}


PROMISED = {
    "tokens in and out", "abort of one", "abort of all", "pause that keeps", "pause that aborts", "KV memory",
    "versions per token", "weights from disk", "counters",
}  # fmt: skip


def test_the_table_of_our_own_server(tiny_model, capsys, tmp_path):
    from engines.contract.kinds import served

    out = tmp_path / "engine.md"
    with served(tiny_model, "--slots", "4", "--context", "512") as url:
        head, table = tried(capsys, url, tiny_model, out)
    assert "SGLang gruppetto-" in head
    assert set(table.values()) == {"ok"}
    assert set(table) >= PROMISED
    rows = [line.split(" | ")[:2] for line in out.read_text().splitlines() if line.startswith("| ")]
    assert [[f"| {name}", "yes"] for name in table] == rows[1:]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_table_of_vllm(tiny_model, capsys, tmp_path, shared_vllm):
    from engines.contract.vllm_server import need_vllm

    need_vllm()
    out = tmp_path / "engine.json"
    with shared_vllm.serving(tiny_model) as url:
        head, table = tried(capsys, url, tiny_model, out)
    assert "vLLM 0." in head
    assert set(table) >= PROMISED
    assert {name for name, mark in table.items() if mark != "ok"} == {"KV memory"}
    written = json.loads(out.read_text())
    assert written["kind"] == "vllm"
    rows = {row["capability"]: row for row in written["capabilities"]}
    assert {name for name, row in rows.items() if row["works"]} == set(table) - {"KV memory"}
    assert "not supported on CPU" in rows["KV memory"]["says"]


@pytest.mark.parametrize("load", [False, True])
async def test_a_paused_server_is_left_alone(tiny_model, capsys, load):
    """A trainer may be in the middle of a publish to it."""
    server = await Scripted(invalid=True).open()
    server.mode = "abort"
    more = ["--load", str(tiny_model)] if load else []
    try:
        assert await asyncio.to_thread(main, ["doctor", "--engine", server.url, *more]) == 2
    finally:
        await server.close()
    said = capsys.readouterr().err
    assert "is paused" in said
    assert f"{server.url}/continue_generation" in said
    assert not [path for path, body in server.log if path not in ("/model_info", "/ready")]


def test_a_table_has_a_place(tmp_path, capsys):
    for out, said in ((tmp_path / "a.toml", "a.md"), (tmp_path / "none" / "a.md", "no folder")):
        assert main(["doctor", "--engine", "http://127.0.0.1:9", "--out", str(out)]) == 2
        assert said in capsys.readouterr().err


def test_nobody_there(capsys):
    assert main(["doctor", "--engine", "http://127.0.0.1:9"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
