from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline

from pipeline.buckets import assign_buckets
from pipeline.encode.latents import cache_latents
from pipeline.encode.text import cache_text
from pipeline.entries import Entries
from pipeline.errors import FamilyError
from pipeline.families import Family, detect
from pipeline.families.tiny import make_tiny_sdxl
from pipeline.geometry import Geometry, Size
from pipeline.images import load_pixels
from pipeline.ingest.discover import scan
from pipeline.ingest.validate import validate
from pipeline.lora_files import read_lora_file
from pipeline.recipe import recipe_from_mapping
from pipeline.tables import Tables
from pipeline.training.engine import Engine
from pipeline.training.loader import MicroBatchMaker
from pipeline.training.loop import train
from pipeline.training.order import read_order
from pipeline.training.run import train_lora
from pipeline.training.stopping import StopRequest

# diffusers' Euler schedule makes an array of a tensor in a way that numpy 2 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ATTENTIONS = {
    "down_blocks.1.attentions.0": "input_blocks.4.1",
    "down_blocks.1.attentions.1": "input_blocks.5.1",
    "mid_block.attentions.0": "middle_block.1",
    "up_blocks.0.attentions.0": "output_blocks.0.1",
    "up_blocks.0.attentions.1": "output_blocks.1.1",
    "up_blocks.0.attentions.2": "output_blocks.2.1",
}
"""As in Stability AI's sd_xl_base.yaml, whose first levels are these."""

