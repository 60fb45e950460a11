"""Options of `latentline new` replace settings in the text of a recipe."""

from __future__ import annotations

from pipeline.new_recipe.chosen_settings import with_settings

RECIPE = """\
datasets:
  - {name: a, path: data/a, resolution: 512, flip: true}
  - {name: b, path: data/b, resolutions: [512, 768], caption_dropout: 0.2}
"""


def test_a_chosen_setting_applies_to_datasets_with_a_value_of_their_own() -> None:
    text = with_settings(RECIPE, {"buckets.resolution": 1024, "latents.flip": False})
    assert "{name: a, path: data/a}" in text
    assert "{name: b, path: data/b, caption_dropout: 0.2}" in text
    assert "resolution: 1024" in text
