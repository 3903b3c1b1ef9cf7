"""What of [engine] does not go together is said before anything starts."""

import sys

import pytest

from gruppetto.config.schema import Config
from gruppetto.config.servers import engine_problems


def problems(engine, **more):
    return list(engine_problems(Config.model_validate({"engine": engine, **more})))


SERVE = ["gruppetto", "serve", "{model}", "--port", "{port}"]


@pytest.mark.parametrize(
    ("engine", "more", "said"),
    [
        ({"args": {"x": 1}}, {}, "the embedded engine takes none"),
        ({"urls": ["http://h:1"]}, {}, "engine.type = 'sglang'"),
        ({"stream": True}, {}, "is for servers"),
        ({"type": "sglang", "urls": ["http://h:1"], "args": {"x": 1}}, {}, "leave one of the two out"),
        ({"type": "sglang", "urls": ["http://h:1"], "count": 3}, {}, "leave engine.count out"),
        ({"type": "sglang", "urls": ["http://h:1", "http://h:1"]}, {}, "twice"),
        ({"type": "sglang", "urls": ["h:1"]}, {}, "write it as http://"),
        ({"type": "vllm", "python": "/no/python"}, {}, "is no program"),
        ({"type": "vllm"}, {}, "needs vllm"),
        ({"type": "sglang", "command": ["/no/such", "{port}"]}, {}, "no program here"),
        ({"type": "sglang", "command": [sys.executable]}, {}, "put {port} into it"),
        ({"type": "sglang", "command": [sys.executable, "{port}"], "python": "p"}, {}, "leave engine.python out"),
        (
            {"type": "sglang", "command": [sys.executable, "{port}"]},
            {"run": {"deterministic": True}},
            "at its own pace",
        ),
        ({"type": "vllm", "python": sys.executable}, {"weights": {"channel": "shm"}}, "weights from disk; write"),
        ({"type": "vllm", "python": sys.executable}, {"weights": {"mode": "delta"}}, "weights.mode = 'full'"),
        ({"type": "sglang", "urls": ["http://h:1"]}, {"weights": {"channel": "inprocess"}}, "is a server"),
        ({}, {"weights": {"release_kv": True, "pause": "keep"}}, "write weights.pause = 'abort'"),
        ({}, {"weights": {"release_kv": True}, "run": {"placement": "disaggregated"}}, "write weights.pause = 'abort'"),
        (
            {"type": "vllm", "python": sys.executable},
            {"rollout": {"temperature": 0.7, "top_p": 0.9}},
            "write rollout.temperature = 1.0",
        ),
    ],
)
def test_each_problem_is_one_line_with_what_to_write(engine, more, said):
    found = problems(engine, **more)
    assert len(found) == 1
    assert said in found[0]
    assert "\n" not in found[0]


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ({}, {}),
        ({"type": "sglang", "urls": ["http://127.0.0.1:30000", "https://other"]}, {}),
        ({"type": "sglang", "urls": ["http://a:1", "http://b:1"], "count": 2}, {}),
        ({"type": "vllm", "python": sys.executable, "args": {"enforce_eager": True}}, {}),
        ({"type": "vllm", "python": sys.executable}, {"rollout": {"temperature": 0.7}}),
        ({"type": "vllm", "python": sys.executable}, {"rollout": {"top_p": 0.9}}),
        ({"type": "sglang", "command": [sys.executable, *SERVE[1:]]}, {"weights": {"channel": "disk"}}),
        ({"type": "sglang", "command": [sys.executable, *SERVE[1:]]}, {"weights": {"channel": "shm", "mode": "delta"}}),
        ({"type": "sglang", "urls": ["http://h:1"]}, {"weights": {"channel": "gloo"}}),
        ({}, {"weights": {"release_kv": True}}),
    ],
)
def test_what_goes_together_is_let_through(engine, more):
    assert problems(engine, **more) == []
