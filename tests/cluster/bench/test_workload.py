"""What is asked: seeded, within its bounds, and shared where it says so."""

import json
import os
import tracemalloc
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.lengths import Fixed, Lengths, LogNormal, Uniform, parse_lengths
from cluster.bench.prompts import ChatPrompts, Drawing, Said, TextPrompts, TokenPrompts
from cluster.bench.trace import BLOCK_TOKENS, Trace
from cluster.bench.workload import Conversation, Piece, Synthetic, Turn, first_requests
from engine.errors import ConfigError

SMALL = st.integers(1, 50)
LENGTHS: st.SearchStrategy[Lengths] = st.one_of(
    SMALL.map(Fixed),
    st.tuples(SMALL, SMALL).map(lambda two: Uniform(min(two), max(two))),
    st.builds(LogNormal, st.floats(1, 50), st.floats(0, 2), SMALL),
)
SYNTHETIC = st.builds(
    Synthetic,
    LENGTHS,
    LENGTHS,
    st.integers(0, 5),
    st.floats(0, 1),
    st.integers(1, 4),
    st.builds(Uniform, st.just(1), st.integers(1, 4)),
)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Fixed(512)),
        ("uniform:1:9", Uniform(1, 9)),
        ("lognormal:300:0.5", LogNormal(300, 0.5)),
        ("lognormal:300:0.5:4096", LogNormal(300, 0.5, 4096)),
    ],
)
def test_lengths_are_read(text: str, lengths: Lengths) -> None:
    assert parse_lengths("input_tokens", text) == lengths


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "1.5", "x", "uniform", "uniform:9:1", "uniform:0:4", "uniform:1:2:3"]
    + ["lognormal:0:1", "lognormal:nan:1", "lognormal:9:-1", "lognormal:9", "lognormal:9:1:0"]
    + ["lognormal:inf:1", "lognormal:9:99", "fixed:4", "10000001", "uniform:1:10000001"],
)
def test_lengths_that_cannot_be_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="^turns: .*must be N, uniform") as refused:
        parse_lengths("turns", text)
    assert refused.value.field == "turns"


@given(LENGTHS, st.integers())
def test_lengths_stay_within_their_bounds(lengths: Lengths, seed: int) -> None:
    drawn = [lengths.draw(Random(seed)) for _ in range(20)]
    match lengths:
        case Fixed(length):
            assert set(drawn) == {length}
        case Uniform(least, most):
            assert least <= min(drawn) <= max(drawn) <= most
        case LogNormal(_, _, most):
            assert 1 <= min(drawn) <= max(drawn) <= most


def test_a_lognormal_has_its_median() -> None:
    random, lengths = Random(1), LogNormal(400, 0.7)
    drawn = sorted(lengths.draw(random) for _ in range(4001))
    assert 380 < drawn[2000] < 420


def taken(workload: Synthetic, num: int) -> list[Conversation]:
    return list(islice(workload.conversations(), num))


@given(SYNTHETIC)
def test_a_seed_says_it_all(workload: Synthetic) -> None:
    assert taken(workload, 8) == taken(workload, 8)
    assert [c.number for c in taken(workload, 8)] == list(range(8))


@given(SYNTHETIC)
def test_only_first_turns_share_their_beginning(workload: Synthetic) -> None:
    names: list[str] = []
    for conversation in taken(workload, 8):
        for place, turn in enumerate(conversation.turns):
            shared = [piece for piece in turn.pieces if piece.name.startswith("prefix")]
            assert sum(piece.num_tokens for piece in shared) == (
                0 if place else int(turn.num_input * workload.prefix_share)
            )
            assert all(int(p.name.split()[1]) < workload.prefix_groups for p in shared)
            assert turn.num_input >= 1
            assert min(piece.num_tokens for piece in turn.pieces) >= 1
            names += [piece.name for piece in turn.pieces if piece not in shared]
    assert len(names) == len(set(names))


@given(SYNTHETIC, st.integers(0, 30))
def test_so_many_requests_and_no_more(workload: Synthetic, num: int) -> None:
    limited = list(first_requests(workload.conversations(), num))
    assert sum(len(conversation.turns) for conversation in limited) == num
    flat = [turn for conversation in limited for turn in conversation.turns]
    whole = [turn for conversation in taken(workload, num) for turn in conversation.turns]
    assert flat == whole[:num]


def ids(members: str) -> list[int]:
    prompt: list[int] = json.loads(f"{{{members}}}")["prompt"]
    return prompt


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_shorter_piece_begins_a_longer_one(short: int, long: int) -> None:
    prompts = TokenPrompts(range(100, 900), "seed")
    first = ids(prompts.members([Turn((Piece("a", short),), 1)], []))
    second = ids(prompts.members([Turn((Piece("a", long),), 1)], []))
    common = min(short, long)
    assert first[:common] == second[:common]
    assert (len(first), len(second)) == (short, long)
    assert set(first) <= set(range(100, 900))


def test_long_prompts_do_not_pile_up() -> None:
    """A million characters each; a beginning that is shared stays."""
    drawing = Drawing(["x" * 999], " ", "seed")
    shared = Piece("shared", 1000)
    tracemalloc.start()
    for number in range(150):
        drawing.turn(Turn((shared, Piece(f"own {number}", 1000)), 1))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 50e6 < kept < 70e6
    assert shared in drawing._kept
    for number in range(5000):
        drawing.turn(Turn((Piece(f"short {number}", 1),), 1))
    assert len(drawing._kept) == 4096


