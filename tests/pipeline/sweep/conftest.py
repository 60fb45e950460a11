"""The finished run of the evaluation's tests, which is one of the variants."""

from __future__ import annotations

from tests.pipeline.evaluation.conftest import any_precision, evaluated_once, one_thread, trained

__all__ = ["any_precision", "evaluated_once", "one_thread", "trained"]
