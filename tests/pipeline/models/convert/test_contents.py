"""What a file is found to be by its header alone, and in which words it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import ModelError
from pipeline.models.convert.contents import read_contents
from pipeline.models.convert.layouts import LAYOUTS, SD2_LIKE
from pipeline.recipe import project_root

UNET = "model.diffusion_model."
SD15 = {
    f"{UNET}input_blocks.0.0.weight": ("F16", [320, 4, 3, 3]),
    f"{UNET}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": ("F16", [320, 768]),
    f"{UNET}out.2.weight": ("F16", [4, 320, 3, 3]),
    "first_stage_model.encoder.conv_in.weight": ("F32", [128, 3, 3, 3]),
    "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight": ("F16", [77, 768]),
    "cond_stage_model.transformer.text_model.embeddings.position_ids": ("I64", [1, 77]),
}


def write(path: Path, tensors: dict[str, tuple[str, list[int]]], **metadata: str) -> Path:
    """A whole safetensors file with these tensors, none of which has a value."""
    said: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    for name, (dtype, shape) in tensors.items():
        said[name] = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps(said).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def named(*names: str, dtype: str = "F16") -> dict[str, tuple[str, list[int]]]:
    return {name: (dtype, [4, 4]) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("prefix", ["", UNET])
def test_each_layout_is_known_by_its_marks(tmp_path: Path, layout, prefix: str) -> None:
    found = read_contents(write(tmp_path / "x.safetensors", named(*(prefix + mark for mark in layout.marks))))
    assert found.layout == layout
    assert (found.denoiser.prefix, found.denoiser.dtype, found.parts) == (prefix, "float16", {})
    assert found.like == layout.like


def test_the_page_on_families_lists_each_layout_with_the_model_it_is_made_like() -> None:
    page = (project_root() / "docs" / "families.md").read_text(encoding="utf-8")
    rows = page.split("| file of | made like | taken from the file |\n|---|---|---|\n")[1].split("\n\n")[0]
    told = [row.strip("| ").split(" | ")[:2] for row in rows.splitlines()]
    assert [name for name, _ in told] == [layout.name for layout in LAYOUTS]
    for (_, like), layout in zip(told, LAYOUTS, strict=True):
        assert f"`{layout.like}`" in like
    assert f"`{SD2_LIKE}`" in page


def test_the_parts_of_a_checkpoint_each_in_its_number_format(tmp_path: Path) -> None:
    found = read_contents(write(tmp_path / "x.safetensors", SD15 | named("model_ema.1", "model_ema.2")))
    assert found.layout.name == "Stable Diffusion 1.x"
    assert found.denoiser.dtype == "float16"
    assert {role: part.dtype for role, part in found.parts.items()} == {
        "vae": "float32",
        "text_encoder": "float16",
    }
    assert found.left == ()
    more = {f"model_ema.{number}": ("F16", [4]) for number in range(9)}
    assert read_contents(write(tmp_path / "y.safetensors", SD15 | more)).left == ("model_ema",)


def test_what_is_no_weight_decides_no_number_format(tmp_path: Path) -> None:
    more = {
        "cond_stage_model.logit_scale": ("F32", []),
        f"{UNET}mark": ("F32", [0]),
    }
    found = read_contents(write(tmp_path / "x.safetensors", SD15 | more))
    assert (found.denoiser.dtype, found.parts["text_encoder"].dtype) == ("float16", "float16")
    layout = next(layout for layout in LAYOUTS if layout.name == "Z-Image")
    unused = {UNET + name: ("F32", [8]) for name in layout.unused}
    marks = named(*(UNET + mark for mark in layout.marks), dtype="BF16")
    assert read_contents(write(tmp_path / "y.safetensors", marks | unused)).denoiser.dtype == "bfloat16"


def test_a_wider_text_embedding_is_that_of_version_2(tmp_path: Path) -> None:
    wide = {f"{UNET}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": ("F16", [320, 1024])}
    found = read_contents(write(tmp_path / "x.safetensors", SD15 | wide))
    assert found.like == SD2_LIKE


def test_a_packed_text_encoder_beside_a_good_denoiser_is_left_in_the_file(tmp_path: Path) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "Stable Diffusion 3 medium")
    tensors = named(*(UNET + mark for mark in layout.marks))
    packed = [f"text_encoders.t5xxl.transformer.{name}" for name in ("shared.weight", "a", "b", "c")]
    found = read_contents(write(tmp_path / "x.safetensors", tensors | named(*packed, dtype="F8_E4M3")))
    assert found.parts == {}
    assert found.left == ("text_encoders.t5xxl",)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (named("lora_unet_down_blocks_0.lora_down.weight"), "a LoRA"),
        (named("transformer.blocks.0.attn.to_q.lora_A.weight"), "a LoRA"),
        (named("diffusion_model.double_blocks.0.img_mlp.0.lokr_w1"), "a LoRA"),
        (named(f"{UNET}out.2.weight", "control_model.input_hint_block.0.weight"), "a ControlNet"),
        (named("controlnet_cond_embedding.conv_in.weight"), "a ControlNet"),
        (named("encoder.conv_in.weight", "decoder.conv_in.weight"), "a VAE alone"),
        (named("first_stage_model.decoder.conv_in.weight"), "a VAE alone"),
        (named("text_model.embeddings.position_ids"), "a text encoder alone"),
        (named("encoder.block.0.layer.0.SelfAttention.q.weight"), "a text encoder alone"),
        (named("model.layers.0.self_attn.q_proj.weight"), "a text encoder alone"),
        (named("emb_params"), "an embedding"),
        (named("clip_l", "clip_g"), "an embedding"),
        (named("down_blocks.0.resnets.0.conv1.weight"), "one part of a diffusers folder"),
        (named("something.else"), "in no layout that is known here: its tensors are something.else"),
        ({}, "none at all"),
        (SD15 | {f"{UNET}out.2.weight": ("F8_E4M3", [4, 4])}, "packed as F8_E4M3"),
        (SD15 | named(f"{UNET}out.2.scale_weight"), "its weights are packed"),
        (SD15 | {f"{UNET}input_blocks.0.0.weight": ("F16", [320, 9, 3, 3])}, "inpainting"),
        (SD15 | {"edm_mean": ("F32", [4])}, "EDM's noise schedule"),
        (
            SD15 | named("conditioner.embedders.0.model.text_projection", f"{UNET}label_emb.0.0.weight"),
            "a text encoder in a layout|refiner",
        ),
    ],
)
def test_anything_else_is_refused_by_what_it_is(tmp_path: Path, tensors, said: str) -> None:
    file = write(tmp_path / "x.safetensors", tensors)
    with pytest.raises(ModelError, match=said) as caught:
        read_contents(file)
    assert str(file) in caught.value.where
    assert caught.value.fix


def test_a_flux_that_fills_in_is_refused(tmp_path: Path) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "FLUX.1 dev")
    tensors = named(*layout.marks) | {"img_in.weight": ("BF16", [3072, 384])}
    with pytest.raises(ModelError, match=r"FLUX\.1 Fill"):
        read_contents(write(tmp_path / "x.safetensors", tensors))


def test_a_text_encoder_that_diffusers_cannot_read_is_refused(tmp_path: Path) -> None:
    mark = "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight"
    tensors = {name: said for name, said in SD15.items() if name != mark}
    with pytest.raises(ModelError, match="in a layout that diffusers does not read"):
        read_contents(write(tmp_path / "x.safetensors", tensors))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.ckpt", b"PK\x03\x04", "a pickle, which can run any code"),
        ("x.pt", b"whatever", "a pickle, which can run any code"),
        ("renamed.safetensors", b"\x80\x02}q", "a pickle, which can run any code"),
        ("renamed.safetensors", b"GGUF\x03\x00\x00\x00", "a GGUF file"),
        ("x.safetensors", b"\xff" * 100, "only the beginning"),
        ("x.safetensors", b"", "only the beginning"),
        ("model-00001-of-00002.safetensors", None, "one of several shards"),
    ],
)
def test_a_file_of_another_format_is_refused_unread(tmp_path: Path, name: str, data, said: str) -> None:
    file = tmp_path / name
    write(file, SD15) if data is None else file.write_bytes(data)
    with pytest.raises(ModelError, match=said):
        read_contents(file)


def test_a_download_that_stopped_is_refused(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(ModelError, match="cut short"):
        read_contents(file)


def test_a_folder_and_a_name_that_is_not_there_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    for path, said in {
        tmp_path / "model": "a diffusers folder already",
        tmp_path: "that is a folder",
        tmp_path / "none.safetensors": "there is no such file",
    }.items():
        with pytest.raises(ModelError, match=said):
            read_contents(path)
