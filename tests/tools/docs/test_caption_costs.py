"""The times of docs/captions.md: computed from models of the published sizes, and up to date."""

from __future__ import annotations

import pytest

from tools.docs.caption_costs import CARDS, PAGE, PUBLISHED, PublishedCaptioner, Work, complete_page, work_of


@pytest.mark.parametrize("captioner", PUBLISHED, ids=lambda each: each.name)
def test_a_model_has_its_published_number_of_parameters(captioner: PublishedCaptioner) -> None:
    assert round(work_of(captioner).num_parameters / 1e9, 2) == captioner.billions


def test_the_table_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == complete_page(page), "write it again: python -m tools.docs.caption_costs"


def test_the_time_follows_the_slower_one_of_operations_and_memory() -> None:
    card = CARDS[2]
    seeing = Work(1, card.peak_flops, 0, 0, 0)
    assert seeing.seconds(card, 0.5) == pytest.approx(2)
    reading = Work(1, 0, 1, 8 * 1_008_000_000, 0)
    assert reading.seconds(card, 1.0) == pytest.approx(100 * 0.001)
    assert Work(13 * 2**30, 1, 1, 1, 1).seconds(card, 1.0) is None
