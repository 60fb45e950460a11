"""Generate the tables in docs/families.md: `python -m tools.docs.families_page`.

Shapes are read from the tiny models, which consist of the same classes as the real ones.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from demo.tiny_models import TINY
from pipeline.images.geometry import Size
from pipeline.models import families
from pipeline.models.families import Family, FamilySpec, detect
from tools.docs.noise_levels import noise_table
from tools.docs.unsupported_pipelines import unsupported_table

PAGE = Path("docs/families.md")

FAMILIES = "families"
"""Name of the markers around the matrix of the families."""

NOISE_LEVELS = "noise levels"
"""Name of the markers around the table of noise levels."""

UNSUPPORTED = "unsupported pipelines"
"""Name of the markers around the table of pipelines without a family."""

WITHOUT_LOADER = "pipelines without a loader"
"""Name of the markers around the table of pipelines that cannot load a LoRA."""

Column = tuple[str, Callable[[Family], str]]


def table(work: Path) -> str:
    """Return the matrix in Markdown, one row for each tiny model; the models are written below `work`."""
    headings = ("base model", *(heading for heading, _ in COLUMNS))
    rows = [_row(name, work / str(number)) for number, name in enumerate(TINY)]
    return "\n".join([_line(headings), _line(["---"] * len(headings)), *rows]) + "\n"


def with_table(page: str, name: str, table: str) -> str:
    """Return the page with everything between the two markers of this name replaced."""
    start, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{table}\n{end}{after}"


def proof(family: Family) -> str:
    """Return the name of the family's test file."""
    return f"test_{module_of(family.spec)}.py"


def module_of(spec: FamilySpec) -> str:
    """Return the name of the module that declares a family.

    Raises:
        ValueError: No module of `pipeline.models.families` contains the declaration.
    """
    for info in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{info.name}")
        if any(value is spec for value in vars(module).values()):
            return info.name
    raise ValueError(f"{spec.name} is not declared in {families.__name__}")


def _row(name: str, folder: Path) -> str:
    TINY[name](folder)
    family = detect(folder)
    return _line([f"**{name}**", *(cell(family) for _, cell in COLUMNS)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _class(path: str) -> str:
    """Return the class name in a path such as `diffusers.AutoencoderKL`."""
    return path.rpartition(".")[2]


def _latents(family: Family) -> str:
    size = Size(8 * family.size_multiple(), 8 * family.size_multiple())
    channels, height, _ = family.latent_shape(size)
    return f"{channels} x {size.height // height} px"


def _encoders(family: Family) -> str:
    roles = [role for role in family.text_roles() if role.startswith("text_encoder")]
    classes = [_class(family.spec.components[role]) for role in roles]
    return "<br>".join(f"`{name}`" for name in classes)


def _tokens(family: Family) -> str:
    return str(family.text_shapes()["text_embedding"][0])


_PADDING = {"stored": "as encoded", "zeros": "zeros", "masked": "masked"}

_PREDICTIONS = {"flow": "flow", "epsilon": "epsilon or v"}

_FEED_FORWARD = re.compile(r"\bffn?\b|mlp|feed_forward|proj_out")
"""Names of feed-forward layers in the LoRA targets of all families."""


def _lora(family: Family) -> str:
    has_more = any(_FEED_FORWARD.search(target) for target in family.lora_targets())
    encoders = "<br>text encoders" if family.trainable_text_encoders() else ""
    return ("attention, feed-forward" if has_more else "attention") + encoders


def _kohya(family: Family) -> str:
    return "diffusers" if family.kohya_loads() else "Latentline"


def _guidance(family: Family) -> str:
    return f"{family.spec.guidance_scale:g}" + (", positive only" if family.no_negative_prompts else "")


def _references(family: Family) -> str:
    references = family.spec.references
    if references is None:
        return "-"
    number = "1" if references.max_number == 1 else f"up to {references.max_number}"
    rule = "cropped" if references.crops else "stretched"
    return f"{number}, {rule}" + (", in text too" if references.in_text is not None else "")


COLUMNS: tuple[Column, ...] = (
    ("latents", _latents),
    ("text encoders", _encoders),
    ("tokens", _tokens),
    ("padding", lambda family: _PADDING[family.spec.text.padding]),
    ("predicts", lambda family: _PREDICTIONS[family.prediction_type()]),
    ("edges", lambda family: f"{family.size_multiple()} px"),
    ("references", _references),
    ("LoRA on", _lora),
    ("kohya read by", _kohya),
    ("guidance", _guidance),
)
"""Heading of each column, and the function that returns its cell for a family."""


def with_unsupported(page: str) -> str:
    """Return the page with both tables of pipelines without a family."""
    page = with_table(page, UNSUPPORTED, unsupported_table())
    return with_table(page, WITHOUT_LOADER, unsupported_table("without_loader"))


def main() -> None:
    """Write the tables into the page."""
    with TemporaryDirectory() as work:
        families_table, levels_table = table(Path(work)), noise_table(Path(work))
    page = with_table(PAGE.read_text(encoding="utf-8"), FAMILIES, families_table)
    page = with_table(page, NOISE_LEVELS, levels_table)
    PAGE.write_text(with_unsupported(page), encoding="utf-8")


if __name__ == "__main__":
    main()
