"""What the terminal shows last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dagster import Failure

from assets.last_words import failures_stated
from pipeline.errors import StoreError

ENDS = """
import sys
sys.argv = [{command!r}]
from assets.last_words import keep
keep("StoreError: one")
keep("StoreError: one")
keep("StoreError: two")
print("Error: Run 123 resulted in failure.", file=sys.stderr)
sys.exit(1)
"""


def ends(command: str) -> tuple[int, str]:
    code = ENDS.format(command=command)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["/venv/bin/dagster", "/lib/python3/dagster/__main__.py"])
def test_each_problem_is_printed_once_after_dagsters_own_last_line(command: str) -> None:
    status, text = ends(command)
    assert status == 1
    assert text == "Error: Run 123 resulted in failure.\n\nStoreError: one\n\nStoreError: two\n"


def test_other_programs_that_import_the_definitions_are_left_alone() -> None:
    assert ends("/venv/bin/pytest")[1] == "Error: Run 123 resulted in failure.\n"


def test_a_latentline_error_becomes_a_failure_that_is_not_retried() -> None:
    with pytest.raises(Failure) as raised, failures_stated():
        raise StoreError("the entry is cut short", where="cache/ab.safetensors", fix="run the cache job")
    assert raised.value.allow_retries is False
    assert raised.value.description is not None
    assert raised.value.description.startswith("StoreError: the entry is cut short\n  where: cache/ab")
    assert set(raised.value.metadata) == {"what", "where", "fix"}


def test_any_other_error_is_a_defect_and_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), failures_stated():
        raise ZeroDivisionError
