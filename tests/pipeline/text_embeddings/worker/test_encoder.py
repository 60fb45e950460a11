"""Captions that are encoded one by one: those already present, the facts of each, and a slow one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.tiny_models import make_tiny_ernie_image
from demo.tiny_models.parts import write_json
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.encoding.jobs import Encoded, Encoding, Job
from pipeline.encoding.progress import Progress
from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import read_json
from pipeline.models.worker.family import load_family
from pipeline.text_embeddings.worker.encoder import TextEncoder, captions_per_pass
from tests.listener import Listener

CAPTIONS = ["a cat", "a red dog", "cats and dogs"]


@pytest.fixture
def encoding(cache: Any, tmp_path: Path) -> Encoding:
    entries = RecipeEntries(cache.recipe)
    jobs = [Job(entries.text_spec(text), {}, {"caption": text}, text, len(text)) for text in CAPTIONS]
    settings = {"compute_dtype": "float32", "offload": "none"}
    return Encoding("text", Path(cache.recipe.model.base), tmp_path / "store", settings, jobs)


def encoder_of(encoding: Encoding, listener: Listener) -> TextEncoder:
    progress = Progress(listener, Path(encoding.store_root).parent, jobs=range(3), what="captions", rank=0)
    return TextEncoder(encoding, "cpu", progress)


def test_a_caption_written_by_another_job_is_skipped_and_the_others_are_encoded_alone(
    encoding: Encoding,
) -> None:
    store, present = Store(encoding.store_root), encoding.jobs[0]
    zeros = {name: np.zeros(spec.shape, "<f2") for name, spec in present.spec.tensors.items()}
    store.write(present.spec, zeros, {})
    encoder: Any = encoder_of(encoding, Listener())
    text = encoder.family.text
    passes: list[str] = []
    encode = text.encode_caption
    text.encode_captions = None  # it is for GPUs

    def counted(encoders: Any, caption: str, images: Any) -> Any:
        passes.append(caption)
        return encode(encoders, caption, images)

    text.encode_caption = counted
    outcomes = {job.name: outcome for job, outcome in encoder.encoded(encoding.jobs, store)}
    assert list(outcomes) == CAPTIONS
    assert outcomes["a cat"] == "present"
    assert passes == CAPTIONS[1:]
    for outcome in list(outcomes.values())[1:]:
        assert isinstance(outcome, Encoded)
        assert outcome.facts["num_tokens"] > 2
        assert (outcome.facts["num_cut"], outcome.facts["cut_from"]) == (0, None)


def test_the_current_caption_is_named_if_it_is_slow(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.encoding.progress.SLOW_JOB_S", -1.0)
    listener = Listener()
    list(encoder_of(encoding, listener).encoded(encoding.jobs, Store(encoding.store_root)))
    assert "working on a cat for 0 s" in "\n".join(listener.lines)


def test_a_gpu_encodes_16_captions_of_clip_at_once(tiny_sd: Path) -> None:
    assert captions_per_pass(load_family(tiny_sd), "cuda:0") == 16


@pytest.mark.parametrize(
    ("pattern", "caption"),
    [
        ("(?:(a+)+)+c", "a" * 40 + "b"),
        ("(?:(?:x|y)+|(?:x|y)+)+z", "xy" * 20),
        ("(?:([0-9]+)+)+;", "1" * 40 + ","),
    ],
)
def test_a_regular_expression_that_never_ends_names_caption_and_tokenizer(
    encoding: Encoding, tmp_path: Path, pattern: str, caption: str
) -> None:
    model = tmp_path / "ernie"
    make_tiny_ernie_image(model)
    file = model / "tokenizer" / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    write_json(file, {**read_json(file), "pre_tokenizer": split})
    (job, *_) = encoding.jobs
    hostile = replace(
        encoding, model_folder=model, jobs=[replace(job, work={"caption": caption}, name=caption)]
    )
    with pytest.raises(ModelError, match="retry-limit-in-match") as error:
        list(encoder_of(hostile, Listener()).encoded(hostile.jobs, Store(encoding.store_root)))
    assert f'on the caption "{caption[:100]}"' in error.value.what
    assert error.value.where == str(file)
