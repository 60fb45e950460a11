"""docs/tables.md lists the columns that other programs read from the tables."""

from pipeline.storage.tables import ASSETS, pandera_schema
from tools.docs.tables_page import page_path, page_text


def test_the_page_in_the_repository_is_up_to_date():
    text = page_path().read_text(encoding="utf-8")
    assert text == page_text(), (
        "a table has other columns than docs/tables.md says; if that is intended, add a line to CHANGELOG.md "
        "and write the page again: python -m tools.docs.tables_page"
    )


def test_every_table_has_a_section_with_all_its_columns_in_order():
    sections = dict(part.split("\n", 1) for part in page_text().split("\n## ")[1:])
    for asset in (*ASSETS, "rejected"):
        rows = [line.split("`")[1] for line in sections[asset].splitlines() if line.startswith("| `")]
        assert rows == list(pandera_schema(asset).columns), asset
