"""Components of a stranger's model load without running code that the model brings or names."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.models.families import detect
from pipeline.models.worker.loading import load_component


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
