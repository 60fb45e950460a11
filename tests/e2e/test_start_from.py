"""A wrong `training.lora.start_from` stops the job before anything is encoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

MODULE = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


def write_lora(path: Path, rank: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{MODULE}.lora_A.weight": np.ones((rank, 8), np.float32),
        f"{MODULE}.lora_B.weight": np.ones((8, rank), np.float32),
    }
    save_file(tensors, path)


@pytest.mark.parametrize("start", ["start.safetensors", "absent.safetensors", "out/lora/start.safetensors"])
def test_the_first_asset_fails_on_a_wrong_start_and_nothing_is_encoded(fresh, start: str) -> None:
    for name in ("start.safetensors", "out/lora/start.safetensors"):
        write_lora(fresh.root / name, rank=3)
    fresh.recipe(training={"steps": 4, "lora": {"rank": 2, "start_from": str(fresh.root / start)}})
    result = fresh.execute("train")
    assert [event.step_key for event in result.get_step_failure_events()] == ["small__raw_images"]
    assert not fresh.cache.exists()
    assert not (fresh.out / "tables").exists()


def test_the_file_is_compared_with_the_rank_that_the_run_overrides(fresh) -> None:
    """A missing caption stops the job at the second asset, so the first one must have accepted the file."""
    write_lora(fresh.root / "start.safetensors", rank=3)
    (fresh.data / "photo1.txt").unlink()
    lora = {"rank": 2, "start_from": str(fresh.root / "start.safetensors")}
    fresh.recipe(training={"steps": 4, "lora": lora})
    config = {"ops": {"small__trained_lora": {"config": {"rank": 3}}}}
    result = fresh.execute("train", run_config=config)
    assert [event.step_key for event in result.get_step_failure_events()] == ["small__validated_dataset"]
