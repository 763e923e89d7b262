"""What is begun counts until it is ended, once, whoever says so how often."""

from decode_worker.under_way import UnderWay


def state(under_way: UnderWay) -> tuple[int, int, int, int, int]:
    return (
        under_way.num_queued,
        under_way.num_queued_tokens(None),
        under_way.num_fetched,
        under_way.num_queued_tokens("p:1"),
        under_way.num_running,
    )


def test_requests_come_run_and_go() -> None:
    under_way = UnderWay()
    here, there = under_way.begin(None, 100, 1), under_way.begin("p:1", 30, 2)
    elsewhere = under_way.begin("q:1", 7, 1)
    assert state(under_way) == (1, 100, 2, 30, 0)
    for _ in range(2):
        there.run()
    assert state(under_way) == (1, 100, 1, 0, 2)
    for _ in range(2):
        here.end()
        here.run()
    assert state(under_way) == (0, 0, 1, 0, 2)
    elsewhere.run()
    for share in (there, elsewhere, there):
        share.end()
    assert state(under_way) == (0, 0, 0, 0, 0)
    assert not under_way._num_tokens, "of whoever was asked once nothing is kept"
