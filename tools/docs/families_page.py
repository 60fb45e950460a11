"""Generate the tables in docs/families.md: `python -m tools.docs.families_page`.

Shapes are read from the tiny models, which consist of the same classes as the real ones.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
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
"""Name of the markers around the tables of the families."""

NOISE_LEVELS = "noise levels"
"""Name of the markers around the table of noise levels."""

UNSUPPORTED = "unsupported pipelines"
"""Name of the markers around the table of pipelines without a family."""

Row = tuple[str, Callable[[Family], str]]


def table(work: Path) -> str:
    """Return the tables in Markdown, one for each tiny model; the models are written below `work`."""
    return "\n".join(_section(name, work / str(number)) for number, name in enumerate(TINY))


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


def _section(name: str, folder: Path) -> str:
    TINY[name](folder)
    family = detect(folder)
    rows = [f"| {heading} | {cell(family)} |" for heading, cell in ROWS]
    return "\n".join([f"| **{name}** | |", "|---|---|", *rows]) + "\n"


def _code(name: str) -> str:
    return f"`{name}`"


def _class(path: str) -> str:
    """Return the class name in a path such as `diffusers.AutoencoderKL`."""
    return path.rpartition(".")[2]


def _codes(*names: str) -> str:
    return ", ".join(_code(name) for name in names)


def _vae(family: Family) -> str:
    size = Size(8 * family.size_multiple(), 8 * family.size_multiple())
    channels, height, _ = family.latent_shape(size)
    kind = _code(_class(family.components["vae"]))
    return f"{kind}, {channels} latent channels, {size.height // height} px per latent value"


def _encoders(family: Family) -> str:
    roles = [role for role in family.text_roles() if role.startswith("text_encoder")]
    shape = family.text_shapes()["text_embedding"]
    return f"{_codes(*(_class(family.components[role]) for role in roles))}; {shape[0]} tokens"


def _prediction(family: Family) -> str:
    predictions = {"flow": "flow: noise minus latent", "epsilon": "epsilon or v, from the scheduler config"}
    density = family.density.replace("_", "-")
    shift = "; `training.timesteps.shift` is not available" if family.own_shift else ""
    return f"{predictions[family.prediction_type()]}; {density} noise levels{shift}"


def _targets(family: Family) -> str:
    # Targets with a block's number differ in nothing else.
    suffixes = {re.sub(r"^\d+\.", "", target) for target in family.lora_targets()}
    suffixes = {re.sub(r"(?<=blocks)\.\d+\.", ".*.", target) for target in suffixes}
    encoders = _codes(*family.trainable_text_encoders())
    return _codes(*sorted(suffixes)) + (
        f"; with `training.lora.text_encoders` also {encoders}" if encoders else ""
    )


def _kohya(family: Family) -> str:
    return "read back by diffusers" if family.kohya_loads() else "read back by the layout's own rules"


def _previews(family: Family) -> str:
    reason = family.no_negative_prompts
    negative = f"no negative prompts, because {reason}" if reason else "negative prompts"
    return f"guidance scale {family.guidance_scale:g}; {negative}"


def _references(family: Family) -> str:
    references = family.spec.references
    if references is None:
        return "none"
    number = "1" if references.max_number == 1 else f"up to {references.max_number}"
    rule = "scaled and cropped" if references.crops else "stretched"
    seen = "; the text encoder sees them too" if references.in_text is not None else ""
    return f"{number}, {rule} as in the pipeline{seen}"


_PADDING = {
    "stored": "one length for all; the denoiser sees the encoder's output for padding tokens",
    "zeros": "as long as the caption; the denoiser sees zeros for padding",
    "masked": "as long as the caption; padding is masked",
}

ROWS: tuple[Row, ...] = (
    ("pipeline", lambda family: _codes(*family.pipeline_classes)),
    ("VAE", _vae),
    ("text encoders", _encoders),
    ("caption entries", lambda family: _PADDING[family.text_padding]),
    ("denoiser", lambda family: _code(_class(family.components[family.denoiser_name]))),
    ("predicts", _prediction),
    ("reference images", _references),
    ("size multiple", lambda family: f"{family.size_multiple()} px"),
    ("LoRA on", _targets),
    ("kohya's file", _kohya),
    ("previews", _previews),
    ("tested by", lambda family: _code(f"tests/pipeline/models/families/{proof(family)}")),
)
"""Heading of each row, and the function that returns its cell for a family."""


def main() -> None:
    """Write the tables into the page."""
    with TemporaryDirectory() as work:
        families_table, levels_table = table(Path(work)), noise_table(Path(work))
    page = with_table(PAGE.read_text(encoding="utf-8"), FAMILIES, families_table)
    page = with_table(page, NOISE_LEVELS, levels_table)
    PAGE.write_text(with_table(page, UNSUPPORTED, unsupported_table()), encoding="utf-8")


if __name__ == "__main__":
    main()
