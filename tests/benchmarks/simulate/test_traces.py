"""Files of the two published formats, good and bad."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate.azure import load_azure
from benchmarks.simulate.device import load_device
from benchmarks.simulate.mooncake import load_mooncake
from engine.errors import ConfigError

GOOD = {"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]}


def mooncake(tmp_path: Path, *entries: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in entries))
    return path


def azure(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def test_equal_ids_are_equal_blocks_and_only_full_ones_have_names(tmp_path: Path) -> None:
    other = {**GOOD, "timestamp": 6000, "hash_ids": [1, 7, 8]}
    one, two = load_mooncake(mooncake(tmp_path, GOOD, "", other))
    assert (one.num_tokens, one.num_output, len(one.names)) == (1100, 20, 2)
    assert one.names[0] == two.names[0]
    assert one.names[1] != two.names[1]
    assert two.at_s - one.at_s == 3.0


def test_the_next_turn_tells_what_the_answer_was(tmp_path: Path) -> None:
    """1,100 tokens and an answer of 600 fill three blocks; the prompt that goes on has them."""
    first = {**GOOD, "output_length": 600}
    later = {"timestamp": 9000, "input_length": 1800, "output_length": 1, "hash_ids": [1, 2, 5, 6]}
    stranger = {**later, "input_length": 1600}  # too short to contain the answer
    one, two = load_mooncake(mooncake(tmp_path, first, later))
    assert one.names == two.names
    one, two = load_mooncake(mooncake(tmp_path, first, stranger))
    assert len(one.names) == 3
    assert one.names[:2] == two.names[:2]
    assert one.names[2] != two.names[2]


def test_stamps_that_many_share_are_spread_over_the_time_between(tmp_path: Path) -> None:
    entries = [{**GOOD, "timestamp": 3000 * stamp} for stamp in range(4) for _ in range(50)]
    times = [request.at_s for request in load_mooncake(mooncake(tmp_path, *entries))]
    assert times == sorted(times)
    assert len(set(times)) == 200
    assert times[0] == 0.0
    assert 11.5 < times[-1] < 12
    in_first = sum(time < 1.5 for time in times)
    assert 15 < in_first < 35
    again = load_mooncake(mooncake(tmp_path, *entries))
    assert [request.at_s for request in again] == times


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{", ":2: no JSON"),
        ([1], ":2: must be an object"),
        ({**GOOD, "timestamp": "3"}, ":2: timestamp: '3', must be a number"),
        ({**GOOD, "timestamp": -1}, ":2: timestamp: -1, must be at least 0"),
        ({**GOOD, "input_length": 0}, ":2: input_length: 0, must be a whole number above 0"),
        ({**GOOD, "input_length": 1.5}, ":2: input_length: 1.5"),
        ({**GOOD, "output_length": None}, ":2: output_length: None"),
        ({**GOOD, "hash_ids": [1, "2"]}, ":2: hash_ids: must be an array of whole numbers"),
        ({**GOOD, "hash_ids": [1]}, ":2: hash_ids: 1 of them, but input_length 1100 has 2 full"),
        ({**GOOD, "hash_ids": [1, 2, 3, 4]}, ":2: hash_ids: 4 of them"),  # of shorter blocks
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp"),
    ],
)
def test_a_bad_line_is_told_by_number_and_field(tmp_path: Path, entry: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_mooncake(mooncake(tmp_path, GOOD, entry))
    assert told in str(raised.value)


def test_files_without_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        load_mooncake(mooncake(tmp_path, ""))
    with pytest.raises(ConfigError, match="has no requests"):
        load_azure(azure(tmp_path))
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        load_mooncake(tmp_path / "nowhere.jsonl")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.jsonl"):
        load_mooncake(binary)


def test_azure_s_times_have_seven_digits_and_nothing_is_shared(tmp_path: Path) -> None:
    path = azure(
        tmp_path, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:05.0000000,600,1"
    )
    one, two = load_azure(path)
    assert (one.num_tokens, one.num_output, one.at_s) == (4808, 10, 0.0)
    assert two.at_s == pytest.approx(1.02004)
    assert len(two.names) == 1
    assert not set(one.names) & set(two.names)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("yesterday,1,1", ":2: TIMESTAMP: 'yesterday'"),
        ("2023-11-16 18:17:03,x,1", ":2: ContextTokens: 'x', must be a whole number above 0"),
        ("2023-11-16 18:17:03,1,0", ":2: GeneratedTokens: '0'"),
        ("2023-11-16 18:17:03,1", ":2: GeneratedTokens: ''"),
        ("2023-11-16 18:17:03,99999999999,1", ":2: ContextTokens"),
    ],
)
def test_azure_s_bad_lines_are_told_by_number_and_field(
    tmp_path: Path, line: str, told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_azure(azure(tmp_path, line))
    assert told in str(raised.value)


def test_azure_s_header_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("a,b,c\n1,2,3\n")
    with pytest.raises(ConfigError, match=":1: header: must be TIMESTAMP,ContextTokens"):
        load_azure(path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("mfu = 0.6", "mfu = 1.6", "device.mfu: must be at most 1"),
        ("mfu = 0.6", "mfu = 0", "device.mfu: 0, must be above 0"),
        ("mfu = 0.6", "mfv = 0.6", "device.mfu: None"),
        ("mfu = 0.6", "mfu = 0.6\nspeed = 1", "device: unknown key 'speed'"),
        ("[cache]", "[cache]\nblock_tokens = 64", "cache: unknown key 'block_tokens'"),
        ("[link]", "[lnk]", "has no section [link]"),
        ("[link]", "[link", "device.toml"),
    ],
)
def test_a_device_s_file_is_checked(tmp_path: Path, old: str, new: str, told: str) -> None:
    import benchmarks.simulate.device as module

    path = tmp_path / "device.toml"
    path.write_text(module.H200_LLAMA_8B.read_text().replace(old, new))
    with pytest.raises(ConfigError) as raised:
        load_device(path)
    assert told in str(raised.value)
