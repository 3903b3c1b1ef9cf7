"""Addresses of running servers: what none could listen at is said before anything starts, in one line each."""

import pytest

from gruppetto.addresses import server_address
from gruppetto.config.schema import Config
from gruppetto.config.servers import engine_problems


def problems(*urls):
    parts = {"model": {"path": "m"}, "data": {"path": "d"}, "engine": {"type": "sglang", "urls": list(urls)}}
    return list(engine_problems(Config.model_validate(parts)))


@pytest.mark.parametrize(
    "url",
    [
        "http://[", "http://[::1", "http://x..y:1", "http://x:abc", "http://x:99999", "http://a b:1", "http://é:1",
        "http://h:1?x=1", "http://\0", "http://h:1/\r\n", 'http://h:1/"', "ftp://h:1", "h:1", "", "http://" + "a" * 300,
    ],
)  # fmt: skip
def test_what_is_no_address_is_said(url):
    assert server_address(url) is None
    (said,) = problems(url)
    assert said.startswith("engine.urls has ")
    assert "is no address of a server; write it as http://127.0.0.1:30000" in said


def test_what_is_one_passes():
    assert not problems("http://127.0.0.1:30000", "https://[::1]:8000/v2/", "http://engine_0.svc", "http://localhost/")


def test_one_server_is_one_engine_however_it_is_written():
    (said,) = problems("http://h:1", "http://h:1/")
    assert "names a server twice" in said
