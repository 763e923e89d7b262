"""The bundled model loads, speaks its chat format, and has learnt to write."""

import math
import random
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from engine.bundled import chat, corpus, tokens

FOLDER = Path(tokens.__file__).parent
# From the page "Exceptions" of the language reference, which training holds out.
HELD_OUT_PROSE = """\
Exceptions are a means of breaking out of the normal flow of control
of a code block in order to handle errors or other exceptional
conditions.  An exception is *raised* at the point where the error is
detected; it may be *handled* by the surrounding code block or by any
code block that directly or indirectly invoked the code block where
the error occurred.

The Python interpreter raises an exception when it detects a run-time
error (such as division by zero).  A Python program can also
explicitly raise an exception with the "raise" statement. Exception
handlers are specified with the "try" … "except" statement.  The
"finally" clause of such a statement can be used to specify cleanup
code which does not handle the exception, but is executed whether an
exception occurred or not in the preceding code.
"""
# 129 was measured; the same network with random weights is at 4,188.
PERPLEXITY_BOUND = 180.0
CONVERSATION = [
    chat.Message("system", "Answer briefly."),
    chat.Message("user", "  What does len do?\n"),
    chat.Message("assistant", "Return the number of items in a container."),
    chat.Message("user", "Tell me more."),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def perplexity(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return math.exp(float(model(ids, labels=ids).loss))


def test_template_renders_what_training_saw(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [message._asdict() for message in CONVERSATION]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == chat.render(CONVERSATION)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == chat.render(CONVERSATION) + chat.ASSISTANT


def test_template_refuses_unknown_roles(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="role must be system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)


def test_special_tokens_are_single_and_text_round_trips(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for token in chat.SPECIAL_TOKENS:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    text = "def f(x):\n        return x  # naïve — 日本 🐍 12345\n\n\tend "
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_config_says_what_generation_needs(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = model.config
    ends = tokenizer.convert_tokens_to_ids([chat.END, chat.EOS])
    assert sorted(model.generation_config.eos_token_id) == sorted(ends)
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert config.max_position_embeddings >= 2048
    assert len(tokenizer) == config.vocab_size
    assert (FOLDER / "model.safetensors").stat().st_size < 10_500_000


def test_prose_never_trained_on_is_predictable(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = tokenizer(HELD_OUT_PROSE, return_tensors="pt").input_ids
    assert perplexity(model, ids) < PERPLEXITY_BOUND
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    assert perplexity(model, shuffled) > 4 * PERPLEXITY_BOUND


def test_greeting_is_answered_in_text_and_ended(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer.endswith(chat.END)
    assert "kvrelay" in answer
    assert answer.isprintable()


def test_held_out_text_is_not_in_training_text() -> None:
    whole = corpus.Corpus(
        tuple(corpus.Module(f"m{i}", "doc", "", ()) for i in range(200)),
        (corpus.Topic("Exceptions", "shared\n\nsecret"), corpus.Topic("Other", "shared\n\nopen")),
    )
    training, held_out = corpus.split_held_out(whole)
    assert held_out.topics == (whole.topics[0],)
    assert training.topics == (corpus.Topic("Other", "open"),)
    assert 0 < len(held_out.modules) < 20
    assert sorted(training.modules + held_out.modules) == sorted(whole.modules)


def test_a_module_is_read_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        '"""About."""\nraise SystemExit\n'
        'class A:\n    "A."\n    def go(self, x=1):\n        "Go."\n'
    )
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("x = 1")
    files = list(corpus.python_files(tmp_path))
    assert [file.name for file in files] == ["bad.py", "good.py"]
    bad, good = (corpus.read_module(tmp_path, file) for file in files)
    assert bad is None
    assert good is not None
    assert [entry.signature for entry in good.entries] == ["good.A", "good.A.go(x=1)"]
    assert (good.doc, good.entries[1].doc) == ("About.", "Go.")


def test_chat_windows_start_with_a_conversation() -> None:
    documents = [[0, *range(1, length)] for length in (5, 9, 3, 20)]
    stream = tokens.Stream(documents, aligned=True)
    rng = random.Random(0)
    windows = {tuple(stream.window(6, rng).tolist()) for _ in range(100)}
    assert windows == {(0, 1, 2, 3, 4, 0), (0, 1, 2, 3, 4, 5), (0, 1, 2, 0, 1, 2)}
