"""The file in `training.lora.start_from` is checked without torch, before anything is encoded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import TrainingError
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.trained_lora.start_file import require_start_file

ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
TEXT = "text_model.encoder.layers.0.self_attn.q_proj"

DIFFUSERS = f"unet.{ATTENTION}"
KOHYA = f"lora_unet_{ATTENTION.replace('.', '_')}"
COMFYUI = f"diffusion_model.{ATTENTION}"


def starting_from(path: Path, base: Path | str = "owner/name", **lora: Any) -> Recipe:
    folder = path.parent
    values = {
        "datasets": [{"name": "photos", "path": folder / "photos"}],
        "cache_dir": folder / "cache",
        "output_dir": folder / "out",
        "model": {"base": base},
        "training": {"lora": {"rank": 4, "start_from": path, **lora}},
    }
    return recipe_from_mapping("flowers", values)


def module(key: str, rank: int = 4, kernel: tuple[int, ...] = (), *, up: float = 1.0) -> dict[str, Any]:
    """Return the matrices of one module with 6 inputs and 8 outputs; the key's prefix decides the layout."""
    names = ("lora_A", "lora_B") if key.startswith(("unet.", "transformer.", "text_encoder.")) else None
    down, up_name = names or ("lora_down", "lora_up")
    ones = (1,) * len(kernel)
    return {
        f"{key}.{down}.weight": np.ones((rank, 6, *kernel), np.float32),
        f"{key}.{up_name}.weight": np.full((8, rank, *ones), up, np.float32),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "start.safetensors"


def error_of(recipe: Recipe) -> TrainingError:
    with pytest.raises(TrainingError) as excinfo:
        require_start_file(recipe)
    assert excinfo.value.where.startswith(f"{recipe.source}, training.lora.start_from: ")
    return excinfo.value


@pytest.mark.parametrize("key", [DIFFUSERS, KOHYA, COMFYUI])
def test_a_file_with_the_rank_of_the_recipe_is_accepted_in_each_layout(path: Path, key: str) -> None:
    save_file(module(key), path)
    require_start_file(starting_from(path))


@pytest.mark.parametrize("key", [DIFFUSERS, KOHYA, COMFYUI])
def test_another_rank_is_an_error_with_both_ranks(path: Path, key: str, tiny_sd: Path) -> None:
    save_file(module(key, rank=8), path)
    error = error_of(starting_from(path, tiny_sd))
    assert error.what.endswith("it has rank 8 instead of 4")
    assert error.fix == "set training.lora.rank to the file's rank, or use another file"
    require_start_file(starting_from(path, tiny_sd, rank=8))


def test_a_layer_that_combines_query_key_and_value_may_have_three_times_the_rank(path: Path) -> None:
    """The base model may be a Hub id whose family is unknown before the download."""
    save_file(module("lora_unet_double_blocks_0_img_attn_qkv", rank=12), path)
    require_start_file(starting_from(path))
    assert "rank 12 instead of 5" in error_of(starting_from(path, rank=5)).what


def test_ranks_of_single_modules_convolutions_and_text_encoders_are_compared(path: Path) -> None:
    convolution = "unet.mid_block.resnets.0.conv1"
    tensors = {
        **module(DIFFUSERS, 2),
        **module(convolution, 3, (3, 3)),
        **module(f"text_encoder.{TEXT}", 5),
    }
    save_file(tensors, path)
    lora = {"ranks": [{"modules": "*.attn1.*", "rank": 2}], "conv_rank": 3, "text_encoders": {"rank": 5}}
    require_start_file(starting_from(path, **lora))
    for changes, message in (
        ({"ranks": []}, "1 module of 3 have rank 2 instead of 4"),
        ({"conv_rank": 4}, "rank 3 instead of 4"),
        ({"conv_rank": None}, "it also adapts convolutions"),
        ({"text_encoders": {"rank": 6}}, "rank 5 instead of 6"),
        ({"text_encoders": None}, "it also adapts text encoders"),
    ):
        assert message in error_of(starting_from(path, **{**lora, **changes})).what


def test_R12_the_state_in_a_checkpoint_is_not_a_lora_and_the_file_next_to_it_is_named(tmp_path: Path) -> None:
    state, optimizer = tmp_path / "adapter.safetensors", tmp_path / "optimizer.pt"
    save_file({f"{ATTENTION}.lora_A.weight": np.ones((4, 6), np.float32)}, state)
    optimizer.touch()
    error = error_of(starting_from(state))
    assert "the resume state of a run" in error.what
    assert "use the LoRA that the run has published" in error.fix

    lora = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(module(DIFFUSERS), lora)
    assert error_of(starting_from(state)).fix == f"set training.lora.start_from to {lora}"
    require_start_file(starting_from(lora))


def test_text_encoders_and_convolutions_that_the_file_lacks_are_named(path: Path) -> None:
    save_file(module(DIFFUSERS), path)
    error = error_of(starting_from(path, conv_rank=4, text_encoders={}, dora=True))
    for text in ("it is not a DoRA", "it adapts no text encoder", "it adapts no convolution"):
        assert text in error.what
    assert "remove training.lora.conv_rank" in error.fix


def test_a_text_encoder_layer_without_effect_is_ignored(path: Path) -> None:
    """kohya's tools write zeros for the layers that the embeddings do not depend on."""
    zero = module(f"lora_te_{TEXT.replace('.', '_')}", 32, up=0.0)
    save_file({**module(KOHYA), **zero}, path)
    require_start_file(starting_from(path))


def test_a_dora_is_an_error_unless_the_recipe_trains_one(path: Path) -> None:
    save_file({**module(KOHYA), f"{KOHYA}.dora_scale": np.ones((8, 1), np.float32)}, path)
    require_start_file(starting_from(path, dora=True))
    error = error_of(starting_from(path))
    assert "it is a DoRA" in error.what
    assert "set training.lora.dora: true" in error.fix


def test_a_lora_of_another_kind_of_model_is_an_error_that_names_the_family(path: Path, tiny_sd: Path) -> None:
    save_file(module("transformer.transformer_blocks.0.attn.to_q"), path)
    error = error_of(starting_from(path, tiny_sd))
    assert "it adapts a transformer, but Stable Diffusion" in error.what


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{KOHYA}.hada_w1_a", "is a LoHa, but only a LoRA can be continued"),
        (f"{KOHYA}.lokr_w1", "is a LoKr, but only a LoRA can be continued"),
        (f"{ATTENTION}.lora_A.weight", "has no LoRA under the names of diffusers, kohya or ComfyUI"),
        ("model.diffusion_model.input_blocks.0.0.weight", "its first tensor is model.diffusion_model"),
    ],
)
def test_a_file_in_no_layout_is_an_error(path: Path, name: str, message: str) -> None:
    save_file({name: np.ones((2, 2), np.float32)}, path)
    error = error_of(starting_from(path))
    assert message in error.what
    assert "pytorch_lora_weights.safetensors" in error.fix


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_a_down_matrix_without_two_dimensions_is_an_error(path: Path, shape: tuple[int, ...]) -> None:
    key = f"{DIFFUSERS}.lora_A.weight"
    save_file({**module(DIFFUSERS), key: np.ones(shape, np.float32)}, path)
    error = error_of(starting_from(path))
    expected = f"the tensor {key} of the LoRA to start from must be a matrix, got shape {list(shape)}"
    assert error.what == expected


