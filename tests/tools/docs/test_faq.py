"""The questions: patterns of blocks match modules of the models that they are for."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import diffusers
import pytest
import torch
from accelerate import init_empty_weights

from pipeline.models.families import detect
from tests.tiny_models import TinyModel

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "faq.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([A-Z].+?) \| (.+?) \| `(.+?)` \|$", PAGE, re.MULTILINE)


def test_the_table_of_blocks_is_found() -> None:
    assert len(ROWS) == 23


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize(("kind", "blocks", "example"), ROWS, ids=[row[0] for row in ROWS])
def test_blocks_and_examples_match_modules_of_the_model(
    tiny_model: TinyModel, kind: str, blocks: str, example: str
) -> None:
    family = detect(tiny_model(kind))
    config = family.denoiser_config
    with init_empty_weights():
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    layers = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    assert [name for name in layers if fnmatchcase(name, example)]
    stems = {re.sub(r"[.]?(<number>|\d+)$", "", each) for each in re.findall(r"`([a-z_.<>\d]+)`", blocks)}
    for stem in stems - {""}:
        assert [name for name in layers if name.startswith(f"{stem}.")], stem
