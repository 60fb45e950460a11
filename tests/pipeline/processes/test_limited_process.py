"""Limited processes decode files of strangers, one process per file."""

from __future__ import annotations

import subprocess
import sys


def test_limited_processes_do_not_load_the_schema_of_recipes() -> None:
    # It takes as long to import as the rest of such a process.
    code = """
import sys
import pipeline.raw_images.parquet_process, pipeline.raw_images.where_process
import pipeline.validated_dataset.decode_process
assert "pipeline.recipe" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
