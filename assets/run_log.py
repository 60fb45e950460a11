"""The log of an asset, for lines that contain file names and addresses."""

from collections.abc import Callable

from dagster import AssetExecutionContext

from pipeline.escaping import printable_lines, without_secrets
from resources.step_log import StepLog


def run_log(context: AssetExecutionContext) -> Callable[[str], None]:
    """Return a function that logs a line without secrets and control characters, see `StepLog`."""
    log = StepLog(context)
    return lambda text: log.info(printable_lines(without_secrets(text)))
