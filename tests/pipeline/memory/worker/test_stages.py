"""The memory of the stages, and how it follows from a recipe, for FLUX.1 dev with few blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from bench.gpu.configurations import PUBLISHED
from pipeline.memory.job import MemoryForecast, MemoryJob
from pipeline.memory.worker.stages import forecast_stages, machine_bytes
from pipeline.recipe import recipe_from_mapping

GIB = 2**30


@pytest.fixture(scope="module")
def forecast(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the forecast of a recipe with changed sections; equal ones are computed once."""
    tmp_path = tmp_path_factory.mktemp("forecast")
    known: dict[str, MemoryForecast] = {}
    published = next(each for each in PUBLISHED if each.name == "FLUX.1 dev")
    transformer = {**published.networks["transformer"], "num_layers": 2, "num_single_layers": 4}
    networks = {**published.networks, "transformer": transformer}
    folder = replace(published, networks=networks).write(tmp_path / "model")

    def run(card_bytes: int | None = None, **sections: Any) -> MemoryForecast:
        values: dict[str, Any] = {
            "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
            "output_dir": str(tmp_path / "out"),
            "model": {"base": str(folder)},
            "training": {"gradient_checkpointing": True},
        }
        recipe = recipe_from_mapping("memory", values | sections)
        key = f"{card_bytes} {recipe.model_dump_json()}"
        if key not in known:
            known[key] = forecast_stages(MemoryJob(recipe, folder, {}, card_bytes))
        return known[key]

    return run


def test_a_precision_that_the_gpu_of_this_machine_emulates_is_named(
    forecast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a card")
    card = SimpleNamespace(total_memory=16 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))

    # A seed of its own, because equal forecasts are computed once for all tests.
    training = {"gradient_checkpointing": True, "seed": 7}
    assert "set accelerate.mixed_precision: fp16" in forecast(training=training).stages[2].note


@pytest.mark.slow
def test_auto_is_forecast_with_the_dtypes_that_it_resolves_to(forecast: Any) -> None:
    stated = {"latents": {"compute_dtype": "float32"}, "accelerate": {"mixed_precision": "bf16"}}
    auto, explicit = forecast(), forecast(**stated)
    assert auto.stages[0].device_bytes == explicit.stages[0].device_bytes
    assert auto.stages[2].device_bytes == explicit.stages[2].device_bytes

    # CLIP is small and stays float32; T5 has 4.8 billion weights.
    assert auto.stages[1].note == ""
    float32 = forecast(text={"compute_dtype": "float32"}).stages[1]
    assert float32.note == "text.compute_dtype: bfloat16 takes half of it"
    assert float32.device_bytes == pytest.approx(2 * auto.stages[1].device_bytes, rel=0.1)


@pytest.mark.slow
def test_the_host_holds_no_unpacked_model_if_weights_are_packed_on_the_gpu(forecast: Any) -> None:
    training = {"gradient_checkpointing": True, "quantize": "int8"}
    plain, packed = forecast().stages[2], forecast(training=training).stages[2]
    assert packed.host_bytes < plain.host_bytes - 1.5 * GIB
    assert packed.device_bytes < plain.device_bytes - 0.5 * GIB
    same_kind = {**training, "quantize": "int8_torchao"}
    assert forecast(training=same_kind).stages[2].device_bytes == packed.device_bytes


@pytest.mark.slow
def test_packing_is_proposed_with_the_gentlest_kind_that_fits_if_all_blocks_are_streamed(
    forecast: Any,
) -> None:
    training = {"gradient_checkpointing": True, "offload": 0}
    needed = forecast(training={**training, "quantize": "int8"}).stages[2].device_bytes
    change = forecast(card_bytes=needed + int(1.2 * GIB), training=training).change
    assert (change.settings, change.fits) == (("training.quantize: int8",), True)
    change = forecast(card_bytes=needed + int(0.8 * GIB), training=training).change
    assert (change.settings, change.fits) == (("training.quantize: nf4",), True)


def test_streamed_blocks_are_on_the_host_and_two_slots_on_the_gpu(forecast: Any) -> None:
    """FLUX.1 has 340 million weights in a block of two streams and 142 million in one of a single stream."""

    def stage(**training: Any) -> Any:
        return forecast(training={"gradient_checkpointing": True, **training}).stages[2]

    resident, streamed, one = stage(), stage(offload=0), stage(offload=1)
    double, single = 340e6 * 2, 142e6 * 2
    saved = resident.device_bytes - streamed.device_bytes
    assert saved == pytest.approx(2 * double + 4 * single - 2 * double, rel=0.01)
    assert streamed.host_bytes == pytest.approx(resident.host_bytes, rel=0.05)
    assert one.device_bytes - streamed.device_bytes == pytest.approx(double, rel=0.01)

    packed, streamed = stage(quantize="int8"), stage(quantize="int8", offload=0)
    assert packed.device_bytes - streamed.device_bytes == pytest.approx(saved / 2, rel=0.02)


