"""Runs of one asset of the recipe `small`."""

from __future__ import annotations

from typing import Any

from resources.failures import errors_as_failures


def raises(error: BaseException) -> Any:
    def body() -> None:
        with errors_as_failures(recipe="small"):
            raise error

    return body
