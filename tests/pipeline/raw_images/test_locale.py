"""The locale does not affect how files are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

INGEST = """
import sys, warnings
from pipeline.recipe import Recipe
from pipeline.raw_images.stage import scan
from pipeline.validated_dataset.stage import validate
from pipeline.reporting.reports import write_report
from pipeline.storage.tables import Tables
warnings.filterwarnings("error", category=EncodingWarning, module=r"pipeline\\.")
recipe = Recipe.model_validate_json(sys.stdin.buffer.read())
tables = Tables(recipe.output_dir)
raw = scan(recipe, tables, log=str)
write_report(recipe.output_dir, "raw_images", raw.report)
valid = validate(recipe, raw.table, tables, log=str)
tables.write("validated_dataset", valid.table)
tables.write_rejected("validated_dataset", valid.rejected)
"""
"""A script that fails if a text file is opened in the locale's encoding."""


@pytest.mark.parametrize("utf8", ["0", None], ids=["ASCII by default", "Python's choice"])
def test_C08_captions_are_the_same_under_another_locale(folder: Any, utf8: str | None) -> None:
    name = "\u00fcber" if utf8 is None else "uber"  # without UTF-8, such a name cannot be decoded
    folder.add(f"{name}.png", folder.picture(1), caption="caf\u00e9 \u2013 \u732b")
    folder.add("bom.png", folder.picture(2), caption="\ufeffna\u00efve".encode())
    folder.add("windows.png", folder.picture(3), caption=b"na\xefve")
    expected = folder.ingest()
    (folder.output_dir / "tables").rename(folder.output_dir / "expected")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "PYTHONUTF8"))}
    variables |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"} | ({} if utf8 is None else {"PYTHONUTF8": utf8})
    subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", INGEST],
        input=folder.recipe.model_dump_json().encode(),
        env=variables,
        cwd=Path(__file__).parents[3],
        check=True,
        timeout=120,
    )
    assert folder.tables.read("validated_dataset").equals(expected.table)
    reasons = folder.tables.read_rejected("validated_dataset").select("path", "reason", "detail")
    assert reasons.equals(expected.rejected.select("path", "reason", "detail"))
    assert reasons["reason"].to_list() == ["caption_undecodable"]
