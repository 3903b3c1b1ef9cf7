"""`gruppetto doctor --engine`: what a running server can do, tried."""

import asyncio
import gc
import json
import shutil

import pytest
from aiohttp import web
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


def changed(model, folder, change):
    """A copy of a model folder whose tensors went through `change`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def kept_head(tensors):
    """Everything is new but the head, which was packed away at the start."""
    import torch

    embedding = tensors["model.embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1))
    return tensors | {"lm_head.weight": embedding + 0.02 * noise}


def exchanged_halves(tensors):
    """gate and up, which one loader stacks and another one cuts, the other way round."""
    names = {name: name.replace("gate_proj", "?").replace("up_proj", "gate_proj") for name in tensors}
    return {name.replace("?", "up_proj"): tensors[old] for old, name in names.items()}


@pytest.mark.parametrize("wrong", [None, kept_head, exchanged_halves])
def test_logprobs_tell_right_weights_from_wrong_ones(tiny_model, tmp_path, capsys, monkeypatch, wrong):
    """Whatever the server says of itself: it is compared with the folder, and nothing is written unasked."""
    from engines.contract.kinds import served

    monkeypatch.chdir(tmp_path)
    folder = tiny_model if wrong is None else changed(tiny_model, tmp_path / "wrong", wrong)
    with served(folder, "--slots", "4", "--context", "512") as url:
        assert main(["doctor", "--engine", url, "--model", str(tiny_model)]) == 0
        (row,) = (line for line in capsys.readouterr().out.splitlines() if "logprobs compared" in line)
        assert row.startswith("ok" if wrong is None else "no")
        assert "mismatch_kl" in row
    assert [path.name for path in tmp_path.iterdir()] == ([] if wrong is None else ["wrong"])


def test_a_load_that_a_server_ignores_is_seen(tiny_model, capsys):
    """The scripted one says that it took the weights, and makes tokens of none."""

    async def run():
        server = await Scripted().open()
        try:
            return await asyncio.to_thread(main, ["doctor", "--engine", server.url, "--load", str(tiny_model)])
        finally:
            await server.close()

    assert asyncio.run(run()) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "weights from disk" in line)
    assert row.startswith("no")
    assert "mismatch_kl" in row


def test_without_torch_a_load_is_not_compared(tiny_model, capsys, monkeypatch):
    from gruppetto.cli import doctor_compare

    monkeypatch.setattr(doctor_compare, "NEEDS", ("no_such_package",))

    async def run():
        server = await Scripted().open()
        try:
            return await asyncio.to_thread(main, ["doctor", "--engine", server.url, "--load", str(tiny_model)])
        finally:
            await server.close()

    assert asyncio.run(run()) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "weights from disk" in line)
    assert row.endswith(f"loaded {tiny_model}, not compared: no_such_package is not installed")
    assert main(["doctor", "--engine", "http://127.0.0.1:9", "--model", str(tiny_model)]) == 2
    assert "--model needs no_such_package" in capsys.readouterr().err


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


class WithoutControl(Scripted):
    """Its control routes are on a port of their own, or behind a proxy that has none."""

    async def abort(self, request, body):
        raise web.HTTPNotFound

    pause = abort


async def test_what_one_step_left_running_is_not_in_the_way_of_the_next(capsys, caplog):
    server = await WithoutControl().open()
    try:
        assert await asyncio.to_thread(main, ["doctor", "--engine", server.url]) == 0
    finally:
        await server.close()
    gc.collect()
    rows = {row[4:26].split("  ")[0].strip(): row for row in capsys.readouterr().out.splitlines()[1:]}
    for name in ("abort of one", "abort of all", "pause that keeps"):
        assert rows[name].startswith("no ")
        assert "404" in rows[name]
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("url", ["localhost:30000", "127.0.0.1", "http://"])
def test_an_address_without_its_scheme_is_refused(capsys, url):
    assert main(["doctor", "--engine", url]) == 2
    said = f"error: --engine {url} is no address of a server; write it as http://127.0.0.1:30000\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("url", ["localhost:8000", "http://[", "http://a:99999", "http://a b"])
def test_doctor_takes_the_same_addresses(capsys, url):
    assert main(["doctor", "--engine", url]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert "is no address of a server" in said


def test_the_base_install_tries_a_server_to_its_end(tiny_model):
    """All but the comparison, which needs a model to compute with."""
    from cli.test_without_extras import base_install
    from engines.contract.kinds import served

    with served(tiny_model, "--slots", "4", "--context", "512") as url:
        done = base_install(f"doctor --engine {url} --load {tiny_model}")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line for line in done.stdout.splitlines()[1:] if not line.startswith("ok ")]
    assert rows == []
    assert "not compared: torch is not installed" in done.stdout
