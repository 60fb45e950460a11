"""The job file of a training that ends before its first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.recipe import recipe_from_mapping
from pipeline.storage.atomic import write_text


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """The job file of two processes, whose inputs no test reads."""
    values = {
        "datasets": [{"name": "photos", "path": tmp_path / "photos"}],
        "output_dir": tmp_path / "output",
        "cache_dir": tmp_path / "cache",
        "model": {"base": "no/model"},
        "accelerate": {"num_processes": 2},
    }
    recipe = recipe_from_mapping("demo", values)
    file = tmp_path / "output" / "runs" / "0123456789abcdef" / "order.json"
    file.parent.mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    job = {"recipe": recipe.model_dump(mode="json"), "prompts": [], "run": file.parent.name}
    write_text(file, json.dumps({**job, "base": str(tmp_path), "elsewhere": {}}))
    file.with_name("inputs.parquet").write_bytes(b"")
    return file
