from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import Flux2Pipeline
from transformers import AutoTokenizer

from demo.tiny_models import make_tiny_flux2_dev
from pipeline.models.worker.family import load_family
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.flux2_case import Flux2Case, ReferenceTests


class DevCase(Flux2Case):
    pipeline_class = Flux2Pipeline
    guidance = 1.0

    def make(self, folder: Path) -> None:
        make_tiny_flux2_dev(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        """Load the pipeline with a tokenizer only; its image processor needs torchvision."""
        pipe = Flux2Pipeline.from_pretrained(folder, tokenizer=None, **parts)
        pipe.register_modules(tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"))
        return pipe


def test_the_complete_job_of_dev_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(DevCase())


def test_cut_tokens_are_counted_after_the_system_message(tmp_path: Path) -> None:
    make_tiny_flux2_dev(tmp_path)
    family = load_family(tmp_path)
    encoders = family.text.load("float32", "cpu")
    short = family.text.encode_caption(encoders, "a cat")
    assert short.num_cut == 0
    assert short.cut_from is None
    before = short.num_tokens - len(["a", " cat", "[/INST]"])
    for extra in (0, 1, 7):
        caption = "a" + " cat" * (512 - before - len(["a", "[/INST]"]) + extra)
        encoded = family.text.encode_caption(encoders, caption)
        assert (encoded.num_tokens, encoded.num_cut) == (512 + extra, extra)
        cut_text = " cat" * (extra - 1) if extra else None  # the first cut token is the end mark
        assert encoded.cut_from == (None if cut_text is None else len(caption) - len(cut_text))


class TestReferences(ReferenceTests):
    case = DevCase()
