"""The header of a file shows its layout and components, or why it cannot be converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import ModelError
from pipeline.models.convert.contents import read_contents
from pipeline.models.convert.layouts import LAYOUTS, SD2_REFERENCE
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
    """Write a complete safetensors file with these tensors, all of them without values."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    for name, (dtype, shape) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
    header_bytes = json.dumps(header).encode()
    path.write_bytes(len(header_bytes).to_bytes(8, "little") + header_bytes)
    return path


def named(*names: str, dtype: str = "F16") -> dict[str, tuple[str, list[int]]]:
    return {name: (dtype, [4, 4]) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("prefix", ["", UNET])
def test_each_layout_is_recognised_by_its_marks(tmp_path: Path, layout, prefix: str) -> None:
    contents = read_contents(
        write(tmp_path / "x.safetensors", named(*(prefix + mark for mark in layout.marks)))
    )
    assert contents.layout == layout
    assert (contents.denoiser.prefix, contents.denoiser.dtype) == (prefix, "float16")
    assert set(contents.parts) == ({"text_conditioner"} if layout.name == "Anima" else set())
    assert contents.reference == layout.reference


def test_the_page_on_families_lists_each_layout_with_its_reference() -> None:
    page = (project_root() / "docs" / "families.md").read_text(encoding="utf-8")
    rows = page.split("| file | reference model | components taken from the file |\n|---|---|---|\n")[
        1
    ].split("\n\n")[0]
    listed = [row.strip("| ").split(" | ")[:2] for row in rows.splitlines()]
    assert [name for name, _ in listed] == [layout.name for layout in LAYOUTS]
    for (_, like), layout in zip(listed, LAYOUTS, strict=True):
        assert f"`{layout.reference}`" in like
    assert f"`{SD2_REFERENCE}`" in page


def test_the_components_of_a_checkpoint_are_found_with_their_dtypes(tmp_path: Path) -> None:
    contents = read_contents(write(tmp_path / "x.safetensors", SD15 | named("model_ema.1", "model_ema.2")))
    assert contents.layout.name == "Stable Diffusion 1.x"
    assert contents.denoiser.dtype == "float16"
    assert {role: part.dtype for role, part in contents.parts.items()} == {
        "vae": "float32",
        "text_encoder": "float16",
    }
    assert contents.ignored == ()
    more = {f"model_ema.{number}": ("F16", [4]) for number in range(9)}
    assert read_contents(write(tmp_path / "y.safetensors", SD15 | more)).ignored == ("model_ema",)


def test_tensors_that_are_not_weights_do_not_decide_the_dtype(tmp_path: Path) -> None:
    more = {
        "cond_stage_model.logit_scale": ("F32", []),
        f"{UNET}mark": ("F32", [0]),
    }
    contents = read_contents(write(tmp_path / "x.safetensors", SD15 | more))
    assert (contents.denoiser.dtype, contents.parts["text_encoder"].dtype) == ("float16", "float16")
    layout = next(layout for layout in LAYOUTS if layout.name == "Z-Image")
    unused = {UNET + name: ("F32", [8]) for name in layout.unused}
    marks = named(*(UNET + mark for mark in layout.marks), dtype="BF16")
    assert read_contents(write(tmp_path / "y.safetensors", marks | unused)).denoiser.dtype == "bfloat16"


def test_a_wider_text_embedding_belongs_to_version_2(tmp_path: Path) -> None:
    wide = {f"{UNET}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": ("F16", [320, 1024])}
    contents = read_contents(write(tmp_path / "x.safetensors", SD15 | wide))
    assert contents.reference == SD2_REFERENCE


def test_a_quantized_text_encoder_is_ignored(tmp_path: Path) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "Stable Diffusion 3 medium")
    tensors = named(*(UNET + mark for mark in layout.marks))
    packed = [f"text_encoders.t5xxl.transformer.{name}" for name in ("shared.weight", "a", "b", "c")]
    contents = read_contents(write(tmp_path / "x.safetensors", tensors | named(*packed, dtype="F8_E4M3")))
    assert contents.parts == {}
    assert contents.ignored == ("text_encoders.t5xxl",)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (named("lora_unet_down_blocks_0.lora_down.weight"), "a LoRA"),
        (named("transformer.blocks.0.attn.to_q.lora_A.weight"), "a LoRA"),
        (named("diffusion_model.double_blocks.0.img_mlp.0.lokr_w1"), "a LoRA"),
        (named(f"{UNET}out.2.weight", "control_model.input_hint_block.0.weight"), "a ControlNet"),
        (named("controlnet_cond_embedding.conv_in.weight"), "a ControlNet"),
        (named("encoder.conv_in.weight", "decoder.conv_in.weight"), "a VAE without a model"),
        (named("first_stage_model.decoder.conv_in.weight"), "a VAE without a model"),
        (named("text_model.embeddings.position_ids"), "a text encoder without a model"),
        (named("encoder.block.0.layer.0.SelfAttention.q.weight"), "a text encoder without a model"),
        (named("model.layers.0.self_attn.q_proj.weight"), "a text encoder without a model"),
        (named("emb_params"), "an embedding"),
        (named("clip_l", "clip_g"), "an embedding"),
        (named("down_blocks.0.resnets.0.conv1.weight"), "one component in diffusers layout"),
        (named("something.else"), "not supported; names of its tensors: something.else"),
        ({}, "tensors: .none."),
        (SD15 | {f"{UNET}out.2.weight": ("F8_E4M3", [4, 4])}, "quantized .F8_E4M3"),
        (SD15 | named(f"{UNET}out.2.scale_weight"), "the weights are quantized"),
        (SD15 | {f"{UNET}input_blocks.0.0.weight": ("F16", [320, 9, 3, 3])}, "inpainting"),
        (SD15 | {"edm_mean": ("F32", [4])}, "EDM's noise schedule"),
        (
            SD15 | named("conditioner.embedders.0.model.text_projection", f"{UNET}label_emb.0.0.weight"),
            "a text encoder in a layout|refiner",
        ),
    ],
)
def test_an_unsupported_file_is_an_error_that_names_its_kind(tmp_path: Path, tensors, message: str) -> None:
    file = write(tmp_path / "x.safetensors", tensors)
    with pytest.raises(ModelError, match=message) as excinfo:
        read_contents(file)
    assert str(file) in excinfo.value.where
    assert excinfo.value.fix


