"""Validation of cron schedules: five fields, or a word such as @daily, as Dagster accepts them."""

from __future__ import annotations

import hashlib

from pipeline.errors import counted
from pipeline.recipe.settings import reject

FIELDS = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of month", 1, 31),
    ("month", 1, 12),
    ("day of week", 0, 7),
)
"""Name, smallest and largest number of each field, in order."""

WORDS = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_NAMES = {
    "month": ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    "day of week": ("sun", "mon", "tue", "wed", "thu", "fri", "sat"),
}
_DAYS_OF_SHORT_MONTHS = {2: 29, 4: 30, 6: 30, 9: 30, 11: 30}
SPREAD = "H"
"""Minute that the name of the recipe decides, as in Jenkins."""

_FIX = 'use five fields "minute hour day month weekday", such as "0 3 * * *" for 03:00 every day'


def check_cron(value: str) -> str:
    """Return `value` if it is a schedule that can occur; the extensions L and # are not supported."""
    # Not with Dagster's validator: `pipeline` does not import dagster, and the message names the wrong field.
    if value in WORDS:
        return value
    fields = value.split()
    if fields[:1] == [SPREAD]:
        fields[0] = "0"
    if len(fields) != len(FIELDS):
        reject(f"recache.cron must have 5 fields, got {counted(len(fields), 'field')} in {value!r}", _FIX)

    _, _, days, months, _ = [
        _numbers(text, name, low, high) for text, (name, low, high) in zip(fields, FIELDS, strict=True)
    ]
    # With a weekday, the schedule also runs on that weekday, whatever the day of the month.
    if fields[4] == "*" and all(min(days) > _DAYS_OF_SHORT_MONTHS.get(month, 31) for month in months):
        reject(f"recache.cron must name a day that its months have, got {value!r}", "use a day from 1 to 28")
    return value


def spread_cron(value: str, name: str) -> str:
    """Return a schedule with a minute that `name` decides in place of H, so that recipes start in turn."""
    first, *rest = value.split()
    if first != SPREAD:
        return value
    minute = int(hashlib.sha256(name.encode("utf-8")).hexdigest()[:8], 16) % 60
    return " ".join([str(minute), *rest])


def _numbers(text: str, name: str, low: int, high: int) -> set[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        first, dash, last = span.partition("-")
        step = _number(step_text, name, 1, high) if slash else 1
        if first == "*" and not dash:
            start, stop = low, high
        else:
            start = _number(first, name, low, high)
            # Dagster refuses it, because the week of a range ends on Saturday, 6.
            if slash and not dash and (name, start) == ("day of week", high):
                reject(
                    f"a range in recache.cron must not start with 7, got {part} as {name}",
                    "write 0 for Sunday",
                )
            # "10/5" means from 10 to the end of the range.
            stop = _number(last, name, low, high) if dash else (high if slash else start)
        if start > stop:
            what = f"a range in recache.cron must start before it ends, got {part} as {name}"
            reject(what, "write the smaller number first")
        numbers.update(range(start, stop + 1, step))
    return numbers


def _number(text: str, name: str, low: int, high: int) -> int:
    names = _NAMES.get(name, ())
    if text.lower() in names:
        return names.index(text.lower()) + (1 if name == "month" else 0)
    # Not str.isdecimal alone, which accepts the digits of other scripts.
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        reject(f"the {name} of recache.cron must be between {low} and {high}, got {text!r}", _FIX)
    return int(text)