def test_a_missing_file_suggests_the_closest_name(path: Path) -> None:
    assert "set training.lora.start_from to an existing LoRA file" in error_of(starting_from(path)).fix
    save_file(module(DIFFUSERS), path)
    error = error_of(starting_from(path.with_name("strat.safetensors")))
    assert error.what == "the LoRA to start from does not exist"
    assert error.fix == f"did you mean {path}?"


def test_a_folder_is_an_error_that_names_the_lora_file_in_it(path: Path) -> None:
    file = path.parent / "lora" / "pytorch_lora_weights.safetensors"
    file.parent.mkdir()
    save_file(module(DIFFUSERS), file)
    error = error_of(starting_from(file.parent))
    assert (error.what, error.fix) == (
        "the LoRA to start from is a folder",
        f"set training.lora.start_from to {file}",
    )


@pytest.mark.parametrize("content", [b"", b"no such format", b"truncated"])
def test_an_unreadable_file_is_an_error(path: Path, content: bytes) -> None:
    save_file(module(DIFFUSERS), path)
    path.write_bytes(path.read_bytes()[:-3] if content == b"truncated" else content)
    error = error_of(starting_from(path))
    assert error.what.startswith("the LoRA to start from cannot be read: ")
    assert "a complete .safetensors file" in error.fix


def test_the_check_does_not_import_torch(path: Path) -> None:
    save_file(module(DIFFUSERS, rank=8), path)
    code = (
        "import sys; from pathlib import Path\n"
        "from pipeline.trained_lora.start_file import require_start_file\n"
        "from tests.pipeline.trained_lora.test_start_file import starting_from\n"
        "try: require_start_file(starting_from(Path(sys.argv[1])))\n"
        "except Exception as err: print(type(err).__name__, 'torch' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["TrainingError", "False"]