LAYERS = [
    f"transformer_blocks.{block}.{attention}.{layer}"
    for block in range(2)
    for attention in ("attn1", "attn2")
    for layer in ("to_q", "to_k", "to_v", "to_out.0")
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny_sdxl"
    make_tiny_sdxl(folder)
    return folder


@pytest.fixture(scope="module")
def family(base: Path) -> Family:
    return detect(base)


@pytest.fixture(scope="module")
def whole(base: Path) -> Any:
    pipeline = StableDiffusionXLPipeline.from_pretrained(base, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class Here:
    """Runs both kinds of worker in this process."""

    def __init__(self, encode: Any) -> None:
        self.encode = encode
        self.orders: list[Path] = []

    def __call__(self, module: str, order: Path) -> None:
        if module == "pipeline.entrypoints.encode":
            self.encode(module, order)
        else:
            self.orders.append(order)
            assert train(read_order(order), self, StopRequest())

    def info(self, text: str) -> None: ...
    def progress(self, done: int, total: int, text: str) -> None: ...


def settings(folder: Path, photos: Path, base: Path) -> dict[str, Any]:
    return {
        "datasets": [{"name": "photos", "path": photos}],
        "cache_dir": folder / "cache",
        "output_dir": folder / "output",
        "model": {"base": str(base)},
        "buckets": {"resolution": 64, "step": 32},
        "latents": {"dtype": "float32", "posterior": "mean"},
        "text": {"dtype": "float32", "caption_dropout": 0.0},
        "training": {"steps": 2, "batch_size": 2, "learning_rate": 1e-1, "sample_every": 2, "seed": 7},
    }


def drawn(pipeline: Any) -> np.ndarray[Any, Any]:
    rng = torch.Generator().manual_seed(1)
    kwargs = {"height": 64, "width": 64, "num_inference_steps": 2, "generator": rng, "output_type": "np"}
    return pipeline("a cat", **kwargs).images[0]


def test_the_whole_chain_equals_diffusers_and_its_files_change_the_picture(
    tmp_path: Path, photos: Path, base: Path, family: Family, whole: Any, launch_here: Any
) -> None:
    recipe = recipe_from_mapping("demo", settings(tmp_path, photos, base))
    tables, launch = Tables(recipe.output_dir), Here(launch_here)
    log = launch.info

    def kept(asset: str, result: Any) -> Any:
        tables.write(asset, result.table)
        tables.write_rejected(asset, result.rejected)
        return result.table

    raw = kept("raw_images", scan(recipe, tables, log=log))
    valid = kept("validated_dataset", validate(recipe, raw, tables, log=log))
    buckets = kept("aspect_buckets", assign_buckets(recipe, valid, log=log))
    latents = kept("vae_latents", cache_latents(recipe, buckets, tables, launch=launch, log=log))
    text = kept("text_embeddings", cache_text(recipe, valid, tables, launch=launch, log=log))
    assert len(latents) == len(text) == 5

    entries = Entries(recipe)
    for row in latents.to_dicts():
        check_latent(row, photos, entries, whole)
    for caption in [*text["caption"], ""]:
        stored = entries.store.read_torch(entries.text(caption))
        with torch.no_grad():
            expected = whole.encode_prompt(caption, device="cpu", do_classifier_free_guidance=False)
        torch.testing.assert_close(stored["text_embedding"], expected[0][0], rtol=0, atol=1e-5)
        torch.testing.assert_close(stored["pooled_text_embedding"], expected[2][0], rtol=0, atol=1e-5)

    train_lora(recipe, latents, text, launch=launch, log=log)
    order = read_order(launch.orders[0])
    check_step(order, family, whole)
    assert len(list((order.folder / "samples").glob("*.png"))) == len(order.prompts) > 0
    check_files(recipe.output_dir / "lora", whole)


def check_latent(row: dict[str, Any], photos: Path, entries: Entries, whole: Any) -> None:
    file = photos / row["path"]
    image = load_pixels(file, Geometry.from_row(row), (255, 255, 255), content_hash=row["content_hash"])
    pixels = whole.image_processor.preprocess(image[None].astype(np.float32) / 255)
    with torch.no_grad():  # contiguous: another memory layout takes other kernels, and differs by 2e-5
        expected = whole.vae.encode(pixels.contiguous()).latent_dist.mean * whole.vae.config.scaling_factor
    stored = entries.store.read_torch(entries.latent(row))["latent"]
    torch.testing.assert_close(stored, expected[0], rtol=0, atol=1e-5)


def check_step(order: Any, family: Family, whole: Any) -> None:
    """With a fresh adapter, whose delta weights are zero, the base model itself is the oracle."""
    engine = Engine(order, family)
    micro = MicroBatchMaker(order, family, engine.scheduler).make(
        0, next(iter(order.plan())).micro_batches[0][0]
    )
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    signal = torch.tensor(np.cumprod(1 - betas))[micro.timesteps].float()[:, None, None, None]
    noisy = signal.sqrt() * micro.latent + (1 - signal).sqrt() * micro.noise
    inputs = {item.sample_id: item for item in order.inputs}
    time_ids = torch.cat(
        [
            whole._get_add_time_ids(
                inputs[name].original_size_hw,
                inputs[name].crop_top_left,
                inputs[name].target_size_hw,
                dtype=torch.float32,
                text_encoder_projection_dim=whole.text_encoder_2.config.projection_dim,
            )
            for name in micro.sample_ids
        ]
    )
    added = {"text_embeds": micro.conditions["pooled_text_embedding"], "time_ids": time_ids}
    text = micro.conditions["text_embedding"]
    with torch.no_grad():
        expected = whole.unet(noisy, micro.timesteps, text, added_cond_kwargs=added).sample
        got = family.predict(engine.denoiser, noisy, micro.timesteps, micro.conditions)
        losses = engine.losses(micro, engine.denoiser)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    by_hand = ((expected - micro.noise) ** 2).mean(dim=(1, 2, 3))
    torch.testing.assert_close(losses, by_hand, rtol=0, atol=1e-5)


def check_files(lora: Path, whole: Any) -> None:
    own = read_lora_file(lora / "pytorch_lora_weights.safetensors").tensors
    assert set(own) == {
        f"unet.{block}.{layer}.lora_{side}.weight"
        for block in ATTENTIONS
        for layer in LAYERS
        for side in "AB"
    }
    ends = ("lora_down.weight", "lora_up.weight", "alpha")
    original = [f"{block}.{layer}" for block in ATTENTIONS.values() for layer in LAYERS]
    kohya = read_lora_file(lora / "demo_kohya.safetensors").tensors
    assert set(kohya) == {f"lora_unet_{name.replace('.', '_')}.{end}" for name in original for end in ends}
    comfyui = read_lora_file(lora / "demo_comfyui.safetensors").tensors
    assert set(comfyui) == {f"diffusion_model.{name}.{end}" for name in original for end in ends}
    plain = drawn(whole)
    whole.load_lora_weights(lora)
    adapted = drawn(whole)
    whole.unload_lora_weights()
    whole.load_lora_weights(lora, weight_name="demo_kohya.safetensors")
    again = drawn(whole)
    whole.unload_lora_weights()
    assert np.abs(adapted - plain).max() > 0.01
    np.testing.assert_allclose(again, adapted, atol=1e-4)


def test_a_picture_is_that_of_the_whole_pipeline(family: Family, whole: Any) -> None:
    encoders = family.load_text_encoders("float32", "cpu")
    text, empty = (family.encode_caption(encoders, caption).tensors for caption in ("a cat", ""))
    pipeline = family.load_pipeline(dtype="float32", device="cpu")
    own = family.draw(pipeline, text, empty, size=Size(64, 64), steps=2, seed=1)
    np.testing.assert_allclose(np.asarray(own) / 255, drawn(whole), atol=0.6 / 255)


def test_what_a_caption_loses_is_counted(family: Family) -> None:
    encoders = family.load_text_encoders("float32", "cpu")
    encoded = family.encode_caption(encoders, "cat " * 80)
    assert (encoded.num_tokens, encoded.num_cut, encoded.cut_from) == (82, 5, 4 * 75)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"_class_name": "EDMEulerScheduler"}, "EDMEuler"), ({"prediction_type": "sample"}, "sample")],
)
def test_a_schedule_that_cannot_be_trained_is_an_error(
    base: Path, tmp_path: Path, change: dict[str, str], said: str
) -> None:
    folder = shutil.copytree(base, tmp_path / "other")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FamilyError, match=said):
        detect(folder).prediction_type()


