"""Generator of deploy/deployment.schema.json, which editors use to complete and validate deployment files.

Run `python -m tools.docs.deployment_schema` to write the file.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.recipe.deployment import SCHEMA_FILE, DeploymentFile
from pipeline.recipe.project import project_root
from pipeline.storage.atomic import write_text
from tools.docs.recipe_schema import json_schema


def schema_text() -> str:
    """Return the text of the file; it depends on the models only."""
    schema = json_schema(DeploymentFile, "Latentline deployment")
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def schema_path() -> Path:
    """Return the path of the schema, next to the examples."""
    return project_root() / SCHEMA_FILE


if __name__ == "__main__":
    write_text(schema_path(), schema_text())
