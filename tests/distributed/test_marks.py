"""How far a device has come, by events that are used in turn."""

from __future__ import annotations

from collections.abc import Callable

from disco_ds.distributed.marks import NUM_EVENTS, Marks


class Stream:
    """Work that is done up to a point."""

    def __init__(self) -> None:
        self.given = self.done = self.made = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """What another thread does while an event is recorded."""

    def make_event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream):
        self.stream, self.at = stream, 0

    def record(self) -> None:
        self.stream.meanwhile()
        self.stream.given += 1
        self.at = self.stream.given

    def query(self) -> bool:
        return self.at <= self.stream.done


def test_device_follows_the_host():
    stream = Stream()
    marks = Marks(stream.make_event)
    for step in range(100):
        marks.set(step, "forward")
        marks.set(step, "loss")
        stream.done = stream.given - 1
        marks.look()
        assert (marks.host.number, marks.device.number) == (stream.given, stream.done)
        assert str(marks.device) == f"step {step}, forward"
    assert stream.made == NUM_EVENTS


def test_without_a_device_the_host_does_the_work():
    marks = Marks()
    marks.set(3, "loss")
    marks.look()
    assert marks.device == marks.host == (1, 3, "loss")


def test_mark_that_the_device_has_not_reached_is_never_taken_for_passed():
    """Also where its event, of an earlier mark so far, is asked at the moment it is recorded anew."""
    stream = Stream()
    marks = Marks(stream.make_event)
    stream.meanwhile = marks.look
    for step in range(3 * NUM_EVENTS):
        stream.done = stream.given
        marks.set(step, "forward")
        assert marks.device.number <= stream.done
    marks.look()
    assert marks.device.number == stream.done
