from __future__ import annotations

from pathlib import Path

from bench.kernels import Step, counted
from demo.tiny_models import make_tiny_flux
from pipeline.models.worker.family import load_family


def test_checkpointing_counts_the_blocks_once_more(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "flux")
    family = load_family(tmp_path / "flux")
    plain, checkpointed = (counted(family, Step("FLUX.1 dev", 1, each)) for each in (False, True))
    assert 1.2 * plain.kernels < checkpointed.kernels < 2 * plain.kernels
    assert checkpointed.cast_bytes > plain.cast_bytes > 0
    assert checkpointed.product_flops > 1.2 * plain.product_flops

    # One more forward pass, and a backward pass of two and a half.
    assert checkpointed.attention_flops * 3.5 == plain.attention_flops * 4.5 > 0