def test_a_module_that_kohya_has_no_name_for_is_an_error(family: Family) -> None:
    with pytest.raises(FamilyError, match="no name in the original"):
        family.kohya_layer("down_blocks.0.resnets.0.conv1")


def test_a_large_size_is_told_exactly_in_half_precision(family: Family) -> None:
    told: list[torch.Tensor] = []

    class Listening(torch.nn.Module):
        def forward(self, noisy: torch.Tensor, times: Any, **given: Any) -> Any:
            told.append(given["added_cond_kwargs"]["time_ids"])
            return SimpleNamespace(sample=noisy)

    sizes = {"original_size_hw": [[3001, 4099]], "crop_top_left": [[257, 0]], "target_size_hw": [[1024, 960]]}
    conditions = {name: torch.tensor(size) for name, size in sizes.items()}
    conditions |= {
        "text_embedding": torch.ones(1, 77, 72).bfloat16(),
        "pooled_text_embedding": torch.ones(1, 48).bfloat16(),
    }
    family.predict(Listening(), torch.ones(1, 4, 8, 8), torch.tensor([5]), conditions)
    assert told[0].dtype == torch.float32
    assert told[0].tolist() == [[3001, 4099, 257, 0, 1024, 960]]


def test_detection_goes_by_the_pipeline_class_and_an_unknown_one_lists_the_families(
    base: Path, tmp_path: Path
) -> None:
    assert detect(base).name == "Stable Diffusion XL"
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "NobodysPipeline"}))
    with pytest.raises(FamilyError, match="NobodysPipeline") as caught:
        detect(tmp_path)
    assert "StableDiffusionXLPipeline" in caught.value.fix
    assert "StableDiffusionPipeline" in caught.value.fix
