"""The progress of a device, measured by events on its stream."""

from __future__ import annotations

from collections.abc import Callable

from disco_ds.distributed.progress import Progress


class Stream:
    """Work that is done up to a point."""

    def __init__(self) -> None:
        self.given = self.done = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """What another thread does while an event is recorded."""

    def make_event(self) -> Event:
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
    progress = Progress(stream.make_event)
    for step in range(100):
        progress.mark(step, "forward")
        progress.mark(step, "loss")
        stream.done = stream.given - 1
        progress.poll_device()
        assert (progress.host.number, progress.device.number) == (stream.given, stream.done)
        assert str(progress.device) == f"step {step}, forward"


def test_without_a_device_the_host_does_the_work():
    progress = Progress()
    progress.mark(3, "loss")
    progress.poll_device()
    assert progress.device == progress.host == (1, 3, "loss")


def test_mark_that_the_device_has_not_reached_is_never_taken_for_passed():
    """Also when another thread polls the device while a mark is being recorded."""
    stream = Stream()
    progress = Progress(stream.make_event)
    stream.meanwhile = progress.poll_device
    for step in range(50):
        stream.done = stream.given
        progress.mark(step, "forward")
        assert progress.device.number <= stream.done
    progress.poll_device()
    assert progress.device.number == stream.done
