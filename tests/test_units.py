"""Sizes and ages."""

import pytest

from ninferbuild.units import format_size, parse_age, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200G", 200 * 10**9),
        ("200Gi", 200 * 2**30),
        ("200 GiB", 200 * 2**30),
        ("1.5k", 1500),
        ("0", 0),
        ("16384", 16384),
        ("12B", 12),
        ("2t", 2 * 10**12),
        ("1Ki", 1024),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1.5", "1e9", "i", "10i", "1 2", "٣G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 30 * 86400), ("12h", 43200), ("90m", 5400), ("45s", 45), ("2w", 14 * 86400), ("1.5h", 5400)],
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1y", ""])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(ValueError, match="not an age"):
        parse_age(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (8704, "8.70 kB"),
        (9995, "10.0 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (54_000_000_000, "54.0 GB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_formatted_sizes(size: int, text: str) -> None:
    assert format_size(size) == text
