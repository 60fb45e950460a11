"""Numbers of things in sentences."""

from __future__ import annotations


def counted(number: int, thing: str, things: str | None = None) -> str:
    """`number` and the word for so many: "1 image", "1,234 images".

    Args:
        number: At least 0.
        thing: One of them.
        things: Several of them; by default `thing` with an s. Both may go on with a verb: "image has".
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def verb(number: int, one: str, several: str) -> str:
    """The form of a verb that goes with `number` things: "is" or "are"."""
    return one if number == 1 else several
