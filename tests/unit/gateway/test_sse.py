"""Event streams: the events never depend on where reads end."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.core.dialects.sse import SseDecoder, SseError, SseEvent, frame

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
texts = st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=20)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[SseEvent]]:
    """A stream with comments and fields, and what it says."""
    out, events = bytearray(draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))), []
    # Mixed ends would not be unambiguous: CR and then LF is one end.
    end = draw(line_ends)
    for _ in range(draw(st.integers(0, 5))):
        lines, data, name = [], [], ""
        for kind in draw(st.lists(st.sampled_from(["data", "event", "comment", "id", "bare"]), max_size=4)):
            text = draw(texts)
            if kind == "data":
                lines.append(b"data:" + draw(st.sampled_from([b"", b" "])) + b"x" + text.encode())
                data.append(b"x" + text.encode())
            elif kind == "event":
                name = "n" + text
                lines.append(b"event: " + name.encode())
            elif kind == "comment":
                lines.append(b":" + text.encode())
            elif kind == "id":
                lines.append(b"id: 7")
            else:
                lines.append(b"data")
                data.append(b"")
        for line in lines:
            out += line + end
        out += end
        if data:
            events.append(SseEvent(b"\n".join(data), name))
    return bytes(out), events


@given(streams(), st.data())
def test_any_split_gives_the_same_events(stream: tuple[bytes, list[SseEvent]], data: st.DataObject) -> None:
    raw, expected = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    decoder = SseDecoder()
    got = []
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        got += decoder.feed(raw[begin:end])
    assert got == expected
    assert decoder.finish() == []


def decoded(reads: Iterable[bytes]) -> list[SseEvent] | None:
    """The events; None for what is no stream."""
    decoder = SseDecoder()
    try:
        return [event for read in reads for event in decoder.feed(read)] + decoder.finish()
    except SseError:
        return None


@given(st.binary(max_size=200) | st.text("data:id\r\n ", max_size=60).map(str.encode))
def test_any_bytes_byte_by_byte(raw: bytes) -> None:
    assert decoded([raw]) == decoded(raw[place : place + 1] for place in range(len(raw)))


@pytest.mark.parametrize("damage", [b"\x00", b"x", b" ", b"d", b"data"])
def test_a_damaged_line_is_not_skipped(damage: bytes) -> None:
    with pytest.raises(SseError, match="no field of one"):
        SseDecoder().feed(b"data: 1\n\n" + damage + b"data: 2\n\ndata: 3\n\n")


def test_a_stream_that_lacks_its_last_line_end_still_ends_with_its_event() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: [DONE]") == []
    assert decoder.finish() == [SseEvent(b"[DONE]")]


def test_size_is_bounded() -> None:
    with pytest.raises(SseError, match="over 10 bytes"):
        SseDecoder(max_event_bytes=10).feed(b"data: too much")
    with pytest.raises(SseError, match="over 10 bytes"):
        SseDecoder(max_event_bytes=10).feed(b"data: 123456\ndata: 123456\n")


def test_frame_is_one_event() -> None:
    assert SseDecoder().feed(frame(b'{"a":1}')) == [SseEvent(b'{"a":1}')]
