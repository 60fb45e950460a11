from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.errors import ModelError
from pipeline.models.convert.header import read_header
from pipeline.models.diffusers_folder import (
    ModelFolder,
    index_file,
    read_json,
    require_whole,
    tokenizer_files,
    weight_files,
    weight_variant,
)
from pipeline.models.families.parts.text import clip_length
from pipeline.models.fingerprints import Fingerprints, ModelPart


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x")


def test_safetensors_are_preferred_and_variants_are_used_only_without_other_files(
    tmp_path: Path,
) -> None:
    def chosen_files() -> tuple[str | None, list[str]]:
        return weight_variant(tmp_path), [path.name for path in weight_files(tmp_path)]

    touch(tmp_path, "model.non_ema.safetensors", "model.bf16.safetensors")
    assert chosen_files() == ("bf16", ["model.bf16.safetensors"])
    touch(tmp_path, "model.fp16.safetensors", "model.fp16.bin")
    assert chosen_files() == ("fp16", ["model.fp16.safetensors"])
    touch(tmp_path, "pytorch_model.bin")
    assert chosen_files() == (None, ["pytorch_model.bin"])
    touch(tmp_path, "model.safetensors")
    assert chosen_files() == (None, ["model.safetensors"])


def test_a_modular_index_names_the_components_that_it_says_how_to_load(tmp_path: Path) -> None:
    hint = {"pretrained_model_name_or_path": "someone/model", "type_hint": ["transformers", "Qwen3Model"]}
    index = {
        "_class_name": "AnimaModularPipeline",
        "text_encoder": [None, None, hint],  # saved before it was loaded
        "vae": [
            "diffusers",
            "AutoencoderKLQwenImage",
            {"type_hint": ["diffusers", "AutoencoderKLQwenImage"]},
        ],
        "image_encoder": [None, None, {"type_hint": [None, None]}],
    }
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    model = ModelFolder(tmp_path)
    assert model.index["text_encoder"] == ["transformers", "Qwen3Model"]
    roles = ("text_encoder", "vae", "image_encoder", "other")
    assert [model.has(role) for role in roles] == [True, True, False, False]

    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "UsualPipeline"}))
    assert index_file(tmp_path).name == "model_index.json"
    assert ModelFolder(tmp_path).index == {"_class_name": "UsualPipeline"}


def test_shards_of_a_variant_come_with_their_index(tmp_path: Path) -> None:
    shards = [f"model.fp16-0000{i}-of-00002.safetensors" for i in (1, 2)]
    name = "model.safetensors.index.fp16.json"
    (tmp_path / name).write_text(json.dumps({"weight_map": {"a": shards[1], "b": shards[0]}}))
    touch(tmp_path, *shards)
    assert [path.name for path in weight_files(tmp_path)] == [name, *shards]
    (tmp_path / shards[1]).unlink()
    with pytest.raises(ModelError, match=shards[1]):
        weight_files(tmp_path)


def test_shards_come_with_their_index_and_each_must_exist(tmp_path: Path) -> None:
    shards = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": shards[1], "b": shards[0], "c": shards[1]}}
    name = "diffusion_pytorch_model.safetensors.index.json"
    (tmp_path / name).write_text(json.dumps(index))
    touch(tmp_path, *shards)
    assert [path.name for path in weight_files(tmp_path)] == [name, *shards]
    (tmp_path / shards[0]).unlink()
    with pytest.raises(ModelError, match=shards[0]):
        weight_files(tmp_path)


def test_a_component_without_weights_and_a_tokenizer_without_vocabulary_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lacks weights"):
        weight_files(tmp_path)
    touch(tmp_path, "tokenizer_config.json")
    with pytest.raises(ModelError, match="vocabulary"):
        tokenizer_files(tmp_path)
    touch(tmp_path, "vocab.json", "merges.txt")
    configs, contents = tokenizer_files(tmp_path)
    assert [path.name for path in (*configs, *contents)] == [
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
    ]


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x80"])
def test_a_configuration_that_is_not_a_json_object_is_an_error_that_names_it(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(path)


def test_a_truncated_weight_file_is_found_by_its_header(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 5), "b": torch.ones(7)}, file, metadata={"format": "pt"})
    require_whole(file)
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for data in (content[:-1], content[:header], content + b"\0"):
        file.write_bytes(data)
        with pytest.raises(ModelError, match=f"it has {len(data):,} of {len(content):,} bytes"):
            require_whole(file)
    for data in (
        content[: header // 2],
        content[:5],
        b"",
        b"<!DOCTYPE html>" * 9,
        b"\x02" + bytes(7) + b"[]",
    ):
        file.write_bytes(data)
        with pytest.raises(ModelError, match=f"it has {len(data)} bytes") as excinfo:
            require_whole(file)
        assert (excinfo.value.where, excinfo.value.fix) == (str(file), "download the model again")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a\\b.safetensors", "..", "a\0b"])
def test_a_shard_outside_of_the_folder_of_its_index_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "unet"
    folder.mkdir()
    touch(tmp_path, "outside.safetensors")
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="must name files in its own folder, got ") as excinfo:
        weight_files(folder)
    assert excinfo.value.where == str(index)
    assert excinfo.value.fix


