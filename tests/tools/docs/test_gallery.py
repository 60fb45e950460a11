"""docs/gallery.md shows the stored scores, and these reach the demo's targets."""

from __future__ import annotations

import json

from demo.learned import MIN_AFTER, Learned
from pipeline.recipe.project import project_root
from tools.docs.gallery import PAGE, SCORES_FILE, render


def test_the_page_is_up_to_date() -> None:
    assert (project_root() / PAGE).read_text("utf-8") == render()


def test_the_demo_reaches_its_targets_and_shuffled_captions_do_not() -> None:
    scores = json.loads((project_root() / SCORES_FILE).read_text("utf-8"))
    assert Learned(**scores["demo"]).missed_targets() == []
    assert Learned(**scores["shuffled"]).concept_after < MIN_AFTER
