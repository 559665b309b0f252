"""Reading ahead: an iterator that is advanced by a thread of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterator
import queue
import threading
from typing import TypeVar

T = TypeVar("T")


class _End:
    """What the thread puts last: the exception that ended the iterator, if one did."""

    def __init__(self, error: BaseException | None):
        self.error = error


def ahead(items: Iterator[T], depth: int) -> Generator[T]:
    """The same items, up to ``depth`` of them made before they are asked for.

    Close the generator (or exhaust it) to end the thread; an exception of ``items`` is raised here in its turn.
    """
    made: queue.Queue[T | _End] = queue.Queue(depth)
    stopped = threading.Event()

    def offer(item: T | _End) -> bool:
        while not stopped.is_set():
            try:
                made.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not offer(item):
                    return
        except BaseException as error:
            offer(_End(error))
        else:
            offer(_End(None))

    thread = threading.Thread(target=work, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item = made.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stopped.set()
        thread.join()
