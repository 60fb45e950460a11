"""The recipes that a process needs: all of them, but where one job is named, only that job's.

Of what loading costs, most is what Dagster makes of each recipe's steps, checks and jobs. The recipes
themselves are all read in any case, so that a mistake in any of them is found.
"""

from collections.abc import Sequence

from assets.last_words import is_dagster_command
from assets.naming import JOBS
from pipeline.recipe import Recipe


def asked_for(argv: list[str], recipes: Sequence[Recipe]) -> Sequence[Recipe]:
    """The one of `recipes` whose job `dagster job execute` is to run in this process, otherwise all.

    All, too, when no recipe has a job of that name: Dagster's answer lists those that there are.

    Args:
        argv: The arguments of the process, its program first.
        recipes: Those that are to choose from.
    """
    named = _named_job(argv)
    return [one for one in recipes if named in {f"{one.name}_{job}" for job in JOBS}] or recipes


def _named_job(argv: list[str]) -> str | None:
    if not is_dagster_command(argv) or argv[1:3] != ["job", "execute"]:
        return None
    for option, value in zip(argv[3:], [*argv[4:], ""], strict=True):
        if option in {"-j", "--job"}:
            return value
        for start in ("--job=", "-j"):
            if option.startswith(start):
                return option.removeprefix(start)
    return None
