"""New weights over HTTP: whole or not at all, labels a token, and nothing unpickled."""

import base64
import json
import pickle

import pytest
import torch
from engines.kit import other_weights
from engines.serve.wire import LONG, decoding, generate, get, ok, packed, post, push, running, start
from safetensors.torch import save_file

from gruppetto.weights.checksum import checksum

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def other(tiny_model):
    return other_weights(tiny_model)


@pytest.fixture(scope="module")
def own(tiny_model):
    return other_weights(tiny_model, shift=0.0)


@pytest.fixture
async def back(http, tiny_model):
    """After the test the server has its first weights again."""
    yield
    await ok(http, "/pause_generation", {"mode": "abort"})
    await ok(http, "/update_weights_from_disk", {"model_path": str(tiny_model), "weight_version": "default"})
    await ok(http, "/continue_generation")


@pytest.mark.usefixtures("back")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_swap_with_requests_under_way_gives_each_token_its_version(http, held, other, own, mode):
    task, waiting = start(http, "r"), [start(http, f"w{i}") for i in range(4)]
    await running(http, 4, waiting=1)
    for version, model in ((7, other), (8, own)):
        await decoding(http, held)
        await ok(http, "/pause_generation", {"mode": mode})
        found = await push(http, model, str(version))
        assert found["success"] is True
        assert (await get(http, "/model_info"))[1]["weight_version"] == str(version)
        await ok(http, "/continue_generation")
    held.unlink()
    meta = (await task)[1]["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "7", "8"]
    edges = [meta["weight_versions"][0]["start"], *(span["end"] for span in meta["weight_versions"])]
    assert edges == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, 400)
    assert len(meta["token_versions"]) == 400
    assert [meta["token_versions"][edge] for edge in edges[:-1]] == ["default", "7", "8"]
    assert meta["weight_version"] == "8"
    assert len(meta["output_token_logprobs"]) == 400
    for other_task in waiting:
        assert (await other_task)[0] == 200


@pytest.mark.usefixtures("back")
async def test_after_a_swap_the_engine_is_the_new_model(http, other):
    prompt = [4, 5, 6]
    before = await generate(http, prompt, params=GREEDY, return_logprob=True)
    found = await push(http, other, "9")  # not paused: it waits until nothing runs
    assert found == {"success": True, "message": "Weights are updated."}
    after = await generate(http, prompt, params=GREEDY, return_logprob=True)
    with torch.no_grad():
        ids = torch.tensor([prompt + after["output_ids"]])
        told = other(ids).logits[0, 2:-1].log_softmax(-1)
    for at, (logprob, token, _) in enumerate(after["meta_info"]["output_token_logprobs"]):
        assert logprob == pytest.approx(float(told[at, token]), abs=1e-3)
    assert before["output_ids"] != after["output_ids"]
    assert after["meta_info"]["weight_version"] == "9"


async def test_outside_a_session_and_a_second_begin_are_refused(http, own):
    body = {"serialized_named_tensors": [packed(own.named_parameters())]}
    status, found = await post(http, "/update_weights_from_tensor", body)
    assert (status, found["success"]) == (400, False)
    assert "must run between begin_weight_update() and end_weight_update()" in found["message"]
    assert (await post(http, "/end_weight_update"))[0] == 400
    await ok(http, "/begin_weight_update", {"selector": "all"})
    assert (await post(http, "/begin_weight_update"))[0] == 400
    assert (await post(http, "/update_weights_from_disk", {"model_path": "x"}))[0] == 400
    assert (await post(http, "/end_weight_update"))[0] == 400  # nothing arrived
    assert (await post(http, "/end_weight_update"))[0] == 400


