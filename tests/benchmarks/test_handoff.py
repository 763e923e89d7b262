"""What `benchmarks.handoff` makes of a session that breaks under it."""

import pytest

from benchmarks import handoff
from cluster.session import SessionBackend, SessionBroken
from decode_worker.answerer import LocalPrefill


class Open:
    is_open = True


async def test_a_broken_session_is_asked_again_by_another_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []

    async def ask(_s: object, _p: str, _n: int, _m: object, seed: int) -> float:
        seeds.append(seed)
        if len(seeds) % 3:
            raise SessionBroken("ping timeout", had_come=True)
        return 0.25

    monkeypatch.setattr(handoff, "first_token_s", ask)
    session: SessionBackend = Open()  # type: ignore[assignment]
    modes = (LocalPrefill.ALWAYS, LocalPrefill.NEVER)
    told = [await handoff.told_first_token_s(session, "p", 8, m, 2) for m in modes]
    assert told == [0.25, 0.25]
    assert len(set(seeds)) == 3, "the same prompts on both ways, each new to its worker"
    monkeypatch.setattr(handoff, "TRIES", 2)
    with pytest.raises(RuntimeError, match="broke 2 times"):
        await handoff.told_first_token_s(session, "p", 8, modes[0], 2)


def test_each_pair_is_set_beside_the_peer_at_the_same_load() -> None:
    def row(pair: str, at_a_time: int, rate: float, first: float, token: float) -> handoff.Row:
        figures = (handoff.RATE, rate), (handoff.FIRST, first), (handoff.TOKEN, token)
        return {"pair": pair, "at a time": at_a_time, **dict(figures)}

    rows = [row("ours", 1, 60.0, 100.0, 8.0), row("ours", 8, 90.0, 400.0, 9.0)]
    assert handoff.beside_peer(rows) == rows, "there is no peer"
    beside = handoff.beside_peer([*rows, row(handoff.VLLM_PAIR, 1, 20.0, 400.0, 32.0)])
    names = (handoff.RATE, handoff.FIRST, handoff.TOKEN)
    ratios = [f"{name} / {handoff.VLLM_PAIR}" for name in names]
    assert [beside[0][name] for name in ratios] == [3.0, 0.25, 0.25]
    assert beside[1] == rows[1], "the peer was not asked for so many"
    assert handoff.as_text(beside).splitlines()[3].split()[-6:] == ["-", "|", "-", "|", "-", "|"]
