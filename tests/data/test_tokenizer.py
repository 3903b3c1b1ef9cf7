"""The Hugging Face tokenizer: exact text, all end tokens, and folders that do not fit are refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.errors import UserError

pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(folder, template=TEMPLATE, config=None, generation=None):
    from gruppetto.demo.model import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config or {"vocab_size": 258, "model_type": "qwen3"}))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HFTokenizer(write(tmp_path_factory.mktemp("model")))


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_space_is_cleaned_up_even_where_the_folder_asks_for_it(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"do": 0, "n't": 1, ".": 2, "<end>": 3}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", clean_up_tokenization_spaces=True)
    fast.save_pretrained(tmp_path)
    tokenizer = HFTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("do n't .")) == "do n't ."


def test_end_tokens_are_left_out_at_the_end(tokenizer):
    ids = [*tokenizer.encode("4"), tokenizer.eos_ids[0]]
    assert tokenizer.decode(ids) == "4"
    assert tokenizer.decode(ids, skip_special=False) == "4<|end|>"


def test_a_cut_character_is_kept_as_a_replacement(tokenizer):
    ids = tokenizer.encode("a客")
    assert tokenizer.decode(ids[:-1]) == "a\ufffd"


def test_render_adds_the_generation_prompt(tokenizer):
    ids = tokenizer.render([{"role": "user", "content": "x"}])
    assert tokenizer.decode(ids) == "<user>x<assistant>"


def test_a_template_that_refuses_is_one_line(tokenizer):
    with pytest.raises(UserError, match="refuses the messages: TemplateError: system first"):
        tokenizer.render([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])


def test_all_end_tokens_count(tmp_path):
    folder = write(tmp_path, config={"vocab_size": 258, "eos_token_id": 5}, generation={"eos_token_id": [1, 106]})
    assert HFTokenizer(folder).eos_ids == (1, 106, 5, 256)


def test_no_template_is_refused_when_one_is_needed(tmp_path):
    tokenizer = HFTokenizer(write(tmp_path, template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match=r"has no chat template.*data.chat_template = 'never'"):
        tokenizer.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("config", [{"vocab_size": 257}, {"text_config": {"vocab_size": 257}}])
def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path, config):
    with pytest.raises(UserError, match=r"vocab_size = 257, but the tokenizer's largest id is 257"):
        HFTokenizer(write(tmp_path, config=config))


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        HFTokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match="no usable tokenizer") as caught:
        HFTokenizer(tmp_path)
    assert "\n" not in str(caught.value)
