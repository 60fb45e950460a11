"""The table in docs/families.md, made of the families themselves: `python -m tools.docs.families_page`.

Shapes are asked of tiny models, which have every class of the real ones.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from demo.tiny_models import TINY
from pipeline.images.geometry import Size
from pipeline.models import families
from pipeline.models.families import Family, FamilySpec, detect

PAGE = Path("docs/families.md")
START, END = "<!-- families: begin -->", "<!-- families: end -->"

Row = tuple[str, Callable[[Family], str]]


def table(work: Path) -> str:
    """The table in Markdown, one section a family; tiny models are made below `work`."""
    return "\n".join(_section(name, work / str(number)) for number, name in enumerate(TINY))


def with_table(page: str, table: str) -> str:
    """The page with what is between its two marks replaced."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table}\n{END}{after}"


def proof(family: Family) -> str:
    """Return the name of the test file that proves a family."""
    return f"test_{module_of(family.spec)}.py"


def module_of(spec: FamilySpec) -> str:
    """Return the name of the module that declares a family."""
    for info in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{info.name}")
        if any(value is spec for value in vars(module).values()):
            return info.name
    raise ValueError(f"{spec.name} is not declared in {families.__name__}")


def _section(name: str, folder: Path) -> str:
    TINY[name](folder)
    family = detect(folder)
    lines = [f"| **{name}** | |", "|---|---|", *(f"| {head} | {say(family)} |" for head, say in ROWS)]
    return "\n".join(lines) + "\n"


def _code(name: str) -> str:
    return f"`{name}`"


def _class(path: str) -> str:
    """The class of a component without its library."""
    return path.rpartition(".")[2]


def _codes(*names: str) -> str:
    return ", ".join(_code(name) for name in names)


def _latent(family: Family) -> str:
    size = Size(8 * family.size_multiple(), 8 * family.size_multiple())
    channels, height, _ = family.latent_shape(size)
    return f"latents of {channels} channels, {size.height // height} px a value"


def _encoders(family: Family) -> str:
    roles = [role for role in family.text_roles() if role.startswith("text_encoder")]
    shape = family.text_shapes()["text_embedding"]
    return f"{_codes(*(_class(family.components[role]) for role in roles))}; {shape[0]} tokens"


def _prediction(family: Family) -> str:
    words = {"flow": "flow: noise minus latent", "epsilon": "epsilon or v, as its schedule says"}
    return f"{words[family.prediction_type()]}; noise levels {family.density.replace('_', '-')}"


def _targets(family: Family) -> str:
    ends = {target.split(".", 1)[1] if target[0].isdigit() else target for target in family.lora_targets()}
    text = "".join(f", {_code(role)}" for role in family.trainable_text_encoders())
    return _codes(*sorted(ends)) + (f"; with `training.lora.text_encoders` also{text[1:]}" if text else "")


def _kohya(family: Family) -> str:
    return "read back by diffusers" if family.kohya_loads() else "read back by its rule"


_PADDING = {
    "stored": "all of one length: padding's part in the embedding is seen by the denoiser, and stored",
    "zeros": "each as long as its caption; the denoiser sees zeros for padding",
    "masked": "each as long as its caption; no padding is seen by the denoiser",
}

ROWS: tuple[Row, ...] = (
    ("pipeline", lambda family: _codes(*family.pipeline_classes)),
    ("VAE", lambda family: f"{_code(_class(family.components['vae']))}, {_latent(family)}"),
    ("text encoders", _encoders),
    ("captions' entries", lambda family: _PADDING[family.text_padding]),
    ("denoiser", lambda family: _code(_class(family.components[family.denoiser_name]))),
    ("predicts", _prediction),
    ("sizes are multiples of", lambda family: f"{family.size_multiple()} px"),
    ("LoRA on", _targets),
    ("kohya's file", _kohya),
    ("proved by", lambda family: _code(f"tests/pipeline/models/families/{proof(family)}")),
)
"""Heading and what it says of a family."""


def main() -> None:
    """Write the table into the page."""
    with TemporaryDirectory() as work:
        made = table(Path(work))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
