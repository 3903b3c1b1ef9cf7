"""Growing text and tool calls: pieces and the whole agree."""

import json

from hypothesis import given
from hypothesis import strategies as st

from gruppetto.engines.serve.text import GrowingText, plain
from gruppetto.engines.serve.tools import ToolCalls


def decode(ids):
    return bytes(ids).decode(errors="replace")


def cuts(data, length):
    points = sorted(data.draw(st.lists(st.integers(0, length), max_size=8)))
    return [*points, length]


@given(st.text(max_size=40), st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3), st.data())
def test_growing_text_is_a_growing_part_of_the_whole(text, stops, data):
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    end, stop = min(ends, default=(len(text), None))
    ids = list(text[:end].encode())
    whole = plain(decode, ids, stop, True)
    seen = ids if stop is None else ids[:-1]  # a request whose stop string is whole has ended
    growing, shown, at = GrowingText(decode, stops), "", 0
    for cut in cuts(data, len(seen)):
        now = growing.push(seen[at:cut])
        at = cut
        assert now.startswith(shown)
        shown = now
    assert whole.startswith(shown)


def test_bytes_that_are_no_text_take_linear_time():
    calls = []

    def counting(ids):
        calls.append(len(ids))
        return decode(ids)

    growing = GrowingText(counting, ("xyz",))
    for _ in range(5000):
        text = growing.push([0xFF])
    assert len(text) >= 4990
    assert max(calls) < 20


CALL = st.builds(
    lambda name, arguments: f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>",
    st.sampled_from(["add", "sub", "nobody"]),
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=4), max_size=2),
)
PIECE = CALL | st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool_call>{", "hello", " ", "\n", "<tool", "<", "a<tool_call>[1]</tool_call>"]
)


@given(st.lists(PIECE, max_size=7).map("".join), st.data())
def test_calls_in_pieces_are_the_calls_of_the_whole(text, data):
    whole = ToolCalls(("add", "sub"))
    content, calls = whole.push(text, last=True)
    pieces = ToolCalls(("add", "sub"))
    got, found = "", []
    for cut in cuts(data, len(text)):
        new, some = pieces.push(text[:cut], last=False)
        got, found = got + new, found + some
    new, some = pieces.push(text, last=True)
    got, found = got + new, found + some
    assert got == content
    assert [(c["index"], c["function"]) for c in found] == [(c["index"], c["function"]) for c in calls]
    assert all(c["function"]["name"] in ("add", "sub") for c in calls)
    if not calls:
        assert content == text


def test_two_calls_with_words_around():
    one, two = ('{"name":"add","arguments":{"a":1}}', '{"name":"add","parameters":{}}')
    text = f"I add.\n<tool_call>{one}</tool_call>\n<tool_call>{two}</tool_call>\ndone "
    content, calls = ToolCalls(("add",)).push(text, last=True)
    assert content == "I add.done "
    assert [c["function"]["arguments"] for c in calls] == ['{"a":1}', "{}"]
    assert [c["index"] for c in calls] == [0, 1]
