"""docs/recipes.md: every key of a recipe, as the models have it.

`python -m tools.docs.recipes_page` writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.recipe.load import project_root
from pipeline.storage.atomic import write_text
from tools.docs.recipe_schema import recipe_schema

_TOP = """\
# Recipes: every key

One YAML file in `configs/` is one recipe; the file's name is the recipe's name. Unknown keys, wrong types
and contradictions are refused before anything runs, all at once, each with its line and what to write
instead: `latentline validate flowers`. `configs/recipe.schema.json` gives editors completion and these
descriptions.

Nothing is converted: `"False"` is no boolean, `1.0` no count. Relative paths start at the project's folder.
A key without a default must be given. This page is written by `python -m tools.docs.recipes_page`.
"""

Node = Mapping[str, Any]


def page_text() -> str:
    """The page, in Markdown; the same for the same models."""
    schema = recipe_schema()
    parts = [_TOP, *_section(schema, schema, "", "The recipe")]
    return "\n".join(parts).rstrip() + "\n"


def page_path() -> Path:
    """Where the page lies."""
    return project_root() / "docs" / "recipes.md"


def _section(schema: Node, node: Node, above: str, title: str) -> Iterator[str]:
    yield f"## {title}\n"
    if above:
        yield f"{node['description']}\n"
    yield "| key | what it takes | default | |\n|---|---|---|---|"
    below: list[tuple[str, Node]] = []
    for key, said in node["properties"].items():
        section = _section_of(schema, said)
        if section is not None:
            below.append((key, section))
        takes = _takes(schema, said) if section is None else "a section, below"
        if section is not None and said.get("type") == "array":
            takes = "a list of sections, below"
        described = said.get("description") or (section or {}).get("description", "")
        default = _default(said, key in node.get("required", ()), is_section=section is not None)
        yield f"| `{key}` | {takes} | {default} | {_cell(described)} |"
    yield ""
    for key, section in below:
        name = f"{above}{key}"
        yield from _section(schema, section, f"{name}.", f"`{name}`")


def _section_of(schema: Node, said: Node) -> Node | None:
    """The section that a key holds, or that its items are."""
    for place in (said, said.get("items", {}), *said.get("anyOf", ()), *said.get("allOf", ())):
        reference = place.get("$ref", "")
        if reference:
            found = schema["$defs"][reference.rpartition("/")[2]]
            return found if "properties" in found else None
    return None


def _takes(schema: Node, said: Node) -> str:
    if "anyOf" in said:
        return " or ".join(_takes(schema, each) for each in said["anyOf"])
    if "$ref" in said:
        return _takes(schema, schema["$defs"][said["$ref"].rpartition("/")[2]])
    if "enum" in said or "const" in said:
        choices = said.get("enum", [said.get("const")])
        return ", ".join(f"`{_yaml(choice)}`" for choice in choices)
    kind = said.get("type", "")
    if kind == "array":
        items = said.get("prefixItems") or [said.get("items", {})]
        return f"a list of {_takes(schema, items[0])}"
    words = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "`true`, `false`",
    }
    words |= {"null": "`null`", "object": "keys and values"}
    return words.get(kind, "anything") + _bounds(said)


def _bounds(said: Node) -> str:
    told = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    bounds = [f"{word} {said[name]:,}" for name, word in told.items() if name in said]
    return f" {' '.join(bounds)}" if bounds else ""


def _default(said: Node, required: bool, *, is_section: bool) -> str:
    if required:
        return "required"
    if is_section or "default" not in said:
        return ""
    return f"`{_yaml(said['default'])}`"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    write_text(page_path(), page_text())