@pytest.mark.parametrize("channels", [36, 48])
def test_wan_for_videos_from_images_and_the_small_wan_2_2_are_errors(tmp_path: Path, channels: int) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "Wan 2.1 of 14 billion weights")
    tensors = named(*layout.marks) | {"patch_embedding.weight": ("BF16", [5120, channels, 1, 2, 2])}
    with pytest.raises(ModelError, match="a Wan model that starts from an image"):
        read_contents(write(tmp_path / "x.safetensors", tensors))


def test_wan_has_the_reference_of_its_number_of_blocks(tmp_path: Path) -> None:
    small = named("head.modulation", "blocks.0.self_attn.q.weight", "blocks.29.self_attn.q.weight")
    small |= {"patch_embedding.weight": ("BF16", [1536, 16, 1, 2, 2])}
    contents = read_contents(write(tmp_path / "x.safetensors", small))
    assert contents.reference == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    large = small | named("blocks.39.self_attn.q.weight")
    contents = read_contents(write(tmp_path / "y.safetensors", large))
    assert contents.reference == "Wan-AI/Wan2.1-T2V-14B-Diffusers"


def test_flux_fill_is_an_error(tmp_path: Path) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "FLUX.1 dev")
    tensors = named(*layout.marks) | {"img_in.weight": ("BF16", [3072, 384])}
    with pytest.raises(ModelError, match=r"FLUX\.1 Fill"):
        read_contents(write(tmp_path / "x.safetensors", tensors))


def test_a_text_encoder_that_diffusers_cannot_read_is_an_error(tmp_path: Path) -> None:
    mark = "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight"
    tensors = {name: tensor for name, tensor in SD15.items() if name != mark}
    with pytest.raises(ModelError, match="in a layout that diffusers cannot read"):
        read_contents(write(tmp_path / "x.safetensors", tensors))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.ckpt", b"PK\x03\x04", "a pickle can run any code"),
        ("x.pt", b"whatever", "a pickle can run any code"),
        ("renamed.safetensors", b"\x80\x02}q", "a pickle can run any code"),
        ("renamed.safetensors", b"GGUF\x03\x00\x00\x00", "GGUF files cannot"),
        ("x.safetensors", b"\xff" * 100, "truncated"),
        ("x.safetensors", b"", "truncated"),
        ("model-00001-of-00002.safetensors", None, "one of several shards"),
    ],
)
def test_a_file_of_another_format_is_an_error_before_it_is_read(
    tmp_path: Path, name: str, data, message: str
) -> None:
    file = tmp_path / name
    write(file, SD15) if data is None else file.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_contents(file)


def test_an_incomplete_download_is_an_error(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(ModelError, match="truncated or damaged"):
        read_contents(file)


def test_folders_and_missing_files_have_their_own_messages(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    for path, message in {
        tmp_path / "model": "already a diffusers folder",
        tmp_path: "got a folder",
        tmp_path / "none.safetensors": "does not exist",
    }.items():
        with pytest.raises(ModelError, match=message):
            read_contents(path)
