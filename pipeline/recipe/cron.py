"""Whether a text is a cron schedule that Dagster takes: five fields, or a word such as @daily."""

from __future__ import annotations

from pipeline.errors import counted
from pipeline.recipe.rules import reject

FIELDS = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of month", 1, 31),
    ("month", 1, 12),
    ("day of week", 0, 7),
)
"""In order: name, lowest and highest number."""

WORDS = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_NAMES = {
    "month": ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    "day of week": ("sun", "mon", "tue", "wed", "thu", "fri", "sat"),
}
_LONGEST_MONTH = {2: 29, 4: 30, 6: 30, 9: 30, 11: 30}
_EXAMPLE = 'use five fields "minute hour day month weekday", such as "0 3 * * *" for 03:00 every day'


def check_cron(value: str) -> str:
    """`value` if it is a schedule that comes around; last-day and nth-weekday extensions are not taken."""
    if value in WORDS:
        return value
    fields = value.split()
    if len(fields) != len(FIELDS):
        reject(f"cron {value!r} has {counted(len(fields), 'field')}", _EXAMPLE)
    numbers = [
        _numbers(text, name, low, high) for text, (name, low, high) in zip(fields, FIELDS, strict=True)
    ]
    _, _, days, months, _ = numbers
    if fields[4] == "*" and all(min(days) > _LONGEST_MONTH.get(month, 31) for month in months):
        reject(f"cron {value!r} names a day that its months do not have", "use a day from 1 to 28")
    return value


def _numbers(text: str, name: str, low: int, high: int) -> set[int]:
    """The numbers that a field stands for."""
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        first, dash, last = span.partition("-")
        step = _number(step_text, name, 1, high) if slash else 1
        if first == "*" and not dash:
            start, stop = low, high
        else:
            start = _number(first, name, low, high)
            stop = _number(last, name, low, high) if dash else (high if slash else start)
        if start > stop:
            reject(
                f"the {name} {part} of the cron text begins after it ends", "write the smaller number first"
            )
        found.update(range(start, stop + 1, step))
    return found


def _number(text: str, name: str, low: int, high: int) -> int:
    names = _NAMES.get(name, ())
    if text.lower() in names:
        return names.index(text.lower()) + (1 if name == "month" else 0)
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        reject(f"the cron text has {text!r} as {name}, which goes from {low} to {high}", _EXAMPLE)
    return int(text)
