"""A converted folder has the tensors of the model that the file was made from, for each layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo.tiny_models import TINY, make_tiny, make_tiny_sd3, make_tiny_sdxl
from demo.tiny_models import sd3 as tiny_sd3_module
from pipeline.errors import ModelError
from pipeline.models.convert import convert as convert_module
from pipeline.models.convert.convert import Choices, convert
from pipeline.models.diffusers_folder import index_file
from tests.pipeline.models.convert import transformer_originals, unet_originals
from tests.pipeline.models.convert.conversion_case import (
    as_file,
    check_conversion,
    convert_in_process,
    planned,
    require_same,
)
from tests.pipeline.models.convert.state_dicts import weights, with_prefix

XL = ("unet", "vae", "text_encoder", "text_encoder_2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture
def xl_file(tmp_path: Path, tiny_sdxl: Path) -> Path:
    return as_file(tmp_path / "single.safetensors", unet_originals.stable_diffusion_xl(tiny_sdxl))


@pytest.mark.parametrize("version", [unet_originals.stable_diffusion, unet_originals.stable_diffusion_2])
def test_stable_diffusion_with_either_text_encoder(model: Path, version) -> None:
    make_tiny(model)
    family = check_conversion(model, version(model), ("unet", "vae", "text_encoder"))
    assert family.spec.name == "Stable Diffusion 1.x and 2.x"


def test_stable_diffusion_xl(model: Path) -> None:
    make_tiny_sdxl(model)
    family = check_conversion(model, unet_originals.stable_diffusion_xl(model), XL)
    assert family.spec.name == "Stable Diffusion XL"


@pytest.mark.parametrize("dual_attention", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stable_diffusion_3_with_all_its_encoders(
    model: Path, monkeypatch: pytest.MonkeyPatch, dual_attention: bool
) -> None:
    monkeypatch.setattr(tiny_sd3_module, "_PROJECTIONS", (32, 40))  # the first is none in the original code
    make_tiny_sd3(model, dual_attention=dual_attention)
    first = weights(model / "text_encoder")
    first["text_projection.weight"] = torch.eye(32)
    as_file(model / "text_encoder" / "model.safetensors", first, format="pt")
    roles = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
    family = check_conversion(model, transformer_originals.stable_diffusion_3(model), roles)
    assert family.prediction_type() == "flow"


RENAMED = ("FLUX.2 klein", "Qwen-Image 2.1", "Z-Image", "Sana", "AuraFlow", "Krea 2", "Wan 2.1 (image)")
"""One kind per original layout that differs from diffusers'."""


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        pytest.param(kind, prefix, marks=() if prefix and kind in RENAMED else pytest.mark.slow)
        for kind in transformer_originals.TRANSFORMERS
        for prefix in ("model.diffusion_model.", "")
    ],
)
def test_a_transformer_gets_its_other_components_from_the_reference(
    model: Path, kind: str, prefix: str
) -> None:
    TINY[kind](model)
    state = transformer_originals.TRANSFORMERS[kind](model / "transformer")
    family = check_conversion(model, state, ("transformer",), prefix=prefix)
    assert family.prediction_type() == "flow"


@pytest.mark.parametrize("prefix", ["net.", "", "model.diffusion_model."])
def test_anima_with_its_text_conditioner(model: Path, prefix: str) -> None:
    TINY["Anima"](model)
    state = transformer_originals.anima(model / "transformer")
    state |= with_prefix("llm_adapter.", weights(model / "text_conditioner"))
    # diffusers removes the position embedder's constants, which files of the original code may have.
    state |= {"pos_embedder.seq": torch.arange(8.0), "pos_embedder.dim_spatial_range": torch.ones(3)}
    family = check_conversion(model, state, ("transformer", "text_conditioner"), prefix=prefix)
    assert family.spec.name == "Anima"
    index = index_file(model)
    assert (model.parent / "converted" / index.name).read_bytes() == index.read_bytes()


