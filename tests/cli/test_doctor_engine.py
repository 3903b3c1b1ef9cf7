"""`gruppetto doctor --engine`: what a running server can do, tried."""

import pytest

from gruppetto.cli.main import main

pytest.importorskip("torch", reason="needs the train extra")


def lines(capsys):
    out = capsys.readouterr().out.splitlines()
    return out[0], {line[4:26].split("  ")[0].strip(): line[:2] for line in out[1:]}


def test_the_table_of_our_own_server(tiny_model, capsys):
    from engines.contract.kinds import served

    with served(tiny_model, "--slots", "4", "--context", "512") as url:
        assert main(["doctor", "--engine", url, "--load", str(tiny_model)]) == 0
        head, table = lines(capsys)
    assert "SGLang gruppetto-" in head
    assert table.pop("tokens in and out") == "ok"
    missing = {name for name, mark in table.items() if mark != "ok"}
    assert not missing
    assert {"abort of one", "pause that keeps", "pause that aborts", "KV memory", "weights from disk"} <= set(table)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_table_of_vllm(tiny_model, capsys, shared_vllm):
    from engines.contract.vllm_server import need_vllm

    need_vllm()
    with shared_vllm.serving(tiny_model) as url:
        assert main(["doctor", "--engine", url, "--load", str(tiny_model)]) == 0
    head, table = lines(capsys)
    assert "vLLM 0." in head
    assert table["abort of one"] == table["pause that keeps"] == table["weights from disk"] == "ok"


def test_nobody_there(capsys):
    assert main(["doctor", "--engine", "http://127.0.0.1:9"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
