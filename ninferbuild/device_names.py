"""What a device may be called. Told apart from what there is, because asking for that imports torch."""

from __future__ import annotations


def parse_device(name: str) -> tuple[int, ...] | None:
    """GPU numbers of ``cuda:N[,N…]``, none for ``cuda`` (every GPU); None for ``cpu``.

    Raises:
        ValueError: anything else, or a GPU named twice.
    """
    kind, colon, indices = name.partition(":")
    if name == "cpu":
        return None
    if kind != "cuda":
        raise ValueError("no such device; use cpu, cuda, or GPUs by number such as cuda:0,1")
    if not colon:
        return ()
    numbers = indices.split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError("GPUs are given by number, such as cuda:0,1")
    parsed = tuple(map(int, numbers))
    if len(set(parsed)) != len(parsed):
        raise ValueError("each GPU may be named once")
    return parsed
