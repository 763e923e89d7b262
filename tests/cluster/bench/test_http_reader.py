"""Responses and events, however their bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.errors import BrokenAnswerError, ProtocolError
from cluster.bench.events import EventReader
from cluster.bench.http_reader import MAX_HEAD_BYTES, ResponseReader

CUTS = st.lists(st.integers(0, 400), max_size=12)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    parts = [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    return [part for part in parts if part]


def read(reader: ResponseReader, parts: list[bytes]) -> bytes:
    return b"".join(reader.feed(part) for part in parts)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), CUTS, st.booleans())
def test_chunks_come_together(chunks: list[bytes], places: list[int], trailer: bool) -> None:
    coded = b"".join(b"%X;x=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    end = b"0\r\nDigest: x\r\n\r\n" if trailer else b"0\r\n\r\n"
    reader = ResponseReader()
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    assert read(reader, cut(interim + CHUNKED + coded + end, places)) == b"".join(chunks)
    assert reader.complete
    assert reader.reusable
    assert reader.status == 200
    reader.end()


@given(st.binary(max_size=80), CUTS)
def test_a_sized_body_ends_by_itself(body: bytes, places: list[int]) -> None:
    reader = ResponseReader()
    head = b"HTTP/1.1 429 Too Many\r\ncontent-LENGTH: %d\r\n\r\n" % len(body)
    assert read(reader, cut(head + body, places)) == body
    assert (reader.status, reader.complete) == (429, True)


@given(st.binary(max_size=80), CUTS)
def test_a_body_without_a_size_ends_with_the_connection(body: bytes, places: list[int]) -> None:
    reader = ResponseReader()
    assert read(reader, cut(OK + b"\r\n" + body, places)) == body
    assert not ended(reader)
    reader.end()
    assert ended(reader)
    assert not reader.reusable


def ended(reader: ResponseReader) -> bool:
    return reader.complete


def test_who_closes_is_not_asked_again() -> None:
    reader = ResponseReader()
    reader.feed(OK + b"Connection: Close\r\nContent-Length: 0\r\n\r\n")
    assert reader.complete
    assert not reader.reusable


@pytest.mark.parametrize("sent", [b"", OK, CHUNKED, CHUNKED + b"5\r\nhel", CHUNKED + b"1\r\nx\r\n"])
def test_an_end_too_soon_is_an_error(sent: bytes) -> None:
    reader = ResponseReader()
    read(reader, [sent] if sent else [])
    with pytest.raises(BrokenAnswerError):
        reader.end()


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        OK + b"no header\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1\r\n\r\nab",
        CHUNKED + b"-5\r\n",
        CHUNKED + b"xyz\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"1\r\nabc\r\n",
        CHUNKED + b"0\r\n\r\nmore",
        CHUNKED + b"1" * (MAX_HEAD_BYTES + 1),
        b"x" * (MAX_HEAD_BYTES + 1),
    ],
)
def test_what_is_no_response_is_an_error(sent: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseReader().feed(sent)


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)


@given(st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=5), CUTS, st.booleans())
def test_events_come_whole(events: list[list[str]], places: list[int], crlf: bool) -> None:
    text = "".join(
        ": a comment\n\nevent: x\n" + "".join(f"data: {line}\n" for line in lines) + "\n"
        for lines in events
    )
    data = (text.replace("\n", "\r\n") if crlf else text).encode()
    reader = EventReader()
    got = [event for part in cut(data, places) for event in reader.feed(part)]
    assert got == ["\n".join(lines).encode() for lines in events]


def test_an_event_ends_with_its_empty_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data:1\n") == []
    assert reader.feed(b"\ndata: 2\n\n\n\ndata: 3") == [b"1", b"2"]
