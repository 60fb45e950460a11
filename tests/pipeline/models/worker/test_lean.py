"""Processes that import little load the same models, which answer with the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from demo.tiny_models import TINY
from pipeline.models.families import FAMILIES, Family, detect

ROOT = Path(__file__).resolve().parents[4]

BEFORE = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from pipeline.models.families import detect
from pipeline.models.worker import lean

torch.set_num_threads(1)
"""

LATENTS = """
lean.import_autoencoders()
pixels = torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64)
means = {}
for folder in sys.argv[2:]:
    family = detect(Path(folder))
    vae = family.load_vae("float32", "cpu")
    means[Path(folder).name] = family.posterior(vae, pixels).mean.contiguous()
    picture = family.decode(vae, family.normalise(means[Path(folder).name]))
    assert picture.shape[-2:] == (64, 64)
save_file(means, sys.argv[1])
brought = {"peft", "transformers", "scipy", "torch._dynamo"} & set(sys.modules)
assert not brought, brought
"""

TEXT = """
lean.import_text_encoders()
family = detect(Path(sys.argv[2]))
tensors = family.encode_caption(family.load_text_encoders("float32", "cpu"), "a red fox").tensors
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, sys.argv[1])
brought = {"peft", "scipy"} & set(sys.modules)
assert not brought, brought
"""

AFTERWARDS = """
hidden = torch.compiler.disable
lean.import_autoencoders()
assert torch.compiler.disable is hidden
import peft, torch._dynamo
"""


@pytest.fixture(autouse=True)
def threads_as_there() -> Iterator[None]:
    """Another test of this process may have left another number, which decides the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(script: str, *arguments: Path) -> str:
    """What the script prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:pipeline", "-c", BEFORE + script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


ONE_OF_EACH = (
    "Stable Diffusion 1.x and 2.x",
    "Stable Diffusion XL",
    "FLUX.2 klein",
    "Qwen-Image",
    "Sana",
    "Bria FIBO",
    "Kandinsky 5 (image)",
    "Ideogram 4",
)
"""Kinds of models that differ in how they make latents; no family makes them in another way."""


def way(family: type[Family]) -> tuple[Any, ...]:
    methods = ("load_vae", "posterior", "normalise", "denormalise", "decode")
    return family.components["vae"], *(getattr(family, name) for name in methods)


def test_every_vae_gives_the_bytes_that_it_gives_beside_all_of_diffusers(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(ONE_OF_EACH))]
    for folder, kind in zip(folders, ONE_OF_EACH, strict=True):
        TINY[kind](folder)
    here = {way(type(detect(folder))) for folder in folders}
    others = [family.name for family in FAMILIES if way(family) not in here]
    assert not others, "these make latents in another way: add a tiny one to ONE_OF_EACH"
    assert run(LATENTS, tmp_path / "means", *folders) == ""
    pixels = torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64)
    means = load_file(tmp_path / "means")
    for folder in folders:
        family = detect(folder)
        mean = family.posterior(family.load_vae("float32", "cpu"), pixels).mean
        assert torch.equal(means[folder.name], mean), family.name


def test_a_caption_gives_the_bytes_that_it_gives_beside_all_of_diffusers(
    tmp_path: Path, tiny_sd: Path
) -> None:
    assert run(TEXT, tmp_path / "text", tiny_sd) == ""
    family = detect(tiny_sd)
    expected = family.encode_caption(family.load_text_encoders("float32", "cpu"), "a red fox").tensors
    found = load_file(tmp_path / "text")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_what_was_hidden_can_be_imported_afterwards() -> None:
    run(AFTERWARDS)
