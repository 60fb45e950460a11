from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import avg_pool2d

from pipeline.models.worker.vae import Posterior
from pipeline.vae_latents.worker.vae_batches import MIN_OVERLAP, tile_starts, tiled_posterior

FACTOR = 8


def local(pixels: torch.Tensor) -> Posterior:
    """Encode 8x8 pixels to one value each, so that tiling cannot change the output."""
    mean = avg_pool2d(pixels, FACTOR)
    return Posterior(mean, mean.abs() + 1)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([32, 64, 128]))
def test_L09_tiling_does_not_change_the_output_of_a_local_encoder(
    rows: int, columns: int, tile_px: int
) -> None:
    pixels = torch.rand((1, 3, rows * FACTOR, columns * FACTOR), generator=torch.manual_seed(0))
    whole = local(pixels)
    tiled = tiled_posterior(local, pixels, tile_px=tile_px, multiple=FACTOR)
    torch.testing.assert_close(tiled.mean, whole.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(tiled.std, whole.std, rtol=0, atol=1e-5)


@given(st.integers(1, 500), st.sampled_from([8, 16, 32]), st.sampled_from([256, 512]))
def test_tiles_cover_the_edge_start_at_multiples_and_overlap(steps: int, multiple: int, tile_px: int) -> None:
    edge_px = steps * multiple
    starts = tile_starts(edge_px, tile_px, multiple)
    assert starts[0] == 0
    assert [start for start in starts if start % multiple] == [], f"not multiples of {multiple}"
    if edge_px <= tile_px:
        assert starts == [0]
        return
    assert starts[-1] == edge_px - tile_px
    strides = [after - before for before, after in pairwise(starts)]
    longest = tile_px * (1 - MIN_OVERLAP) + multiple
    assert [stride for stride in strides if not 0 < stride <= longest] == [], f"the limit is {longest}"


def test_no_tile_exceeds_the_requested_size_and_a_short_edge_is_one_tile() -> None:
    sizes: list[tuple[int, ...]] = []

    def record_size(pixels: torch.Tensor) -> Posterior:
        sizes.append(tuple(pixels.shape[-2:]))
        return local(pixels)

    tiled_posterior(record_size, torch.zeros((1, 3, 64, 320)), tile_px=128, multiple=FACTOR)
    assert set(sizes) == {(64, 128)}
    assert len(sizes) == 3


def test_overlapping_tiles_are_blended_linearly_in_both_directions() -> None:
    """Four tiles of 4 x 4 latent values on 6 x 6: weights rise as 1, 2 and fall as 2, 1 along each edge."""
    values = iter([1.0, 10.0, 100.0, 1000.0])

    def constant(pixels: torch.Tensor) -> Posterior:
        value = torch.full((1, 1, 4, 4), next(values))
        return Posterior(value, 2 * value)

    tiled = tiled_posterior(constant, torch.zeros((1, 3, 48, 48)), tile_px=32, multiple=FACTOR)
    # Share of the second tile at each of the six values of an edge.
    share = torch.tensor([0, 0, 1 / 3, 2 / 3, 1, 1])
    rows, columns = share[:, None], share[None]
    upper = 1.0 * (1 - columns) + 10.0 * columns
    lower = 100.0 * (1 - columns) + 1000.0 * columns
    expected = (upper * (1 - rows) + lower * rows)[None, None]
    torch.testing.assert_close(tiled.mean, expected)
    torch.testing.assert_close(tiled.std, 2 * expected)
