"""A preview prompt that the base model cannot draw stops the job before anything is scanned."""

from __future__ import annotations


def test_the_first_asset_fails_on_a_size_that_the_base_model_cannot_draw(fresh) -> None:
    fresh.recipe(training={"steps": 4, "sample_prompts": [{"prompt": "a cat", "height": 63, "width": 64}]})
    result = fresh.execute("train")
    [failure] = result.get_step_failure_events()
    assert failure.step_key == "small__raw_images"
    assert "height and width must be multiples of 8" in str(failure.event_specific_data)
    assert not fresh.cache.exists()
    assert not (fresh.out / "tables").exists()
