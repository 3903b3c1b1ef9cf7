"""Stop strings across token boundaries, inside earlier tokens, and over split code points."""

import pytest

from gruppetto.engines.embedded.stops import StopMatcher


def byte_decode(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def first_stop(text: bytes, stops, made: bytes = b"", decode=byte_decode):
    matcher = StopMatcher(decode, stops, list(made))
    for i, token in enumerate(text):
        found = matcher.push(token)
        if found is not None:
            return i, found
    return None


def test_a_stop_string_spans_many_tokens():
    assert first_stop(b"12</answer>34", ["</answer>"]) == (10, "</answer>")


def test_a_stop_string_may_begin_inside_what_was_made_before():
    assert first_stop(b"wer>34", ["</answer>"], made=b"12</ans") == (3, "</answer>")


def test_a_stop_string_that_was_complete_before_does_not_stop_again():
    assert first_stop(b"xy", ["</a>"], made=b"12</a>") is None
    assert first_stop(b">", [">>", ">"], made=b">") == (0, ">>")


def test_the_earliest_end_wins_and_ties_are_the_first_given():
    assert first_stop(b"abcd", ["abcd", "bc"]) == (2, "bc")


def test_code_points_split_over_tokens():
    text = "é stop→!".encode()
    assert first_stop(text, ["stop→"]) == (len(text) - 2, "stop→")
    assert first_stop(text[1:], ["é"], made=text[:1]) == (0, "é")


def test_a_stop_before_a_broken_code_point_is_found_at_once():
    pieces = [b"ab", b"END\xe2", b"\x86\x92"]
    matcher = StopMatcher(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"), ["END"], [])
    assert [matcher.push(i) for i in range(2)] == [None, "END"]


def test_undecodable_bytes_cost_linear_time():
    decoded = 0

    def counting(ids):
        nonlocal decoded
        decoded += len(ids)
        return byte_decode(ids)

    assert first_stop(b"\xff" * 4000 + b"END", ["END"], decode=counting) == (4002, "END")
    assert decoded < 4003 * 24


@pytest.mark.parametrize("cut", range(12))
def test_every_cut_gives_the_same_stop(cut):
    text = "a→b <end> c".encode()
    found = first_stop(text[cut:], ["<end>"], made=text[:cut])
    want = text.index(b">") - cut
    assert found == ((want, "<end>") if want >= 0 else None)
