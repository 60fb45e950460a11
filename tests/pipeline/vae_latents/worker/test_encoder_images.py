"""What the encoder makes of one image: mirrored pixels, the stored posterior, facts, and repeated passes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.encoding.jobs import Encoded, Encoding, Failure, Job
from pipeline.encoding.progress import Progress
from pipeline.errors import ModelError
from pipeline.images.decode import load_pixels
from pipeline.images.geometry import Geometry
from pipeline.models.worker.vae import Posterior
from pipeline.processes.launch import num_cores
from pipeline.vae_latents.worker.encoder import LatentEncoder, decode_threads
from tests.listener import Listener


def encoding_of(cache: Any, tmp_path: Path, work: dict[str, Any] | None = None, **settings: Any) -> Encoding:
    """Return an encoding for one image; `work` changes its job."""
    entries = RecipeEntries(cache.recipe)
    row = cache.buckets().to_dicts()[0]
    made = {**row, "root": str(cache.photos), "flipped": False, **(work or {})}
    job = Job(entries.latent_spec(row), {}, made, row["path"], 4096)
    chosen = {"compute_dtype": "float32", "posterior": "mean", "background": [255, 255, 255], **settings}
    return Encoding("latents", Path(cache.recipe.model.base), tmp_path / "store", chosen, [job])


def encoder_of(encoding: Encoding, listener: Listener | None = None) -> LatentEncoder:
    folder = Path(encoding.store_root).parent
    progress = Progress(listener or Listener(), folder, jobs=range(1), what="latents", rank=0)
    return LatentEncoder(encoding, "cpu", progress)


def encoded(encoding: Encoding, listener: Listener | None = None) -> Encoded:
    ((_, outcome),) = encoder_of(encoding, listener).encoded(encoding.jobs, Store(encoding.store_root))
    assert isinstance(outcome, Encoded)
    return outcome


def test_a_mirrored_image_is_the_image_from_right_to_left(cache: Any, tmp_path: Path) -> None:
    plain, mirrored = (encoding_of(cache, tmp_path, {"flipped": flipped}) for flipped in (False, True))
    work = plain.jobs[0].work
    expected = load_pixels(
        Path(work["root"]) / work["path"],
        Geometry.from_row(work),
        (255, 255, 255),
        content_hash=work["content_hash"],
    )
    encoder = encoder_of(plain)
    np.testing.assert_array_equal(encoder.image(plain.jobs[0]), expected)
    image = encoder.image(mirrored.jobs[0])
    assert image.flags.c_contiguous
    np.testing.assert_array_equal(image, expected[:, ::-1])


def test_an_image_that_is_not_tiled_has_no_facts(cache: Any, tmp_path: Path) -> None:
    assert encoded(encoding_of(cache, tmp_path)).facts == {}


def test_the_current_image_is_named_if_it_is_slow(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.encoding.progress.SLOW_JOB_S", -1.0)
    encoding, listener = encoding_of(cache, tmp_path), Listener()
    encoded(encoding, listener)
    assert f"working on {encoding.jobs[0].name} for 0 s" in "\n".join(listener.lines)


def test_a_latent_that_is_finite_in_half_precision_is_not_encoded_again(cache: Any, tmp_path: Path) -> None:
    listener = Listener()
    encoding = encoding_of(cache, tmp_path, compute_dtype="bfloat16")
    half = encoded(encoding, listener).tensors["latent"].astype(np.float32)
    exact = encoded(encoding_of(cache, tmp_path)).tensors["latent"].astype(np.float32)
    assert "float32" not in "\n".join(listener.lines)
    assert 0 < np.abs(half - exact).max() < 0.1


def test_an_infinite_latent_in_float32_is_not_encoded_again(cache: Any, tmp_path: Path) -> None:
    encoding, listener = encoding_of(cache, tmp_path), Listener()
    encoder = encoder_of(encoding, listener)
    passes: list[int] = []
    posterior_of = encoder.family.vae.posterior

    def posterior(vae: Any, pixels: torch.Tensor) -> Posterior:
        passes.append(len(pixels))
        posterior = posterior_of(vae, pixels)
        factor = 1.0 if pixels.std() == 0 else float("inf")
        return Posterior(posterior.mean * factor, posterior.std)

    encoder.family.vae.posterior = posterior  # type: ignore[method-assign]
    ((_, outcome),) = encoder.encoded(encoding.jobs, Store(encoding.store_root))
    assert isinstance(outcome, Failure)
    assert passes == [1, 1], "the image, and a grey image because all images have failed"
    assert "again" not in "\n".join(listener.lines)


def test_missing_images_say_nothing_about_the_model(cache: Any, tmp_path: Path) -> None:
    encoding = encoding_of(cache, tmp_path, {"path": "missing.png"})
    encoder = encoder_of(encoding)
    encoder.family.vae.posterior = None  # type: ignore[method-assign]
    ((_, outcome),) = encoder.encoded(encoding.jobs, Store(encoding.store_root))
    assert isinstance(outcome, Failure)
    assert outcome.reason == "vanished"


def test_the_posterior_of_a_job_takes_precedence_over_that_of_the_order(cache: Any, tmp_path: Path) -> None:
    mean = encoded(encoding_of(cache, tmp_path)).tensors["latent"]
    sample = encoded(encoding_of(cache, tmp_path, posterior="sample")).tensors["latent"]
    assert (mean != sample).any()
    work = {"posterior": "mean"}
    own = encoded(encoding_of(cache, tmp_path, work, posterior="sample")).tensors["latent"]
    np.testing.assert_array_equal(own, mean)


def test_a_stored_deviation_is_scaled_but_not_shifted(cache: Any, tmp_path: Path) -> None:
    """FLUX.1 subtracts a shift from its latents, which tiny Stable Diffusion does not."""
    encoding = encoding_of(cache, tmp_path, posterior="moments")
    encoder = encoder_of(encoding)
    vae: Any = encoder.family.vae
    vae.normalise = lambda raw: (raw - 0.5) * 2.0
    mean, std = torch.randn(1, 4, 8, 8), torch.rand(1, 4, 8, 8) + 0.1
    shape = (4, 8, 8)
    spec = encoding.jobs[0].spec
    tensors = {name: replace(spec_of, shape=shape) for name, spec_of in spec.tensors.items()}
    job = replace(encoding.jobs[0], spec=replace(spec, tensors=tensors))
    values = encoder.tensors(job, Posterior(mean, std))
    torch.testing.assert_close(values["mean"], ((mean - 0.5) * 2.0)[0])
    torch.testing.assert_close(values["std"], (std * 2.0)[0])


def test_a_model_whose_latents_overflow_has_the_fix_of_the_stored_dtype(cache: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(cache.recipe.model.base, tmp_path / "loud")
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "scaling_factor": 1e9}))
    encoding = encoding_of(cache.with_settings(model={"base": str(folder)}), tmp_path)
    with pytest.raises(ModelError, match="does not fit into float16") as excinfo:
        encoded(encoding)
    assert excinfo.value.fix == "set latents.dtype to bfloat16 or float32"


@pytest.mark.parametrize(("world_size", "threads"), [("1", num_cores()), ("2", max(1, num_cores() // 2))])
def test_the_processes_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, world_size: str, threads: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", world_size)
    assert decode_threads() == threads
    assert isinstance(decode_threads(), int)


def test_each_process_has_at_least_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert decode_threads() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert decode_threads() == num_cores()
