"""What one request has made, put together from progress and results that overlap."""

import itertools
from array import array

from hypothesis import given
from hypothesis import strategies as st

from gruppetto.engines.serve.calls import Call
from gruppetto.types import Segment, TokenKind


def segments(versions, a, b):
    """Tokens a..b of a response whose token i is i, made under versions[i]: one segment for each version."""
    cuts = [a, *(i for i in range(a + 1, b) if versions[i] != versions[i - 1]), b]
    spans = [(x, y) for x, y in itertools.pairwise(cuts) if y > x]
    return tuple(
        Segment(TokenKind.MODEL, versions[x], array("i", range(x, y)), array("f", [float(i) for i in range(x, y)]))
        for x, y in spans
    )


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8),
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(sorted),
)
def test_overlapping_deliveries_give_each_token_once_with_its_version(pieces, versions):
    call, count = Call(rid="r", prompt=[1], sampling=None), len(versions)
    for a, b in [*pieces, (0, count)]:
        start = min(a, len(call.ids))
        call.take(start, segments(versions, start, max(start, min(b, count))))
    assert call.ids.tolist() == list(range(count))
    assert call.logprobs.tolist() == [float(i) for i in range(count)]
    starts = [i for i in range(count) if i == 0 or versions[i] != versions[i - 1]]
    assert call.spans == [(versions[i], i) for i in starts]
