"""Answers that no server should give: each is refused by name, in one line, and what is refused is not trained on."""

import pytest
from aiohttp import web

from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.engines.base import EngineFinish, GenerateRequest, Sampling
from gruppetto.engines.http.answers import result_of
from gruppetto.engines.http.build import http_engine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.wire import Made
from gruppetto.errors import EngineError, GruppettoError

GOOD = {"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 5, ""]]}}
DEEP = b'{"output_ids": ' + b"[" * 100_000


def request(max_tokens=10):
    return GenerateRequest(rid="a", token_ids=(1, 2), sampling=Sampling(max_tokens=max_tokens, seed=1))


def result(made, vocab=258):
    return result_of("e", request(), made, {"0": 0}, 0, None, vocab)


@pytest.mark.parametrize("token", [-1, 258, 1 << 31, 10**30])
def test_tokens_that_the_model_does_not_have(token):
    made = Made(ids=[5, token], logprobs=[-1.0, -1.0], finish=EngineFinish.LENGTH)
    with pytest.raises(EngineError, match=rf"request a: token {token} came, and the model in model.path has 0 to 257"):
        result(made)
    if not 0 <= token < 1 << 31:
        with pytest.raises(EngineError, match="came, and the model"):
            result(made, vocab=0)


def test_the_last_token_of_the_model_is_one():
    assert result(Made(ids=[257], logprobs=[-1.0], finish=EngineFinish.LENGTH)).num_tokens == 1


@pytest.mark.parametrize("value", [-1e300, float("-inf"), float("nan"), 1.0])
def test_logprobs_that_float32_does_not_hold(value):
    with pytest.raises(EngineError, match="a logprob is"):
        result(Made(ids=[5], logprobs=[value], finish=EngineFinish.LENGTH))


def test_an_end_without_a_token():
    for finish in (EngineFinish.LENGTH, EngineFinish.STOP):
        with pytest.raises(EngineError, match=f"no token of 10 came, and its finish is {finish}"):
            result(Made(ids=[], logprobs=[], finish=finish))
    assert result(Made(ids=[], logprobs=[], finish=EngineFinish.ABORT)).num_tokens == 0


@pytest.mark.parametrize("cached", [-5, 10**30])
def test_no_more_is_cached_than_was_sent(cached):
    assert result(Made(ids=[5], logprobs=[-1.0], finish=EngineFinish.LENGTH, cached=cached)).cached_tokens in (0, 2)


def test_the_model_may_have_more_tokens_than_its_tokenizer(tiny_model):
    assert HFTokenizer(tiny_model).model_ids == 258


@pytest.fixture
async def engine(tmp_path):
    """engine(status, body, headers) -> an engine whose server answers well until it is connected, and then so."""
    stack = []

    async def start(status, body, headers=None):
        said = []

        async def generate(request):
            said.append(request)
            if len(said) == 1:
                return web.json_response(GOOD)
            return web.Response(status=status, body=body, headers=headers)

        async def info(request):
            return web.json_response({"weight_version": "default", "loads": 5})

        app = web.Application()
        app.router.add_post("/generate", generate)
        for path in ("/model_info", "/server_info", "/ready", "/v1/loads"):
            app.router.add_get(path, info)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        settings = HttpSettings(slots=2, context=64, vocab=258)
        found = http_engine("sglang", "odd", settings, Staging(tmp_path, tmp_path), url=url)
        stack.extend([runner.cleanup, found.close])
        await found.start()
        return found

    yield start
    while stack:
        await stack.pop()()


@pytest.mark.parametrize("rows", [b"[[null]]", b'[["x"]]', b"[[]]", b"[[[1]]]", b"[[{}]]"])
async def test_a_row_that_begins_with_no_logprob(engine, rows):
    body = (
        b'{"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": %b}}' % rows
    )
    with pytest.raises(EngineError, match=r"output_token_logprobs holds .*, which does not begin with a logprob"):
        await (await engine(200, body)).generate(request())


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"<html>", b"null", b"[1]", b'{"output_ids"', DEEP, b'{"text": 5}'])
async def test_an_answer_that_is_none(engine, body):
    with pytest.raises(EngineError, match="an answer of /generate is not SGLang's"):
        await (await engine(200, body)).generate(request())


async def test_a_server_that_sends_on_is_named_with_where_to(engine):
    odd = await engine(302, b"", {"Location": "http://elsewhere:1/generate"})
    with pytest.raises(GruppettoError, match=r"answered 302: .*; it sends on to http://elsewhere:1/generate: name the"):
        await odd.generate(request())


async def test_an_error_without_a_bottom(engine):
    odd = await engine(400, b"[" * 100_000)
    with pytest.raises(GruppettoError, match="answered 400"):
        await odd.generate(request())
