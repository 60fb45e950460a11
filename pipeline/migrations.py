"""Files that release 0.2.0 wrote in another form, converted to the form of this version.

No other code reads an older form. The keys of cache entries and the ids of finished runs are unchanged
(`RECIPE_FACTS` in `trained_lora/recipe_facts.py`). An unfinished run of another version does not resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SINCE_0_3: Mapping[str, Any] = {"negative": None, "references": ()}
"""Settings of a preview prompt that 0.2.0 lacks, with the values that its previews had."""


def migrated_order(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a run's `order.json` with all settings of its preview prompts."""
    # `latentline sample` draws with the recipe and the prompts of a finished run.
    return {**order, "prompts": [{**SINCE_0_3, **prompt} for prompt in order["prompts"]]}
