"""Output folders at an address: each step pulls what it needs, and pushes its results."""

from collections.abc import Generator
from contextlib import contextmanager

from dagster import AssetExecutionContext

from assets.run_log import run_log
from pipeline.errors import LatentlineError
from pipeline.recipe import Recipe


@contextmanager
def mirrored_outputs(context: AssetExecutionContext, recipe: Recipe, asset: str) -> Generator[None]:
    """Pull the files of a stage before the body, and push them after it, also after an error such as a gate.

    A local output folder needs neither. Call it after path isolation has been checked.

    Raises:
        StoreError: The service does not answer.
    """
    from pipeline.recipe.outputs import mirror_of, pull_stage, push_stage

    log = run_log(context)
    mirror = mirror_of(recipe, log)
    pull_stage(mirror, asset)
    try:
        yield
    except LatentlineError:
        # The error matters more than the upload, which the next run repeats.
        try:
            push_stage(mirror, asset)
        except (LatentlineError, OSError) as err:
            reason = err.what if isinstance(err, LatentlineError) else str(err)
            log(f"warning: the results are not uploaded yet: {reason}")
        raise
    push_stage(mirror, asset)
