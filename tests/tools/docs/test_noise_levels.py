from __future__ import annotations

from pathlib import Path

import pytest

from demo.tiny_models import make_tiny_flux, make_tiny_flux2_dev, make_tiny_lumina2, make_tiny_z_image
from tools.docs.noise_levels import peer_share, share


def test_the_share_of_a_family_is_that_of_its_shift(tmp_path: Path) -> None:
    """The probability that a normal number is below -1.15, and that of a schedule without a shift."""
    for number, make in enumerate(
        [make_tiny_flux, make_tiny_flux2_dev, make_tiny_lumina2, make_tiny_z_image]
    ):
        make(tmp_path / str(number))
        assert share(tmp_path / str(number)) == pytest.approx(0.12507, abs=1e-4)
    make_tiny_flux(tmp_path / "schnell", schnell=True)
    assert share(tmp_path / "schnell") == pytest.approx(0.5, abs=1e-4)


def test_the_shares_of_other_trainers_are_those_of_their_settings() -> None:
    assert peer_share({"shift": 3.1582}) == pytest.approx(0.12507, abs=1e-4)
    assert peer_share({"shift": 3.0}) == pytest.approx(0.13597, abs=1e-4)
    assert peer_share({"shift": 6.0, "density": "uniform"}) == pytest.approx(1 / 7)
    assert peer_share({"centre": 0.6931, "width": 1.5}) == pytest.approx(0.322, abs=1e-3)
    assert peer_share(None) is None