async def test_an_update_that_misses_a_tensor_or_is_damaged_leaves_the_old_version_whole(http, other, tiny_model):
    before = await generate(http, params=GREEDY)
    named = list(other.named_parameters())
    wrong = {
        "1 tensors never arrived": packed(named[:-1]),
        "does not have": packed([*named, ("nobody.weight", torch.zeros(2))]),
        "the model has": packed([(named[0][0], torch.zeros(3, 3)), *named[1:]]),
        "not a safetensors file": base64.b64encode(b"\x08\0\0\0\0\0\0\0{nothing}").decode(),
        "not base64": "&&&",
    }
    for says, payload in wrong.items():
        await ok(http, "/begin_weight_update")
        body = {"serialized_named_tensors": [payload], "flush_cache": False, "weight_version": "bad"}
        answers = [await post(http, "/update_weights_from_tensor", body), await post(http, "/end_weight_update")]
        assert {status for status, _ in answers} - {200} == {400}
        assert any(says in found["message"] for _, found in answers), (says, answers)
    await ok(http, "/begin_weight_update")
    body = {"serialized_named_tensors": [packed(named)], "checksum": checksum(named) ^ 1}
    status, found = await post(http, "/update_weights_from_tensor", body)
    assert status == 400
    assert "checksum" in found["message"]
    assert (await get(http, "/model_info"))[1]["weight_version"] == "default"
    assert (await generate(http, params=GREEDY))["output_ids"] == before["output_ids"]


class Bomb:
    """Would raise where it is unpickled."""

    def __reduce__(self):
        return eval, ("1/0",)


async def test_pickles_are_refused_unread(http, tmp_path):
    payloads = [pickle.dumps(Bomb(), protocol) for protocol in (2, 4, 5)]
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pt")
    payloads.append((tmp_path / "a.pt").read_bytes())
    for payload in payloads:
        await ok(http, "/begin_weight_update")
        body = {"serialized_named_tensors": [base64.b64encode(payload).decode()]}
        status, found = await post(http, "/update_weights_from_tensor", body)
        assert status == 400
        assert "is a pickle, which this server never loads" in found["message"]
    for name in ("flattened_bucket", "direct", "my.loader"):
        status, found = await post(http, "/update_weights_from_tensor", body | {"load_format": name})
        assert status == 400
        assert "pickle" in found["message"]
    body = {"serialized_named_tensors": ["", ""]}
    assert "1 rank" in (await post(http, "/update_weights_from_tensor", body))[1]["message"]


