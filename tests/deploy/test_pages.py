"""The documentation of deploy/."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_in_deploy_is_on_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    files = sorted(path.name for path in (ROOT / "deploy").iterdir())
    assert [name for name in files if f"deploy/{name}" not in pages] == []
