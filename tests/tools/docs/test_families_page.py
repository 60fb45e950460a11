from __future__ import annotations

import inspect
from pathlib import Path

import diffusers
import pytest
from diffusers import PRXTransformer2DModel

from demo.tiny_models import TINY
from pipeline.models.families import FAMILIES, detect
from pipeline.recipe import project_root
from tests.tiny_models import TinyModel
from tools.docs.families_page import FAMILIES as FAMILIES_MARKER
from tools.docs.families_page import NOISE_LEVELS, PAGE, proof, table, with_table, with_unsupported
from tools.docs.noise_levels import noise_table

# diffusers' Chroma imports a class from a deprecated path; its ChatGLM calls a deprecated function of torch.
FAMILY_TESTS = Path(__file__).parents[2] / "pipeline" / "models" / "families"

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


def test_the_page_is_generated_from_the_families(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The models that other tests of the session also use, in place of one more copy of each.
    links = {kind: lambda folder, kind=kind: folder.symlink_to(tiny_model(kind)) for kind in TINY}
    for module in ("families_page", "noise_levels"):
        monkeypatch.setattr(f"tools.docs.{module}.TINY", links)
        (tmp_path / module).mkdir()

    page = (project_root() / PAGE).read_text(encoding="utf-8")
    expected = with_table(page, FAMILIES_MARKER, table(tmp_path / "families_page"))
    expected = with_table(expected, NOISE_LEVELS, noise_table(tmp_path / "noise_levels"))
    expected = with_unsupported(expected)
    assert page == expected, "run python -m tools.docs.families_page"


def test_every_family_has_a_tiny_model_and_a_test_of_the_complete_job(tiny_model: TinyModel) -> None:
    tested: set[str] = set()
    for kind in TINY:
        family = detect(tiny_model(kind))
        tested.add(family.spec.name)
        text = (FAMILY_TESTS / proof(family)).read_text(encoding="utf-8")
        assert family.spec.pipeline_classes[0] in text
        assert "the_complete_job" in text
    assert tested == {spec.name for spec in FAMILIES}


def test_diffusers_still_lacks_what_the_page_says_it_lacks() -> None:
    names = [name.lower() for name in dir(diffusers)]
    for name in ("hidreamo1", "boogu", "mageflow"):
        assert not [each for each in names if name in each], f"diffusers has {name} now: add a family"
    arguments = inspect.signature(diffusers.Krea2Pipeline.__call__).parameters
    assert "image" not in arguments, "Krea 2 sees references now: add them to its family"


def test_prx_still_accepts_no_adapters_as_the_page_says() -> None:
    transformer = PRXTransformer2DModel(hidden_size=32, num_heads=2, depth=1, axes_dim=[8, 8])
    assert not hasattr(transformer, "load_lora_adapter"), "PRX accepts adapters now: add a family"