@pytest.mark.usefixtures("back")
async def test_a_flush_with_frozen_requests_is_refused_before_anything_changes(http, held, other):
    task = start(http, "r")
    await running(http, 1)
    await ok(http, "/pause_generation", {"mode": "in_place"})
    await ok(http, "/begin_weight_update")
    body = {"serialized_named_tensors": [packed(other.named_parameters())], "weight_version": "5"}
    status, found = await post(http, "/update_weights_from_tensor", body)
    assert status == 400
    assert "frozen in place" in found["message"]
    assert (await get(http, "/model_info"))[1]["weight_version"] == "default"
    await ok(http, "/update_weights_from_tensor", body | {"flush_cache": False})  # the session is still open
    await ok(http, "/end_weight_update")
    assert (await get(http, "/model_info"))[1]["weight_version"] == "5"
    await ok(http, "/abort_request", {"abort_all": True})
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.usefixtures("back")
async def test_from_disk_and_from_an_index_of_files(http, other, tmp_path):
    named = {name: tensor.detach() for name, tensor in other.named_parameters()}
    names = list(named)
    save_file({name: named[name] for name in names[::2]}, tmp_path / "a.safetensors")
    save_file({name: named[name] for name in names[1::2]}, tmp_path / "b.safetensors")
    index = {name: "ab"[at % 2] + ".safetensors" for at, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    body = {"model_path": str(tmp_path), "weight_version": "12", "load_format": "auto"}
    found = await ok(http, "/update_weights_from_disk", body)
    assert found == {"success": True, "message": "Weights are updated.", "num_paused_requests": 0}
    info = (await get(http, "/model_info"))[1]
    assert (info["model_path"], info["served_model_name"], info["weight_version"]) == (*[str(tmp_path)] * 2, "12")


async def test_folders_that_cannot_be_loaded(http, tmp_path):
    before = await generate(http, params=GREEDY)
    cases = {"has neither": tmp_path / "nowhere"}
    for name, text in (("outside", '{"weight_map": {"a": "../x.safetensors"}}'), ("broken", "[1"), ("odd", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors.index.json").write_text(text)
    cases |= {"beside it": tmp_path / "outside", "cannot be read": tmp_path / "broken", "be read": tmp_path / "odd"}
    for says, folder in cases.items():
        status, found = await post(http, "/update_weights_from_disk", {"model_path": str(folder)})
        assert (status, found["success"]) == (400, False)
        assert says in found["message"]
    for fields in ({"load_format": "dummy"}, {"is_async": True}, {"manifest": {}}, {"model_path": "a\0"}):
        body = {"model_path": str(tmp_path)} | fields
        assert (await post(http, "/update_weights_from_disk", body))[0] == 400
    assert (await generate(http, params=GREEDY))["output_ids"] == before["output_ids"]


async def test_a_label_alone_aborts_unless_told_not_to(http, held):
    task = start(http, "r")
    await running(http, 1)
    await ok(http, "/update_weight_version", {"new_version": "x", "abort_all_requests": False})
    assert not task.done()
    found = await ok(http, "/update_weight_version", {"new_version": "default"})
    assert found["success"] is True
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.usefixtures("back")
async def test_digests_tell_whether_the_weights_are_those(http, other):
    first = await ok(http, "/weights_checker", {"action": "checksum"})
    rank = first["ranks"][0]
    assert len(rank["checksums"]) == len(list(other.named_parameters()))
    assert (await post(http, "/weights_checker", {"action": "compare"}))[0] in (200, 400)  # no snapshot is 400
    await ok(http, "/weights_checker", {"action": "snapshot"})
    await ok(http, "/weights_checker", {"action": "compare"})
    await push(http, other)
    status, found = await post(http, "/weights_checker", {"action": "compare"})
    assert status == 400
    assert "tensors differ from the snapshot" in found["message"]
    assert (await ok(http, "/weights_checker", {"action": "checksum"}))["per_engine_checksum"] != first[
        "per_engine_checksum"
    ]
    await ok(http, "/weights_checker", {"action": "reset_tensors"})
    assert (await post(http, "/generate", {"input_ids": [1], "sampling_params": LONG}))[0] == 503
    await push(http, other)
    assert len((await generate(http))["output_ids"]) > 0


async def test_routes_that_need_a_process_group_say_so(http):
    for path in ("init_weights_update_group", "update_weights_from_distributed", "update_weights_from_ipc"):
        status, found = await post(http, f"/{path}", {"anything": 1})
        assert status == 400
        assert "update_weights_from_tensor" in found["error"]["message"]


@pytest.mark.usefixtures("back")
async def test_kv_is_shared_by_samples_but_never_by_versions(http, held, other):
    prompt, params = list(range(1, 60)), {"n": 4, "max_new_tokens": 30, "ignore_eos": True}
    held.unlink()
    shared = await generate(http, prompt, params=params)
    assert sorted(one["meta_info"]["cached_tokens"] for one in shared) == [0, 58, 58, 58]
    for swap in (True, False):
        held.touch()
        task = start(http, "r", prompt)
        await running(http, 1)
        await ok(http, "/pause_generation", {"mode": "in_place"})
        held.unlink()
        if swap:
            await push(http, other, "2")
        await ok(http, "/continue_generation")
        found = await generate(http, prompt, params=GREEDY, return_logprob=True)
        await ok(http, "/abort_request", {"rid": "r"})
        await task
        alone = await generate(http, prompt, params=GREEDY, return_logprob=True)
        assert alone["meta_info"]["cached_tokens"] == 0
        assert [p for p, *_ in found["meta_info"]["output_token_logprobs"]] == pytest.approx(
            [p for p, *_ in alone["meta_info"]["output_token_logprobs"]], abs=1e-4
        )
