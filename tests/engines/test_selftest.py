"""The start-up self-test finds bits that depend on the batch, falls back to a fixed batch, and says so."""

import logging

import pytest
from engines.kit import make_serving

from gruppetto.engines.embedded.cache import SlotKV
from gruppetto.engines.embedded.forward import Forward
from gruppetto.engines.embedded.selftest import settle


class Bent(Forward):
    """The real forward, with a last-bit change where `when(batch)` says so, or of all KV that a prefill leaves."""

    name = "bent"

    def __init__(self, inner: Forward, when=lambda batch: False, prefilled: SlotKV | None = None) -> None:
        self.inner, self.when, self.prefilled = inner, when, prefilled

    def prefill(self, ids, rows, start):
        self.inner.prefill(ids, rows, start)

    def prefill_by_token(self, ids, slot, start):
        self.inner.prefill_by_token(ids, slot, start)
        for layer in self.prefilled.layers if self.prefilled is not None else ():
            layer[slot, :, start : start + len(ids)] *= 1 + 2**-22

    def decode(self, ids, positions, span):
        logits = self.inner.decode(ids, positions, span)
        return logits * (1 + 2**-22) if self.when(positions) else logits


@pytest.fixture
def serving(tiny_model):
    return make_serving(tiny_model, slots=24, deterministic=True)


def settled(serving, caplog, **bend):
    serving.core.forward = Bent(serving.core.forward, **bend)
    with caplog.at_level(logging.WARNING):
        return settle(serving.core, serving.vocab)


def test_it_holds_here_without_a_word(serving, caplog):
    assert settled(serving, caplog)
    assert not serving.core.fixed_batch
    assert not caplog.messages
    assert serving.core.decode_steps == serving.core.decode_tokens == 0


def test_bits_that_change_with_the_batch_size_fix_the_batch(serving, caplog):
    assert settled(serving, caplog, when=lambda positions: len(positions) != 24)
    assert serving.core.fixed_batch
    assert "computes all 24 rows" in caplog.messages[0]
    assert "STILL" not in caplog.messages[0]


def test_bits_that_change_with_batch_mates_are_admitted(serving, caplog):
    assert not settled(serving, caplog, when=lambda positions: int((positions > 0).sum()) > 3)
    assert "STILL depend" in caplog.messages[0]


def test_a_prefill_with_other_bits_than_decode_is_noticed(serving, caplog):
    assert not settled(serving, caplog, prefilled=serving.core.kv)
    assert "STILL depend" in caplog.messages[0]


@pytest.mark.parametrize(("slots", "context"), [(1, 2), (2, 40)])
def test_small_engines_pass_it_too(tiny_model, slots, context):
    assert make_serving(tiny_model, slots=slots, context=context, deterministic=True).invariant
