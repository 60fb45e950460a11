"""Captions that are encoded one by one: those already present, the facts of each, and a slow one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import T5Config, T5EncoderModel

from demo.tiny_models import make_tiny_ernie_image
from demo.tiny_models.parts import write_json
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.encoding.jobs import Encoded, Encoding, Job
from pipeline.encoding.progress import Progress
from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import read_json
from pipeline.models.worker.family import load_family
from pipeline.models.worker.offload import streamed_blocks
from pipeline.models.worker.offload.host_store import CpuStore
from pipeline.models.worker.text_layers import CAPTIONS_IN_STEP
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


def test_captions_share_the_copies_of_streamed_layers(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of layers per caption: 1 per layer, and a quarter of it in step."""
    copies = 0
    fetch = CpuStore.fetch

    def counted(store: CpuStore, block: int, slot: int) -> None:
        nonlocal copies
        copies += 1
        fetch(store, block, slot)

    monkeypatch.setattr(CpuStore, "fetch", counted)
    monkeypatch.setattr(streamed_blocks, "NUM_SLOTS", 1)
    job = encoding.jobs[0]
    texts = [f"{text} {number}" for number in range(4) for text in CAPTIONS]
    jobs = [replace(job, work={"caption": text}, name=text) for text in texts]
    tensors: dict[str, list[dict[str, np.ndarray]]] = {}
    for offload in ("none", 0):
        own = replace(encoding, settings={**encoding.settings, "offload": offload}, jobs=jobs)
        encoder = encoder_of(own, Listener())
        copies = 0
        outcomes = encoder.encoded(own.jobs, Store(own.store_root))
        tensors[str(offload)] = [each.tensors for _, each in outcomes if isinstance(each, Encoded)]
    num_layers = 2
    assert copies <= len(texts) // CAPTIONS_IN_STEP * num_layers
    assert len(tensors["0"]) == len(tensors["none"]) == len(texts)
    for one, other in zip(tensors["0"], tensors["none"], strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


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


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(torch.float32, 0.0, 1e-5), (torch.bfloat16, 1e-3, 0.05)]
)
def test_a_padded_batch_changes_an_embedding_as_much_as_bfloat16_rounds_it(
    dtype: torch.dtype, least: float, most: float
) -> None:
    """The reason for one caption per pass; errors are relative to the standard deviation."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=1000, d_model=512, d_ff=1024, d_kv=64, num_heads=8, num_layers=4)
    encoder: Any = T5EncoderModel(config).eval()
    encoder = encoder.to(dtype)
    short, long = torch.randint(1000, (1, 7)), torch.randint(1000, (1, 61))
    mask = torch.ones_like(long).repeat(2, 1)
    mask[0, short.shape[1] :] = 0
    with torch.inference_mode():
        alone = encoder(input_ids=short).last_hidden_state[0].float()
        exact = copy.deepcopy(encoder).float()(input_ids=short).last_hidden_state[0]
        ids = torch.cat([functional.pad(short, (0, long.shape[1] - short.shape[1])), long])
        batch = encoder(input_ids=ids, attention_mask=mask).last_hidden_state[0, : short.shape[1]].float()

    def error(embedding: Tensor) -> float:
        return float((embedding - alone).square().mean().sqrt() / alone.std())

    assert least <= error(batch) <= most
    assert error(batch) == pytest.approx(error(exact), rel=1.0, abs=1e-5)