def test_anima_with_a_text_conditioner_of_other_sizes_is_an_error(model: Path) -> None:
    TINY["Anima"](model)
    state = transformer_originals.anima(model / "transformer")
    conditioner = weights(model / "text_conditioner")
    state |= with_prefix("llm_adapter.", {**conditioner, "norm.weight": torch.ones(3)})
    plan = planned(as_file(model.parent / "single.safetensors", state, prefix="net."), model)
    with pytest.raises(ModelError, match="the file's text_conditioner does not match"):
        convert(plan, launch=convert_in_process)
    assert not plan.folder.exists()
    assert not plan.building.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`FluxPosEmbed` is deprecated:FutureWarning"
)  # required by diffusers' Chroma class
@pytest.mark.parametrize("kind", ["FLUX.1 dev", "FLUX.1 schnell", "Chroma", "Lumina Image 2"])
def test_a_transformer_that_diffusers_converts_only_at_its_published_width(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One or two blocks of the published width take a gigabyte of memory."""
    TINY[kind](model)
    widen_transformer(model, kind)
    state = {"Lumina Image 2": transformer_originals.lumina2}.get(kind, transformer_originals.flux)(
        model / "transformer"
    )
    check_conversion(model, state, ("transformer",), prefix="model.diffusion_model.")


def widen_transformer(model: Path, kind: str) -> None:
    """Replace the tiny transformer by one of the published width with few blocks."""
    from diffusers import ChromaTransformer2DModel, FluxTransformer2DModel, Lumina2Transformer2DModel

    num_blocks = {"num_layers": 1, "num_single_layers": 1}
    transformer = {
        "FLUX.1 dev": lambda: FluxTransformer2DModel(**num_blocks, guidance_embeds=True),
        "FLUX.1 schnell": lambda: FluxTransformer2DModel(**num_blocks),
        "Chroma": lambda: ChromaTransformer2DModel(**num_blocks),
        "Lumina Image 2": lambda: Lumina2Transformer2DModel(num_layers=1),
    }[kind]()
    for file in (model / "transformer").iterdir():
        file.unlink()
    transformer.to(torch.bfloat16).save_pretrained(model / "transformer")


@pytest.mark.parametrize(
    ("stored", "written"),
    [
        ({"": torch.float16}, torch.float16),
        ({"": torch.bfloat16, "out.": torch.float32}, torch.float32),
        ({"": torch.bfloat16, "out.": torch.float16}, torch.float32),
    ],
    ids=str,
)
def test_the_dtype_is_unchanged_or_the_widest_of_several(
    tmp_path: Path, tiny_sdxl: Path, stored: dict[str, torch.dtype], written: torch.dtype
) -> None:
    state = {
        name: tensor.to(next(dtype for start, dtype in reversed(stored.items()) if name.startswith(start)))
        for name, tensor in unet_originals.unet(tiny_sdxl / "unet").items()
    }
    plan = planned(as_file(tmp_path / "single.safetensors", state), tiny_sdxl)
    convert(plan, launch=convert_in_process)
    converted_state = unet_originals.unet(plan.folder / "unet")
    assert converted_state.keys() == state.keys()
    for name, tensor in converted_state.items():
        assert tensor.dtype == written
        assert torch.equal(tensor, state[name].to(written))


def test_a_unet_gets_its_other_components_from_the_reference(tmp_path: Path, tiny_sdxl: Path) -> None:
    plan = planned(
        as_file(tmp_path / "single.safetensors", unet_originals.unet(tiny_sdxl / "unet")), tiny_sdxl
    )
    convert(plan, launch=convert_in_process)
    require_same(plan.folder, tiny_sdxl, XL)


def test_the_parts_only_folder_provides_components_for_the_reference(tmp_path: Path, tiny_sdxl: Path) -> None:
    file = as_file(tmp_path / "single.safetensors", unet_originals.unet(tiny_sdxl / "unet"), modelspec="1")
    plan = planned(file, tiny_sdxl, Choices(reference=str(tiny_sdxl), parts_only=True))
    family = convert(plan, launch=convert_in_process)
    assert [each.name for each in plan.folder.iterdir()] == ["unet"]
    require_same(plan.folder, tiny_sdxl, ("unet",))
    assert family.model.component("unet") == plan.folder / "unet"
    files = [file for part in family.fingerprint_parts("denoiser") for file in part.contents]
    assert [file for file in files if not file.is_file()] == []
    plan.folder.rename(tmp_path / "parts")
    with pytest.raises(ModelError, match="does not write a noise schedule"):
        planned(
            file, tiny_sdxl, Choices(reference=str(tiny_sdxl), parts_only=True, prediction="v_prediction")
        )


def test_L06_all_files_are_synced_before_the_folder_gets_its_name(
    tmp_path: Path, tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = as_file(tmp_path / "single.safetensors", unet_originals.unet(tiny_sdxl / "unet"))
    plan = planned(file, tiny_sdxl, Choices(reference=str(tiny_sdxl), parts_only=True))
    synced: list[Path] = []
    for name in ("sync_file", "sync_folder"):
        wait = getattr(convert_module, name)
        monkeypatch.setattr(convert_module, name, lambda path, wait=wait: (synced.append(path), wait(path)))
    convert(plan, launch=convert_in_process)
    written_paths = {plan.building / path.relative_to(plan.folder) for path in plan.folder.rglob("*")}
    assert set(synced) == written_paths | {plan.building, plan.folder.parent}
    assert synced[-1] == plan.folder.parent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("model.diffusion_model.middle_block.1.norm.weight"),
            "lacks some of the weights",
        ),
        (
            lambda state: state.update({"model.diffusion_model.input_blocks.99.0.op.bias": torch.zeros(3)}),
            "values, the unet uses",
        ),
        (
            lambda state: state.update({"model.diffusion_model.out.2.bias": torch.zeros(5)}),
            r"error of diffusers: .*conv_out\.bias expected shape",
        ),
    ],
    ids=["missing", "more", "other shape"],
)
def test_a_file_of_another_architecture_is_an_error_and_leaves_nothing(
    tmp_path: Path, tiny_sdxl: Path, change, message: str
) -> None:
    state = unet_originals.stable_diffusion_xl(tiny_sdxl)
    change(state)
    plan = planned(as_file(tmp_path / "single.safetensors", state), tiny_sdxl)
    with pytest.raises(ModelError, match=message):
        convert(plan, launch=convert_in_process)
    assert [each.name for each in tmp_path.iterdir()] == ["single.safetensors"]


def test_a_reference_of_another_family_is_an_error_before_anything_is_written(
    xl_file: Path, tiny_sd: Path
) -> None:
    with pytest.raises(ModelError, match="contains Stable Diffusion XL, but --like is Stable Diffusion 1"):
        planned(xl_file, tiny_sd)


def test_an_existing_folder_is_never_changed(xl_file: Path, tiny_sdxl: Path) -> None:
    (xl_file.parent / "converted").mkdir()
    with pytest.raises(ModelError, match="the folder exists"):
        planned(xl_file, tiny_sdxl)
