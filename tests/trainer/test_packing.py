"""Packed rows and chunked log-probabilities against the model's own forward, one sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from trainer.sample_maker import VOCABULARY  # noqa: E402

from gruppetto.errors import UserError  # noqa: E402
from gruppetto.model_folder import read_model  # noqa: E402
from gruppetto.trainer.embedded.logprobs import token_logprobs  # noqa: E402
from gruppetto.trainer.embedded.model import load_model, row_logprobs  # noqa: E402
from gruppetto.trainer.embedded.packing import cut, pack, rows, segment_attention  # noqa: E402

CPU = torch.device("cpu")


def pieces_of(*lengths, prompt=2):
    rng = np.random.default_rng(3)
    return [
        cut(owner, rng.integers(0, VOCABULARY, n).tolist(), np.arange(n) >= prompt) for owner, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_equal_one_sequence_at_a_time(model_folder, dtype, tolerance, temperature):
    own, packed = read_model(model_folder, torch.float32).to(dtype).eval(), load_model(model_folder, CPU).to(dtype)
    pieces = pieces_of(3, 17, 5, 40, 3)
    found, entropy = row_logprobs(packed, pack(pieces, CPU), temperature=temperature, chunk=8)
    expected, expected_entropy = [], []
    for piece in pieces:
        logits = own(input_ids=torch.from_numpy(piece.ids)[None], use_cache=False).logits[0] / temperature
        logprobs = logits.log_softmax(-1)[piece.trained - 1]
        expected.append(logprobs[torch.arange(len(piece.targets)), piece.targets])
        expected_entropy.append(-(logprobs.exp() * logprobs).sum(-1))
    assert (found - torch.cat(expected)).abs().max() < tolerance
    assert (entropy - torch.cat(expected_entropy)).abs().max() < tolerance * 10


def save_tiny(family, folder, **settings):
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        pad_token_id=0,
        **settings,
    )
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 6}),
        ("Phi", {}),
    ],
)
def test_other_architectures(family, settings, tmp_path):
    save_tiny(family, tmp_path, **settings)
    own, packed = read_model(tmp_path, torch.float32).eval(), load_model(tmp_path, CPU)
    pieces = pieces_of(20, 9)
    found, _ = row_logprobs(packed, pack(pieces, CPU), temperature=1.0, chunk=8)
    expected = []
    for piece in pieces:
        logprobs = own(input_ids=torch.from_numpy(piece.ids)[None], use_cache=False).logits[0].log_softmax(-1)
        expected.append(logprobs[piece.trained - 1, piece.targets])
    assert (found - torch.cat(expected)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("Gemma2", {}, "softcap"),
        ("Granite", {"logits_scaling": 4.0}, "differ from its own"),
    ],
)
def test_architectures_that_would_be_trained_wrongly_are_refused(family, settings, message, tmp_path):
    save_tiny(family, tmp_path, **settings)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize("window", [None, 4, 100])
def test_segment_attention_equals_masked_attention(window):
    torch.manual_seed(0)
    lengths = (5, 1, 9)
    query, key, value = (torch.randn(1, heads, 15, 8, dtype=torch.float64) for heads in (4, 2, 2))
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    index = torch.arange(15)
    mask = (segment[:, None] == segment) & (index[:, None] >= index)
    if window:
        mask &= index[:, None] - index < window
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    found, _ = segment_attention(
        torch.nn.Module(), query, key, value, None, segment_lengths=lengths, scaling=0.3, sliding_window=window
    )
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunked_logprobs_and_gradients_equal_unchunked(bias, chunk):
    torch.manual_seed(1)
    head = torch.nn.Linear(6, 50, bias=bias).double()
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets, factor = torch.randint(0, 50, (11,)), torch.randn(11, dtype=torch.float64)
    inputs = [hidden, *head.parameters()]
    plain = (head(hidden) / 0.7).log_softmax(-1)
    picked = plain[torch.arange(11), targets]
    expected = torch.autograd.grad((picked * factor).sum(), inputs)
    logprob, entropy = token_logprobs(hidden, head, targets, temperature=0.7, chunk=chunk, dtype=torch.float64)
    found = torch.autograd.grad((logprob * factor).sum(), inputs)
    assert torch.allclose(logprob, picked, atol=1e-13)
    assert torch.allclose(entropy, -(plain.exp() * plain).sum(-1), atol=1e-13)
    assert not entropy.requires_grad
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_logits_of_all_positions_never_exist():
    """Peak of any tensor made inside stays at chunk x vocabulary, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    head, hidden = torch.nn.Linear(8, 1000, bias=False), torch.randn(400, 8, requires_grad=True)
    with Largest() as largest:
        logprob, _ = token_logprobs(
            hidden, head, torch.zeros(400, dtype=torch.int64), temperature=1.0, chunk=16, dtype=torch.float32
        )
        logprob.sum().backward()
    assert largest.elements == 16 * 1000


