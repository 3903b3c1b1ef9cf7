"""Whatever is sent, the answer is never a 500, and the server goes on serving."""

import json
import urllib.error
import urllib.request

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gruppetto.engines.serve.chat import ChatBody
from gruppetto.engines.serve.completions import CompletionBody
from gruppetto.engines.serve.generate import GenerateBody
from gruppetto.engines.serve.routes import ROUTES, Level
from gruppetto.engines.serve.sampling import SamplingParams

FIELDS = sorted(
    {name for body in (ChatBody, CompletionBody, GenerateBody) for name in body.__struct_fields__}
    | {"rid", "abort_all", "tags", "mode", "action", "serialized_named_tensors", "new_version", "flush_cache", "role"}
)
LEAF = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
    | st.sampled_from(["retract", "in_place", "weights", "checksum", "gASV", "auto", "user"])
)  # fmt: skip
PARAMS = st.dictionaries(
    st.sampled_from(SamplingParams.__struct_fields__), LEAF | st.lists(LEAF, max_size=3), max_size=4
)
VALUE = st.recursive(LEAF | PARAMS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), v))
SMALL = {"max_new_tokens": 2}
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "input_ids": st.lists(st.integers(-1, 300), max_size=4) | st.lists(st.lists(st.integers(0, 300), max_size=3)),
        "text": st.text(max_size=5),
        "prompt": st.text(max_size=5),
        "messages": st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), VALUE), max_size=2),
        "sampling_params": st.just(SMALL) | PARAMS.map(lambda p: p | SMALL),
        "max_tokens": st.just(2),
        "stream": st.booleans(),
        "return_logprob": st.booleans(),
        "n": st.integers(-1, 3),
    },
)
BODY = VALUE.map(json.dumps) | st.dictionaries(st.sampled_from(FIELDS), VALUE, max_size=4).map(json.dumps)
LIKE = st.tuples(LIKELY, st.dictionaries(st.sampled_from(FIELDS), VALUE, max_size=1)).map(
    lambda pair: pair[0] | pair[1]
)
DEEP = st.sampled_from([b"[" * 50000, b'{"a":' * 30000, b"1e999", b'{"text": "\\ud800"}', b'"\xff"'])
RAW = (LIKE.map(json.dumps) | BODY).map(str.encode) | st.binary(max_size=30) | DEEP
CHANGES = [route.path for route in ROUTES if route.level is Level.CONTROL and "abort" not in route.path]
PATHS = [
    (method, route.path) for route in ROUTES for method in route.methods if "update_weights_from_disk" not in route.path
]


def send(url, method, path, body):
    request = urllib.request.Request(url + path, data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PATHS) | st.sampled_from([p for p in PATHS if p[1] in ("/generate", "/v1/completions")]), RAW)
def test_no_input_is_a_500_and_the_server_goes_on(process_url, tiny_model, where, body):
    try:
        status, said = send(process_url, *where, body)
        assert status < 500 or status == 503, (status, said)
        assert b'"code":500' not in said
    finally:  # what the input may have done: paused, opened an update, released memory, changed the label
        if where[1] in CHANGES:
            send(process_url, "POST", "/end_weight_update", b"")
            send(process_url, "POST", "/resume_memory_occupation", b"")
            weights = json.dumps({"model_path": str(tiny_model), "weight_version": "default"}).encode()
            assert send(process_url, "POST", "/update_weights_from_disk", weights)[0] == 200
            assert send(process_url, "POST", "/continue_generation", b"")[0] == 200
    assert send(process_url, "GET", "/ready", None)[0] == 200
