"""Text embeddings of prompts that are not in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pipeline.cache.store import Store
from pipeline.encoding.jobs import Encoding, Job, write_encoding
from pipeline.trained_lora.pictures.prepare import Request, prepare_drawing
from pipeline.trained_lora.pictures.worker.texts import prompt_texts
from pipeline.trained_lora.worker.loader import read_entry
from tests.in_process_worker import InProcessLaunch
from tests.in_process_worker import run as encode
from tests.pipeline.trained_lora.pictures.drawings import InProcessDrawing
from tests.pipeline.trained_lora.runs import run

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_prompt_outside_of_the_cache_gets_the_values_that_the_cache_would_store(
    make_project: Callable[..., Project], tmp_path: Path, dtype: str
) -> None:
    project = make_project(steps=1)
    run(project, InProcessLaunch())
    file = project.recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors"
    text = project.recipe.text.model_copy(update={"dtype": dtype, "offload": 0})
    recipe = project.recipe.model_copy(update={"text": text})

    job = prepare_drawing(recipe, Request(file=file, prompts=("a new prompt",)))
    prompt, store = job.prompts[0], Store(recipe.cache_dir)
    texts = prompt_texts(job, "cpu", InProcessDrawing(), scratch=tmp_path)
    assert not store.check(prompt.text).valid, "nothing is stored"

    encoding = Encoding(
        kind="text",
        model_folder=job.base,
        store_root=recipe.cache_dir,
        settings={"compute_dtype": recipe.text.compute_dtype, "offload": "none"},
        jobs=[Job(prompt.text, {"inputs": {}}, {"caption": prompt.caption}, "a prompt", 1)],
    )
    (tmp_path / "encoding").mkdir()
    encode(write_encoding(encoding, tmp_path / "encoding"), InProcessDrawing(), rank=0, num_ranks=1)
    stored = read_entry(store, prompt.text, "a prompt")
    drawn = texts[prompt.text.key]
    assert stored.keys() == drawn.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, drawn[name])
