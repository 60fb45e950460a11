"""The templates of the page. Jinja escapes every value, and control characters are shown as escapes."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from pipeline.errors import counted
from pipeline.escaping import printable_lines, without_secrets
from pipeline.page.charts import number_text
from pipeline.reporting.progress import duration_text


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template."""
    return _environment().get_template(template).render(**values)


def template_text(name: str) -> str:
    """Return a file next to the templates, such as the style sheet."""
    return files("pipeline.page").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pipeline.page"),
        autoescape=True,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "number": number_text,
        "duration": _duration,
        "size": _size,
        "counted": counted,
    }
    environment.filters.update(filters)
    return environment


def _printed(value: Any) -> Any:
    """Return a value as the page shows it: texts have escapes and no passwords."""
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return printable_lines(without_secrets(value))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2g} s" if seconds < 60 else duration_text(seconds)


def _size(number_bytes: int) -> str:
    return f"{number_bytes / 1e6:,.1f} MB" if number_bytes >= 100_000 else f"{number_bytes / 1e3:,.1f} kB"