@given(st.lists(st.integers(3, 60), min_size=1, max_size=30), st.integers(1, 128))
def test_rows_keep_order_and_budget(lengths, budget):
    pieces = pieces_of(*lengths)
    made = list(rows(pieces, budget))
    assert [piece for row in made for piece in row] == pieces
    assert all(len(row) == 1 or sum(p.ids.size for p in row) <= budget for row in made)


def test_cut_keeps_only_what_a_trained_token_sees():
    piece = cut(0, [9, 8, 7, 6, 5], np.asarray([False, False, True, True, False]))
    assert piece.ids.tolist() == [9, 8, 7]
    assert piece.targets.tolist() == [7, 6]
    assert cut(0, [1, 2], np.asarray([False, False])) is None
    with pytest.raises(ValueError, match="first token"):
        cut(0, [1, 2], np.asarray([True, True]))


def group_of(*responses, prompt=20, first=0, seed=0, vocabulary=VOCABULARY):
    """Sequences with one prompt; `responses` are their lengths."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, vocabulary, prompt)
    return [
        cut(first + i, [*start, *rng.integers(0, vocabulary, n)], np.arange(prompt + n) >= prompt)
        for i, n in enumerate(responses)
    ]


@pytest.mark.parametrize("window", [None, 12])
def test_a_shared_prompt_changes_no_logprob_and_no_gradient(model_folder, window, tmp_path):
    if window:
        save_tiny("Mistral", tmp_path, sliding_window=window)
    model = load_model(tmp_path if window else model_folder, CPU).double()
    alike = group_of(5, 1, 9)
    pieces = [*alike, alike[0], *pieces_of(7), *group_of(3, 4, prompt=17, seed=1), *group_of(6, seed=2)]
    factors = torch.randn(sum(p.targets.size for p in pieces), dtype=torch.float64)
    together = pack(pieces, CPU)
    assert together.ids.numel() == sum(p.ids.size for p in pieces) - 19 - 20 - 23 - 17  # one column is always its own
    found, _ = row_logprobs(model, together, temperature=1.0, chunk=8)
    alone = torch.cat([row_logprobs(model, pack([p], CPU), temperature=1.0, chunk=8)[0] for p in pieces])
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad((logprob * factors).sum(), parameters) for logprob in (found, alone)]
    assert torch.allclose(found, alone, rtol=0, atol=1e-12)
    for one, other in zip(*gradients, strict=True):  # the norms' backward rounds to float32, before or after the sum
        assert torch.allclose(one, other, rtol=0, atol=1e-6 * other.abs().max().item())


def test_rows_count_a_shared_prompt_once():
    made = list(rows(group_of(5, 5, 5, 5, prompt=40), 55))  # cut before its last token, a response has 4 columns
    assert [[piece.owner for piece in row] for row in made] == [[0, 1, 2], [3]]


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        (lambda a, b: (a, b), 20),
        (lambda a, b: (a, [*b[:19], (b[19] + 1) % VOCABULARY, *b[20:]]), 0),  # another prompt, however alike
        (lambda a, b: (a[:8], b), 0),  # seven columns are not worth it
        (lambda a, b: (a, [*a[:21], 33, 34]), 21),  # one answer token too
        (lambda a, b: (a, a), 21),  # never all of the 22
        (lambda a, b: (a[:17], b), 16),  # a holds 16 columns of the prompt: the last token is only predicted
    ],
)
def test_what_is_shared_is_a_common_beginning_that_is_worth_it(change, shared):
    first, second = change([*range(20), 30, 31, 32], [*range(20), 33, 34, 35])
    pieces = [
        cut(owner, ids, np.arange(len(ids)) >= min(20, len(ids) - 1)) for owner, ids in enumerate((first, second))
    ]
    assert pack(pieces, CPU).prefixes == ((0, 0), (0, shared))


def test_a_prompt_that_begins_like_another_is_whole_for_those_behind_it():
    system = list(range(10))
    ids = [[*system, *prompt, answer, 1] for prompt in ([20, 21, 22], [30, 31]) for answer in (40, 41, 42)]
    prompts = [13, 13, 13, 12, 12, 12]
    pieces = [cut(i, one, np.arange(len(one)) >= prompts[i]) for i, one in enumerate(ids)]
    assert pack(pieces, CPU).prefixes == ((0, 0), (0, 13), (0, 13), (0, 0), (16, 12), (16, 12))