def test_other_names_and_seeds_give_other_tokens() -> None:
    def drawn(seed: str, name: str) -> tuple[int, ...]:
        turn = Turn((Piece(name, 16),), 1)
        return tuple(ids(TokenPrompts(range(100, 900), seed).members([turn], [])))

    assert len({drawn(seed, name) for seed in "ab" for name in "xyz"}) == 6


def test_a_later_turn_contains_what_was_said() -> None:
    turns = [Turn((Piece("a", 4),), 1), Turn((Piece("b", 2),), 1)]
    said = Said('an "answer"', (7, 8, 9))
    tokens = TokenPrompts(range(100, 200), "s")
    first = ids(tokens.members(turns[:1], []))
    second = ids(tokens.members(turns, [said]))
    assert second[:4] == first
    assert second[4:7] == [7, 8, 9]
    assert len(second) == 9
    text: dict[str, str] = json.loads(f"{{{TextPrompts('s', 1.0).members(turns, [said])}}}")
    words, _, rest = text["prompt"].partition('an "answer"\n')
    assert (len(words.split()), len(rest.split())) == (4, 2)
    chat: dict[str, Any] = json.loads(f"{{{ChatPrompts('s', 1.0).members(turns, [said])}}}")
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "user"]
    assert chat["messages"][1]["content"] == 'an "answer"'
    assert [len(m["content"].split()) for m in chat["messages"]] == [4, 2, 2]


def test_as_many_words_as_make_the_tokens() -> None:
    members = TextPrompts("s", 1 / 2.5).members([Turn((Piece("a", 100),), 1)], [])
    assert len(json.loads(f"{{{members}}}")["prompt"].split()) == 40


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]},
        {"timestamp": 2000, "input_length": 40, "output_length": 1},
        {"timestamp": 2000, "input_length": 1030, "output_length": 1, "hash_ids": [3]},
    )
    first, second, third = Trace(path).conversations()
    assert first.turns[0] == Turn((Piece("block 3", BLOCK_TOKENS), Piece("block 4", 188)), 5)
    assert second.turns[0].pieces == (Piece("own 1", 40),)
    assert third.turns[0].pieces == (Piece("block 3", BLOCK_TOKENS), Piece("own 2", 518))
    assert [c.at_s for c in (first, second, third)] == [0.0, 1.5, 1.5]


def test_a_trace_that_can_be_read_once_is_refused() -> None:
    """It was read to be checked, and was empty when it was asked for."""
    reader, writer = os.pipe()
    os.write(writer, json.dumps(GOOD).encode())
    os.close(writer)
    with pytest.raises(ConfigError, match="^trace: /dev/fd/.*: must be a file"):
        Trace(Path(f"/dev/fd/{reader}")).checked()
    os.close(reader)


def test_of_a_trace_that_grows_is_sent_what_was_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "t", GOOD, GOOD)
    trace = Trace(path).checked()
    with path.open("a") as file:
        file.write('{"timestamp": ')  # whoever writes it is not done
    assert [one.number for one in trace.conversations()] == [0, 1]


def test_a_scaled_trace_keeps_what_is_shared(tmp_path: Path) -> None:
    entry = {"timestamp": 0, "input_length": 1500, "output_length": 400, "hash_ids": [1, 2, 3]}
    (conversation,) = Trace(write(tmp_path / "t", entry), scale=0.1).conversations()
    assert [piece.num_tokens for piece in conversation.turns[0].pieces] == [51, 51, 48]
    assert conversation.turns[0].num_output == 40


GOOD = {"timestamp": 5, "input_length": 9, "output_length": 2}


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({**GOOD, "timestamp": -1}, "timestamp"),
        ({**GOOD, "timestamp": 4}, "timestamp"),
        ({**GOOD, "input_length": 0}, "input_length"),
        ({**GOOD, "input_length": "9"}, "input_length"),
        ({**GOOD, "output_length": float("nan")}, "output_length"),
        ({**GOOD, "output_length": True}, "output_length"),
        ({**GOOD, "output_length": 1e14}, "output_length: 1.*, must be at most 10000000 tokens"),
        ({**GOOD, "input_length": 10**14}, "input_length: 1.*, must be at most 10000000 tokens"),
        ({**GOOD, "hash_ids": [1.5]}, "hash_ids"),
        ({"timestamp": 5}, "output_length|input_length"),
        ([1], "object"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, entry: object, named: str) -> None:
    path = write(tmp_path / "t", GOOD, entry)
    with pytest.raises(ConfigError, match=rf"^trace: .*:2: .*({named})"):
        list(Trace(path).conversations())


def test_a_scale_that_makes_too_much_of_a_trace_is_named(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path / "t", GOOD), scale=1e308)
    with pytest.raises(ConfigError, match="^trace: .*:1: input_length: 9 times 1e.308, must be at"):
        trace.checked()


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^trace: .*absent"):
        list(Trace(tmp_path / "absent").conversations())
    for path in (tmp_path / ("t" * 300), tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match=f"^trace: .*{path.name}.*: "):
            Trace(path).checked()
    (tmp_path / "t").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="^trace: .*:1: no JSON"):
        list(Trace(tmp_path / "t").conversations())
    (tmp_path / "t").write_text("{\n")
    with pytest.raises(ConfigError, match="^trace: .*:1: no JSON"):
        list(Trace(tmp_path / "t").conversations())