def test_streaming_is_proposed_before_packing_and_with_it_if_it_is_not_enough(forecast: Any) -> None:
    needed = forecast(training={"gradient_checkpointing": True, "offload": 0}).stages[2].device_bytes
    card_bytes = needed + int(1.2 * GIB)
    change = forecast(card_bytes=card_bytes).change
    assert (change.settings, change.fits) == (("training.offload: auto",), True)
    assert needed <= change.device_bytes <= card_bytes - GIB

    # With six blocks, two slots are a third of the model.
    change = forecast(card_bytes=needed + int(0.8 * GIB)).change
    assert (change.settings, change.fits) == (("training.offload: auto", "training.quantize: int8"), True)
    change = forecast(card_bytes=2 * GIB).change
    assert (change.settings, change.fits) == (("training.offload: auto", "training.quantize: nf4"), False)


def test_auto_is_forecast_with_the_blocks_that_it_keeps_on_a_card(forecast: Any) -> None:
    training = {"gradient_checkpointing": True, "offload": "auto"}
    resident, one = (forecast(training={**training, "offload": each}).stages[2] for each in ("none", 1))
    assert resident.note == ""
    stage = forecast(training=training).stages[2]
    assert stage.device_bytes == resident.device_bytes
    assert stage.note == "training.offload: auto keeps 6 of 6 blocks on the GPU"
    memory = forecast(card_bytes=one.device_bytes + GIB, training=training)
    assert memory.stages[2].device_bytes == one.device_bytes
    assert memory.stages[2].note == "training.offload: auto keeps 1 of 6 blocks on the GPU"
    assert memory.change is None


@pytest.mark.slow
def test_the_text_encoder_that_does_not_fit_is_forecast_with_streamed_layers(forecast: Any) -> None:
    """T5's 24 layers have 193 million weights each; the margin is 2 GiB."""
    layer = 193e6 * 2 / GIB

    def stage(gigabytes: int | None, **text: Any) -> Any:
        card_bytes = None if gigabytes is None else gigabytes * GIB
        return forecast(card_bytes=card_bytes, text=text).stages[1]

    everything = stage(None)
    assert everything.note == ""
    assert stage(24) == replace(everything, host_bytes=pytest.approx(everything.host_bytes, rel=0.01))
    assert stage(8, offload="none").device_bytes == everything.device_bytes

    auto = stage(8)
    num_streamed = int(auto.note.removeprefix("text.offload: auto streams ").partition(" ")[0])
    assert auto.note == f"text.offload: auto streams {num_streamed} of 24 layers of text_encoder_2"
    assert auto.device_bytes < 7 * GIB
    saved = (everything.device_bytes - auto.device_bytes) / GIB
    assert saved == pytest.approx((num_streamed - 2) * layer, rel=0.02)
    moved = (auto.host_bytes - everything.host_bytes) / GIB
    assert moved == pytest.approx(num_streamed * layer, rel=0.05)

    least = stage(None, offload=0)
    assert least.note.startswith(
        "text.offload: 0 streams 12 of 12 layers of text_encoder; text.offload: 0 str"
    )
    assert least.device_bytes < 2 * GIB


def test_a_sharded_base_model_needs_its_share_and_the_gathered_weights(forecast: Any) -> None:
    """FLUX.1 has 340 million weights in a block of two streams and 142 million in one of a single stream."""

    def stage(num_processes: int, *, shard: bool) -> Any:
        return forecast(accelerate={"num_processes": num_processes, "shard": shard}).stages[2]

    double, blocks = 340e6 * 2, (2 * 340e6 + 4 * 142e6) * 2
    replicated, pair, four = stage(2, shard=False), stage(2, shard=True), stage(4, shard=True)
    quarter = pair.device_bytes - four.device_bytes
    outside = 4 * quarter - blocks
    assert 0 < outside < 0.2 * blocks
    expected = 2 * quarter - outside - 3 * double
    assert replicated.device_bytes - pair.device_bytes == pytest.approx(expected, abs=0.02 * GIB)
    assert pair.host_bytes == pytest.approx(replicated.host_bytes, rel=0.05)


def test_no_change_of_a_sharded_recipe_is_proposed_that_sharding_excludes(forecast: Any) -> None:
    accelerate = {"num_processes": 2, "shard": True}
    change = forecast(card_bytes=2 * GIB, accelerate=accelerate).change
    assert not change.fits
    assert [each for each in change.settings if "offload" in each or "quantize" in each] == []


@pytest.mark.parametrize(
    ("limit", "expected"), [("1073741824\n", GIB), ("max\n", None), (f"{2**62}\n", None), (None, None)]
)
def test_the_machines_memory_is_at_most_the_limit_of_its_container(
    limit: str | None, expected: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    assert machine_bytes(file) == (expected or psutil.virtual_memory().total)
