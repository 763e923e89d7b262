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
