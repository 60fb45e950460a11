"""A cron schedule is accepted only if Dagster accepts it and it can occur."""

import pytest
from dagster._utils.schedules import is_valid_cron_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from pipeline.recipe.cron import WORDS, check_cron, spread_cron


def accepted(text: str) -> bool:
    try:
        check_cron(text)
    except PydanticCustomError:
        return False
    return True


PART = st.from_regex(r"\A(\*|[0-9]{1,2}(-[0-9]{1,2})?|mon|JAN|fri-sat)(/[0-9]{1,2})?\Z")
FIELD = st.lists(PART, min_size=1, max_size=2).map(",".join)


@settings(max_examples=300)
@given(st.lists(FIELD, min_size=5, max_size=5).map(" ".join))
def test_every_accepted_schedule_is_valid_for_dagster(text: str):
    assert not accepted(text) or is_valid_cron_schedule(text)


@pytest.mark.parametrize(
    "text",
    [
        *WORDS,
        "0 3 * * *",
        "*/15 * * * *",
        "0 0-6/2 1,15 * mon-fri",
        "5 4 * JAN sun",
        "0 0 29 2 *",
        "10/5 * * * 7",
        " 0\t3 * * 5-7/2\n",
    ],
)
def test_common_schedules_are_accepted(text: str):
    assert accepted(text)
    assert is_valid_cron_schedule(text)


# With a tab after H or a space before it, Dagster refused the schedule, and no recipe could be loaded.
@pytest.mark.parametrize("text", ["H 3 * * *", "H */4 * * mon-fri", "H\t3 * * *", " H 3 * * *\n"])
def test_the_minute_H_is_a_number_of_the_recipe(text: str):
    assert accepted(text)
    minutes = {spread_cron(text, f"flowers{number}").split()[0] for number in range(40)}
    assert len(minutes) > 20
    assert {int(minute) for minute in minutes} <= set(range(60))
    assert spread_cron(text, "flowers") == spread_cron(text, "flowers")
    assert is_valid_cron_schedule(spread_cron(text, "flowers"))
    assert spread_cron(text, "flowers").split()[1:] == text.split()[1:]


@pytest.mark.parametrize("text", ["3 H * * *", "H/5 3 * * *", "h 3 * * *"])
def test_only_the_minute_may_be_H(text: str):
    assert not accepted(text)


@pytest.mark.parametrize("text", ["@daily", "0 3 * * *"])
def test_other_schedules_are_the_same_for_all_recipes(text: str):
    assert spread_cron(text, "flowers") == text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "must have 5 fields, got 0 fields in ''"),
        ("0 3 * *", "must have 5 fields, got 4 fields in '0 3 * *'"),
        ("0 0 3 * * *", "got 6 fields"),
        ("61 3 * * *", "the minute of recache.cron must be between 0 and 59, got '61'"),
        ("0 24 * * *", "the hour of recache.cron must be between 0 and 23, got '24'"),
        ("0 3 0 * *", "day of month of recache.cron must be between 1 and 31, got '0'"),
        ("0 3 * 13 *", "month of recache.cron must be between 1 and 12, got '13'"),
        ("0 3 * * 8", "day of week of recache.cron must be between 0 and 7, got '8'"),
        ("x 3 * * *", "minute of recache.cron must be between 0 and 59, got 'x'"),
        ("*/0 3 * * *", "minute of recache.cron must be between 1 and 59, got '0'"),
        ("0 3 * * 7/2", "a range in recache.cron must not start with 7, got 7/2 as day of week"),
        ("30-10 3 * * *", "must start before it ends, got 30-10 as minute"),
        ("0 3 31 2,4 *", "must name a day that its months have"),
        ("١ 3 * * *", "minute of recache.cron must be between 0 and 59, got '١'"),
        ("@noon", "got 1 field in"),
    ],
)
def test_an_invalid_schedule_is_refused_with_the_reason(text: str, what: str):
    with pytest.raises(PydanticCustomError) as excinfo:
        check_cron(text)
    assert excinfo.value.context is not None
    (violation,) = excinfo.value.context["violations"]
    assert what in violation.what
    assert violation.fix
