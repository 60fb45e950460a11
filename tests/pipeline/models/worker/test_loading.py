"""Loading components: safely from a stranger's model, and no more of a text encoder than captions need."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.tiny_models import TINY
from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import stored_dtype, weight_files
from pipeline.models.families import detect
from pipeline.models.worker.family import load_family
from pipeline.models.worker.loading import load_component, read_component, read_text_encoder
from pipeline.models.worker.offload.streamed_blocks import move_weights
from tests.tensor_differences import differing_tensors
from tests.tiny_models import TinyModel


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture
def model(tmp_path: Path, tiny_sd: Path) -> Path:
    """Return a copy of a tiny model that the test may change."""
    return shutil.copytree(tiny_sd, tmp_path / "model")


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def text_encoder(model: Path) -> Any:
    return load_component(detect(model), "text_encoder", "float32", "cpu")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("name", ["kernels-community/stranger", "flex_attention", {"": "a/b"}])
def test_a_configuration_does_not_choose_the_attention_implementation(
    model: Path, tiny_sd: Path, key: str, name: object
) -> None:
    usual = text_encoder(tiny_sd).config._attn_implementation
    change_config(model / "text_encoder", **{key: name})
    assert text_encoder(model).config._attn_implementation == usual == "sdpa"


def test_code_that_a_model_folder_contains_is_not_run(model: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(ran)!r}).touch()\nclass Own: pass\n"
    for role in ("text_encoder", "unet", "vae"):
        (model / role / "own.py").write_text(code)
        auto_map = {"AutoModel": "own.Own", "AutoConfig": "own.Own"}
        change_config(model / role, auto_map=auto_map, _class_name="Own" if role != "text_encoder" else None)
    index = model / "model_index.json"
    roles = {role: ["own", "Own"] for role in ("text_encoder", "unet", "vae")}
    index.write_text(json.dumps({**json.loads(index.read_text()), **roles}))

    for role in roles:
        load_component(detect(model), role, "float32", "cpu")
    assert not ran.exists()


@pytest.mark.parametrize("role", ["text_encoder", "unet", "vae"])
@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin", None])
def test_an_adapter_beside_the_weights_of_a_component_is_an_error(
    model: Path, role: str, weights: str | None
) -> None:
    config = {
        "peft_type": "LORA",
        "r": 1,
        "base_model_name_or_path": "/elsewhere",
        "target_modules": ["q_proj"],
    }
    (model / role / "adapter_config.json").write_text(json.dumps(config))
    if weights is not None:
        (model / role / weights).write_bytes(b"weights")
    with pytest.raises(ModelError, match="must have its own weights only") as excinfo:
        load_component(detect(model), role, "float32", "cpu")
    assert excinfo.value.where.endswith(f"{role}/adapter_config.json")


def test_a_pickle_in_place_of_weights_is_not_executed(model: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for role in ("text_encoder", "unet"):
        (weights,) = (model / role).glob("*.safetensors")
        name = "pytorch_model" if role == "text_encoder" else "diffusion_pytorch_model"
        torch.save({"weight": Payload(ran)}, model / role / f"{name}.bin")
        weights.unlink()
        with pytest.raises((pickle.UnpicklingError, OSError, ValueError)):
            load_component(detect(model), role, "float32", "cpu")
    assert not ran.exists()


WITH_UNUSED_PARTS = {
    "Qwen-Image": {"lm_head": "Identity", "model.visual": None},
    "Kandinsky 5 (image)": {"lm_head": "Identity", "model.visual": None},
    "FLUX.2 dev": {"lm_head": "Identity", "model.vision_tower": None, "model.multi_modal_projector": None},
    "Krea 2": {"visual": None},
    "Qwen-Image 2.1": {"lm_head": "Identity", "model.visual": "Qwen3VLVisionModel"},
    "ERNIE-Image": {"vision_tower": None, "multi_modal_projector": None},
}
"""Modules of text encoders that captions do not use, and the class that replaces each."""


@pytest.mark.parametrize("kind", WITH_UNUSED_PARTS)
def test_the_vision_encoder_and_the_output_layer_are_dropped_and_embeddings_stay_bit_equal(
    tiny_model: TinyModel, kind: str
) -> None:
    family = load_family(tiny_model(kind))
    encoders = family.text.load("float32", "cpu")
    for path, replacement in WITH_UNUSED_PARTS[kind].items():
        parent, _, name = path.rpartition(".")
        part = getattr(encoders.text_encoder.get_submodule(parent), name)
        assert (None if part is None else type(part).__name__) == replacement

    actual = family.text.encode_caption(encoders, "a red cat").tensors
    encoders.register_modules(text_encoder=read_component(family, "text_encoder", "float32"))
    expected = family.text.encode_caption(encoders, "a red cat").tensors
    assert differing_tensors(actual, expected) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory map from /proc")
def test_an_encoder_in_its_own_dtype_is_mapped_and_only_used_weights_are_read(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    TINY["Qwen-Image"](tmp_path / "tiny")
    folder = tmp_path / "tiny" / "text_encoder"
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {"hidden_size": 1024, "intermediate_size": 4096, "depth": 2}
    (folder / "config.json").write_text(json.dumps(config))
    large = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLForConditionalGeneration.config_class(**config))
    large.bfloat16().save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    file_bytes = file.stat().st_size
    assert file_bytes > 40_000_000

    family = load_family(tmp_path / "tiny")
    encoders = family.text.load("auto", "cpu")
    family.text.encode_caption(encoders, "a red cat")
    mapped, resident = mapped_bytes(file)
    kept = sum(weight.numel() * weight.element_size() for weight in encoders.text_encoder.parameters())
    assert mapped >= kept
    assert resident < kept + 4_000_000
    assert kept < 0.05 * file_bytes


def mapped_bytes(file: Path) -> tuple[int, int]:
    """Return the bytes of the file that this process has mapped, and those of them that were read."""
    sizes = {"Size": 0, "Rss": 0}
    belongs = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            belongs = line.endswith(str(file))
        elif belongs and (name := line.partition(":")[0]) in sizes:
            sizes[name] += 1024 * int(line.split()[1])
    return sizes["Size"], sizes["Rss"]


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_encoder_has_the_values_of_from_pretrained_whatever_dtype_it_is_stored_in(
    tmp_path: Path, stored: str, dtype: str
) -> None:
    from transformers import T5EncoderModel

    TINY["FLUX.1 dev"](tmp_path / "tiny")
    folder = tmp_path / "tiny" / "text_encoder_2"
    T5EncoderModel.from_pretrained(folder).to(getattr(torch, stored)).save_pretrained(folder)
    assert stored_dtype(weight_files(folder)) == stored

    family = detect(tmp_path / "tiny")
    network, converted = read_text_encoder(family, "text_encoder_2", dtype)
    move_weights(network, torch.device("cpu"), converted)
    actual = network.state_dict()
    expected = T5EncoderModel.from_pretrained(folder, dtype=getattr(torch, dtype)).state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert torch.equal(actual[name], value)
