"""The tokenizer of a folder: as transformers reads it, and what is said of broken ones."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine.errors import ModelError, RequestError
from engine.text.tokenizer import Tokenizer
from tests.engine.text.small_tokenizers import KINDS, TEXT, byte_level, llama_2, save


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_ids_and_text_as_transformers(tmp_path: Path, kind: str, add_special_tokens: bool) -> None:
    folder = save(KINDS[kind](), tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in TEXT:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ids == oracle(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert tokenizer.decode(ids) == oracle.decode(ids)
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert shown == oracle.decode(ids, skip_special_tokens=True)


def test_others_run_while_many_tokens_are_decoded(tmp_path: Path) -> None:
    """As a server's event loop does; where there is no core for it just then, one of the next."""
    tokenizer = Tokenizer.from_folder(save(byte_level(), tmp_path))
    ids = tokenizer.encode(TEXT[0]) * 10_000
    begins, is_decoding, was_decoding = threading.Semaphore(0), False, []

    def look() -> None:
        begins.acquire()
        was_decoding.append(is_decoding)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody gets the interpreter who is not let
    try:
        while len(was_decoding) < 20 and not any(was_decoding):
            other = threading.Thread(target=look)
            other.start()
            is_decoding = True
            begins.release()
            tokenizer.decode(ids)
            is_decoding = False
            other.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert any(was_decoding)


def test_what_goes_around_a_text_is_what_the_file_says(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(llama_2(), tmp_path))
    bos = tokenizer.token_id("<s>")
    assert tokenizer.encode("fox")[0] == bos
    assert bos not in tokenizer.encode("fox", add_special_tokens=False)


def test_config_names_and_adds_special_tokens(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "additional_special_tokens": ["two words"],
        "extra_special_tokens": {"tool_token": "<|tool|>"},
        "added_tokens_decoder": {str(size): {"content": "<|tool|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(save(backend, tmp_path))
    assert tokenizer.bos_token_id == backend.token_to_id("<s>")
    assert tokenizer.eos_token_id == backend.token_to_id("</s>")
    assert tokenizer.special_tokens.named["tool_token"] == "<|tool|>"
    assert tokenizer.vocab_size == size + 1
    assert {size, backend.token_to_id("two words")} <= tokenizer.special_ids
    ids = tokenizer.encode("a two words<|tool|>b")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a b"


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = Tokenizer.from_folder(save(byte_level(), tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, tokenizer.token_id("</s>"))


def test_truncation_and_padding_of_training_do_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.from_folder(save(backend, tmp_path))
    assert len(tokenizer.encode("x")) == 1
    assert tokenizer.decode(tokenizer.encode(TEXT[0])) == TEXT[0]


def test_missing_tokenizer_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer.json: not there"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match="tokenizer.model alone is not enough"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000],
)
def test_broken_tokenizer_says_which_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: (not valid JSON|holds a|cannot be)"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        {"model": {"continuing_subword_prefix": "longer than any token of a merge" * 4}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
)
def test_what_the_library_panics_of_says_which_file(tmp_path: Path, broken: dict[str, Any]) -> None:
    path = save(byte_level(), tmp_path) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"] |= broken.pop("model", {})
    path.write_text(json.dumps(tokenizer | broken))
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be loaded"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", r"tokenizer_config\.json: not valid JSON"),
        ('{"added_tokens_decoder": {"x": {}}}', r"tokenizer_config\.json: added_tokens_decoder"),
        ('{"added_tokens_decoder": {"9": {"content": "<new>"}}}', "does not follow"),
        ('{"added_tokens_decoder": {"9": {"content": 5}}}', r"_decoder\.9: a token must be"),
        ('{"added_tokens_decoder": {"9": {"content": null}}}', "an object without one"),
        ('{"added_tokens_decoder": {"9": {"content": "\\ud800"}}}', "of whole characters"),
        ('{"bos_token": "\\ud800"}', "bos_token: a token must be a text of whole characters"),
    ],
)
def test_broken_config_says_which_file(tmp_path: Path, config: str, reason: str) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelError, match=reason):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("value", ["5", "true", '"<a>"'])
def test_special_tokens_of_a_wrong_type(tmp_path: Path, name: str, key: str, value: str) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / name).write_text(f'{{"{key}": {value}}}')
    with pytest.raises(ModelError, match=f"{name}: {key} must be a list or an object"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", ["5", "true", "[]", "{}", '{"content": null}'])
@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("bos_token", "%s", "bos_token"),
        ("additional_special_tokens", '["<a>", %s]', "additional_special_tokens"),
        ("extra_special_tokens", '{"own": %s}', "extra_special_tokens.own"),
    ],
)
def test_a_special_token_that_is_none(
    tmp_path: Path, name: str, token: str, key: str, value: str, named: str
) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / name).write_text(f'{{"{key}": {value % token}}}')
    with pytest.raises(ModelError, match=f"{name}: {named}: a token must be a text"):
        Tokenizer.from_folder(tmp_path)


def test_text_that_is_not_unicode_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt: must be Unicode"):
        byte_level.encode("a\ud800")


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, engine.text.tokenizer, engine.text.chat_template, engine.text.detokenizer\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
