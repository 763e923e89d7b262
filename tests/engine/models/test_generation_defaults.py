"""End-of-turn ids and default sampling from a model's own files."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.generation_defaults import GenerationDefaults, read_generation_defaults


def write(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_nothing_said_is_nothing_known(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()


def test_sampling_defaults(tmp_path: Path) -> None:
    sampling = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "do_sample": True,
    }
    write(tmp_path, generation_config=sampling)
    assert read_generation_defaults(tmp_path) == GenerationDefaults(
        (), 0.6, 0.9, 20, 0.0, 1.05, 2048
    )


def test_whole_numbers_may_be_written_with_a_point(tmp_path: Path) -> None:
    write(tmp_path, generation_config={"top_k": 20.0, "temperature": 1})
    defaults = read_generation_defaults(tmp_path)
    assert (defaults.top_k, defaults.temperature) == (20, 1.0)
    assert type(defaults.top_k) is int


def test_minus_one_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path, generation_config={"top_k": -1})
    assert read_generation_defaults(tmp_path).top_k == 0


def test_minus_one_is_none(tmp_path: Path) -> None:
    write(tmp_path, generation_config={"eos_token_id": -1, "max_new_tokens": -1})
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
    write(tmp_path, generation_config={"eos_token_id": [7, -1]})
    assert read_generation_defaults(tmp_path).eos_token_ids == (7,)


def test_beside_do_sample_false_what_cannot_be_used_is_not(tmp_path: Path) -> None:
    values = {"do_sample": False, "top_p": 0.0, "temperature": 0.6}
    write(tmp_path, generation_config=values)
    defaults = read_generation_defaults(tmp_path)
    assert (defaults.top_p, defaults.temperature) == (None, 0.6)


def test_an_end_that_no_logits_are_for_cannot_be_drawn() -> None:
    assert GenerationDefaults((2, 95, 96)).eos_below(96) == (2, 95)


def test_every_end_of_turn_counts(tmp_path: Path) -> None:
    """As in Llama 3, whose files each name another one."""
    write(
        tmp_path,
        generation_config={"eos_token_id": [128001, 128008]},
        config={"eos_token_id": 128001},
        tokenizer_config={
            "eos_token": "<|eot_id|>",
            "added_tokens_decoder": dict.fromkeys(("128009", "²"), {"content": "<|eot_id|>"}),
        },
    )
    assert read_generation_defaults(tmp_path).eos_token_ids == (128001, 128008, 128009)


def test_the_tokenizers_end_is_found_in_either_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"text_config": {"eos_token_id": 1}},
        tokenizer_config={"eos_token": {"content": "</s>"}},
        tokenizer={"added_tokens": [{"id": 0, "content": "<s>"}, {"id": 2, "content": "</s>"}]},
    )
    assert read_generation_defaults(tmp_path).eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eos_token_id": "2"}, "eos_token_id: '2', must be a token id"),
        ({"eos_token_id": [2, -2]}, "eos_token_id"),
        ({"temperature": -0.1}, "temperature: -0.1, must be at least 0.0 and at most 100.0"),
        ({"top_p": 1.5}, "top_p: 1.5, must be greater than 0.0 and at most 1.0"),
        ({"top_p": 0.0}, "top_p: 0.0, must be greater than 0.0"),
        ({"temperature": 100.5}, "temperature: 100.5, must be at least 0.0 and at most 100.0"),
        ({"temperature": "1"}, "temperature: must be a number, not str"),
        ({"min_p": True}, "min_p: must be a number, not bool"),
        ({"top_k": -2}, "top_k: -2, must be at least 0"),
        ({"repetition_penalty": 101}, "repetition_penalty: 101, must be at least 0.01"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0, must be at least 1"),
        ({"top_k": 2.5}, "top_k: must be an integer, not float"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0, must be at least 0.01"),
    ],
)
def test_a_wrong_value_names_file_and_key(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    write(tmp_path, generation_config=values)
    with pytest.raises(ModelError, match=f"generation_config.json: {message}"):
        read_generation_defaults(tmp_path)
