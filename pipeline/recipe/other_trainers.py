"""Names that other trainers use for the settings of a recipe, for messages and docs/coming_from.md.

other_trainers.toml lists them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Term:
    """A setting of another trainer.

    Attributes:
        theirs: Name of the setting there.
        ours: Full name of the recipe key, as in `schema.all_keys`; None if Latentline lacks one.
        note: Differences between the two, or why there is no key; may be empty if there is one.
    """

    trainer: str
    theirs: str
    ours: str | None
    note: str = ""

    @property
    def shown(self) -> str | None:
        """The recipe key as messages show it, such as `datasets[].path`."""
        if self.ours is None:
            return None
        return self.ours.replace("datasets.", "datasets[].").replace("sample_prompts.", "sample_prompts[].")

    @property
    def fix(self) -> str:
        """Fix in the error about a recipe that has this setting's name as a key."""
        if self.ours is None:
            return f"remove it; {self.note}"
        note = f" ({self.note})" if self.note else ""
        return f"write {self.shown}, the equivalent of {self.theirs} in {self.trainer}{note}"


@cache
def terms_by_trainer() -> dict[str, tuple[Term, ...]]:
    """Return all settings, by trainer."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        trainer: tuple(
            Term(trainer, theirs, value)
            if isinstance(value, str)
            else Term(trainer, theirs, value.get("key"), value["note"])
            for theirs, value in settings.items()
        )
        for trainer, settings in tomllib.loads(text).items()
    }


def term_of(name: str) -> Term | None:
    """Return the first setting that a trainer calls `name`, or None."""
    terms = (term for terms in terms_by_trainer().values() for term in terms)
    return next((term for term in terms if term.theirs == name), None)
