"""The demo's task: heavy tail, disjoint held-out ranges, seeded; its teacher is sloppy, its checker exact."""

from itertools import islice

from gruppetto.demo.task import LETTERS, demonstrations, held_out_rows, rows


def test_lengths_have_a_heavy_tail():
    lengths = sorted(len(row["answer"]) for row in rows(0, 4000))
    assert lengths[int(0.99 * len(lengths))] >= 5 * lengths[len(lengths) // 2]


def test_no_range_is_both_trained_on_and_held_out():
    trained = {row["prompt"] for row in rows(0, 8000)}
    held_out = {row["prompt"] for row in held_out_rows(0, 2000)}
    assert len(held_out) > 50
    assert not trained & held_out


def test_answers_are_the_range():
    for row in rows(3, 200):
        first, last = row["prompt"][0], row["prompt"][3]
        assert row["answer"] == LETTERS[LETTERS.index(first) : LETTERS.index(last) + 1]


def test_same_seed_same_rows():
    assert list(rows(1, 50)) == list(rows(1, 50)) != list(rows(2, 50))


def test_the_teacher_is_often_wrong_in_two_ways():
    gold = {row["prompt"]: row["answer"] for row in rows(0, 20_000)}
    taught = [(gold[p], a) for p, a in islice(demonstrations(0), 4000) if p in gold]
    right = sum(answer == said for answer, said in taught) / len(taught)
    assert 0.2 < right < 0.5
    assert 0.3 < sum(said.endswith(".") for _, said in taught) / len(taught) < 0.4
    assert any(len(said) < len(answer) for answer, said in taught)
