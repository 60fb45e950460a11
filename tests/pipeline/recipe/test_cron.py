"""A recipe's cron text is judged as Dagster will judge it, and it comes around."""

import pytest
from dagster._utils.schedules import is_valid_cron_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from pipeline.recipe.cron import WORDS, check_cron


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
def test_what_is_accepted_here_is_valid_for_dagster(text: str):
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
    ],
)
def test_usual_schedules_are_accepted(text: str):
    assert accepted(text)
    assert is_valid_cron_schedule(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "cron '' has 0 fields"),
        ("0 3 * *", "cron '0 3 * *' has 4 fields"),
        ("0 0 3 * * *", "has 6 fields"),
        ("61 3 * * *", "the cron text has '61' as minute, which goes from 0 to 59"),
        ("0 24 * * *", "'24' as hour, which goes from 0 to 23"),
        ("0 3 0 * *", "'0' as day of month"),
        ("0 3 * 13 *", "'13' as month"),
        ("0 3 * * 8", "'8' as day of week"),
        ("x 3 * * *", "'x' as minute"),
        ("*/0 3 * * *", "'0' as minute"),
        ("30-10 3 * * *", "the minute 30-10 of the cron text begins after it ends"),
        ("0 3 31 2,4 *", "names a day that its months do not have"),
        ("١ 3 * * *", "'١' as minute"),
        ("@noon", "has 1 field"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_its_reason(text: str, what: str):
    with pytest.raises(PydanticCustomError) as caught:
        check_cron(text)
    assert caught.value.context is not None
    (broken,) = caught.value.context["broken"]
    assert what in broken.what
    assert broken.fix
