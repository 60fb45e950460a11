"""The computed time of streamed blocks, against the ring on a simulated device."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from bench.gpu.configurations import PUBLISHED
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.models.worker.offload.ring import Ring
from pipeline.models.worker.offload.streamed_blocks import NUM_SLOTS, streamed_names
from pipeline.recipe import project_root
from pipeline.trained_lora.worker.memory.skeletons import skeleton
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from tests.pipeline.models.worker.offload.simulated import SimulatedDevice
from tools.docs.hardware_page import PAGE
from tools.docs.streaming import CARDS, Block, blocks_on, streaming_lines, training_recipe, waiting_s, work_of

FLUX = next(each for each in PUBLISHED if each.name == "FLUX.1 dev")


def simulated_waiting_s(blocks: list[Block]) -> float:
    """Return the time that the computation of the third of three simulated steps waits for copies."""
    device = SimulatedDevice(NUM_SLOTS, [block.copy_s for block in blocks])
    ring = Ring(len(blocks), NUM_SLOTS, device)
    ends_s: list[float] = []
    for _ in range(3):
        for number, block in enumerate(blocks):
            ring.forward_begins(number, with_backward=True)
            device.computed_s += block.forward_s
            ring.forward_ends(number)
            device.computed_s += block.resident_forward_s
        for number, block in reversed(list(enumerate(blocks))):
            device.computed_s += block.resident_backward_s
            ring.backward_begins(number)
            device.computed_s += block.backward_s
        ends_s.append(device.computed_s)
    own_s = sum(block.forward_s + block.backward_s for block in blocks)
    resident_s = sum(block.resident_forward_s + block.resident_backward_s for block in blocks)
    return ends_s[2] - ends_s[1] - own_s - resident_s


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 57])
def test_the_formula_is_the_waiting_time_of_the_ring_for_any_blocks(num_blocks: int) -> None:
    random = Random(num_blocks)
    for _ in range(20):
        blocks = [
            Block(random.uniform(0, 5), forward_s := random.uniform(0.5, 2), 3 * forward_s)
            for _ in range(num_blocks)
        ]
        assert waiting_s(blocks) == pytest.approx(simulated_waiting_s(blocks), abs=1e-9)


def test_with_resident_blocks_the_formula_is_at_most_one_head_start_per_block_too_long() -> None:
    random = Random(0)
    for _ in range(50):
        blocks: list[Block] = []
        for _ in range(12):
            copy_s, forward_s = random.uniform(0, 9), random.uniform(0.5, 2)
            resident_s = random.choice([0, 1, 2])
            blocks.append(Block(copy_s, forward_s, 3 * forward_s, resident_s, 3 * resident_s))
        simulated_s = simulated_waiting_s(blocks)
        head_starts_s = sum(block.resident_forward_s for block in blocks)
        assert simulated_s - 1e-9 <= waiting_s(blocks) <= simulated_s + head_starts_s + 1e-9


def test_peaks_are_those_of_nvidias_whitepaper() -> None:
    peaks = {card.name: card.peak_flops / 1e12 for card in CARDS}
    assert peaks["RTX 4090"] == pytest.approx(165.2, abs=0.05)
    assert peaks["RTX 4080"] == pytest.approx(97.5, abs=0.05)


@pytest.mark.slow
def test_the_rows_of_streaming_are_up_to_date_and_follow_the_ring(tmp_path: Path) -> None:
    page = (project_root() / PAGE).read_text(encoding="utf-8").splitlines()
    assert all(line in page for line in streaming_lines(FLUX)), "run python -m tools.docs.hardware_page"

    family, size = load_family(FLUX.write(tmp_path / "model")), Size(1024, 1024)
    work = work_of(TrainingForecast(family, training_recipe(family.model.path), size), family, size)
    denoiser = skeleton(family, family.spec.denoiser_name, "bfloat16")
    for card in CARDS:
        for offload in (0, 15, 25, 45):
            blocks = blocks_on(card, work, streamed_names(denoiser, offload), 1.0)
            assert waiting_s(blocks) == pytest.approx(simulated_waiting_s(blocks), rel=0.05, abs=0.05)