@pytest.mark.parametrize("weight_map", [[], {"a": 3}, {"a": ["b"]}, "x", None], ids=str)
def test_a_weight_index_without_file_names_is_refused(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="the weight index names missing files"):
        weight_files(tmp_path)


def write_header_bomb(path: Path, header: bytes = b"", *, num_bytes: int | None = None) -> None:
    """Write a safetensors file with `header`, or a sparse one that claims a header of `num_bytes`."""
    claimed = len(header) if num_bytes is None else num_bytes
    with path.open("wb") as file:
        file.write(claimed.to_bytes(8, "little") + header)
        file.truncate(8 + claimed + 8)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("read", [require_whole, read_header])
def test_a_header_that_claims_gigabytes_is_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    file = tmp_path / "model.safetensors"
    write_header_bomb(file, num_bytes=6 * 10**9)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="truncated"):
            read(file)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100e6


@pytest.mark.parametrize("read", [require_whole, read_header])
@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"3", b'{"a": []}'])
def test_a_deep_or_wrong_header_is_an_error_with_a_fix(
    tmp_path: Path, read: Callable[[Path], object], header: bytes
) -> None:
    file = tmp_path / "model.safetensors"
    write_header_bomb(file, header)
    with pytest.raises(ModelError, match="truncated") as excinfo:
        read(file)
    assert excinfo.value.fix


@pytest.mark.timeout(30)
def test_a_deep_endless_or_huge_configuration_is_an_error_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"a":' * 100_000)
    (tmp_path / "device.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo.json")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(6 * 10**9)
    for name in ("deep", "device", "fifo", "huge"):
        with pytest.raises(ModelError, match="a file of the base model is unreadable") as excinfo:
            read_json(tmp_path / f"{name}.json")
        assert excinfo.value.where == str(tmp_path / f"{name}.json")
        part = ModelPart("vae", (tmp_path / f"{name}.json",), ())
        with pytest.raises(ModelError, match="a file of the base model is unreadable"):
            Fingerprints(tmp_path).of([part])


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ("scheduler", '{"num_train_timesteps": 1000000000000}'),
        ("scheduler", '{"num_train_timesteps": 0}'),
        ("scheduler", '{"num_train_timesteps": "1000"}'),
        ("scheduler", '{"beta_start": Infinity}'),
        ("vae", '{"scaling_factor": NaN}'),
        ("vae", '{"scaling_factor": "nan"}'),
        ("vae", '{"shift_factor": 1e999}'),
        ("vae", '{"latents_std": [1.0, {"x": [NaN]}]}'),
        ("tokenizer", '{"model_max_length": 1e31}'),
        ("tokenizer", '{"model_max_length": NaN}'),
        ("tokenizer", '{"model_max_length": true}'),
    ],
)
def test_numbers_that_no_model_can_have_are_an_error_with_the_file(
    tmp_path: Path, role: str, text: str
) -> None:
    model = ModelFolder(tmp_path)
    model.component(role).mkdir()
    model.config_file(role).write_text(text)
    with pytest.raises(ModelError, match="must be") as excinfo:
        model.config(role)
    assert excinfo.value.where == str(model.config_file(role))


def test_a_clip_tokenizer_needs_a_limit_and_others_do_not(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path)
    model.component("tokenizer").mkdir()
    model.config_file("tokenizer").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert model.config("tokenizer")
    with pytest.raises(ModelError, match="model_max_length of CLIP's tokenizer must be at most"):
        clip_length(model)


def test_reading_a_model_folder_does_not_load_the_schema_of_recipes() -> None:
    # Each encoding process would import it, and needs nothing of it.
    code = """
import sys
import pipeline.models.diffusers_folder, pipeline.models.families
assert "pipeline.recipe" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
