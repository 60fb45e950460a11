"""Static HTML pages: one style, no JavaScript, and nothing from the network."""

from __future__ import annotations

from pipeline.escaping import html_text

_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fff; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .5rem; border: 1px solid #ddd; border-radius: 4px; overflow-wrap: anywhere; }
figure img, .frame { display: block; max-width: 100%; margin: 0 auto .5rem; }
.frame { height: 6rem; line-height: 6rem; text-align: center; background: #ddd; color: #555; }
figcaption > * { display: block; font-size: 13px; }
small { color: #666; } em { margin-top: .3rem; } nav a, nav b { margin-right: .3rem; }
"""


def html_page(title: str, body: str) -> str:
    """Return a complete page.

    Args:
        title: Plain text of the title and heading.
        body: HTML below the heading, with all texts escaped by `html_text`.
    """
    heading = html_text(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{heading}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{heading}</h1>\n{body}\n</body>\n</html>\n"
    )
