from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.tiny_models import TINY
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.worker.tensors import read_torch
from pipeline.errors import LaunchError, ModelError, StoreError
from pipeline.models.worker.family import load_family
from pipeline.models.worker.text import TextConditioner
from pipeline.reporting.reports import StageResult
from pipeline.text_embeddings.stage import cache_text, needed_captions
from pipeline.text_embeddings.worker import encoder
from tests.pipeline.cache.forged_entries import forge

DEVICES = ("cpu", "cuda:0")


def cached(cache, launch) -> StageResult:
    result = cache_text(cache.recipe, cache.captions(), cache.tables, launch=launch, log=lambda _: None)
    return cache.keep("text_embeddings", result)


def counts(result: StageResult) -> dict[str, int]:
    return {name: result.report[name] for name in ("encoded", "reused", "removed", "failed")}


def set_caption(cache, name: str, caption: str) -> None:
    (cache.photos / f"{name}.txt").write_text(caption, encoding="utf-8")


def test_embeddings_equal_those_of_encode_prompt_in_diffusers(cache, in_process_launch, tiny_sd) -> None:
    from diffusers import StableDiffusionPipeline

    cache = cache.with_settings(text={"dtype": "float32"})
    set_caption(cache, "cat", "a cat, " * 60 + "the end")
    cached(cache, in_process_launch)
    pipe = StableDiffusionPipeline.from_pretrained(tiny_sd)
    entries = RecipeEntries(cache.recipe)
    for caption in ["", *cache.captions()["caption"]]:
        expected, _ = pipe.encode_prompt(caption, "cpu", 1, do_classifier_free_guidance=False)
        stored = read_torch(entries.store, entries.text_spec(caption))["text_embedding"]
        assert stored.shape == (77, 32)
        torch.testing.assert_close(stored, expected[0], rtol=0, atol=1e-6)


def test_captions_encoded_together_as_on_a_gpu_equal_those_encoded_alone(
    cache, in_process_launch, monkeypatch
) -> None:
    """Five captions and the empty one in passes of four; one caption is longer than the encoder's limit."""
    cache = cache.with_settings(text={"dtype": "float32"})
    set_caption(cache, "cat", "a cat, " * 60 + "the end")
    alone = cached(cache, in_process_launch)
    entries = RecipeEntries(cache.recipe)
    specs = [entries.text_spec(caption) for caption in ["", *cache.captions()["caption"]]]
    expected = [read_torch(entries.store, spec)["text_embedding"] for spec in specs]

    shutil.rmtree(cache.recipe.cache_dir / "text")
    passes: list[int] = []
    encode = TextConditioner.encode_captions

    def counted(self, encoders, captions):
        passes.append(len(captions))
        return encode(self, encoders, captions)

    monkeypatch.setattr(encoder, "captions_per_pass", lambda family, device: 4)
    monkeypatch.setattr(TextConditioner, "encode_captions", counted)
    together = cached(cache, in_process_launch)
    assert passes == [4, 2]
    assert counts(together) == counts(alone)
    assert together.table.select("num_tokens", "num_cut").equals(alone.table.select("num_tokens", "num_cut"))
    for spec, embedding in zip(specs, expected, strict=True):
        actual = read_torch(entries.store, spec)["text_embedding"]
        torch.testing.assert_close(actual, embedding, rtol=0, atol=1e-5)


# diffusers imports Kolors with a function of torch that is deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_only_clip_on_a_gpu_encodes_several_captions_at_once(tmp_path, tiny_sd) -> None:
    TINY["Kolors"](tmp_path / "kolors")
    clip, other = load_family(tiny_sd), load_family(tmp_path / "kolors")
    numbers = [encoder.captions_per_pass(family, device) for family in (clip, other) for device in DEVICES]
    assert numbers == [1, encoder.GPU_BATCH, 1, 1]


def test_embeddings_equal_the_encoders_output_for_hand_written_token_ids(
    cache, in_process_launch, tiny_sd
) -> None:
    """The ids are the start token, the words of the caption and end tokens up to 77."""
    from transformers import CLIPTextModel

    cache = cache.with_settings(text={"dtype": "float32"})
    set_caption(cache, "cat", "a photo")
    cached(cache, in_process_launch)
    ids = json.loads((tiny_sd / "tokenizer" / "vocab.json").read_text(encoding="utf-8"))
    tokens = ["<|startoftext|>", "a</w>", "photo</w>"]
    tokens += ["<|endoftext|>"] * (77 - len(tokens))
    encoder = CLIPTextModel.from_pretrained(tiny_sd / "text_encoder")
    with torch.no_grad():
        expected = encoder(torch.tensor([[ids[token] for token in tokens]])).last_hidden_state[0]
    entries = RecipeEntries(cache.recipe)
    stored = read_torch(entries.store, entries.text_spec("a photo"))["text_embedding"]
    torch.testing.assert_close(stored, expected, rtol=0, atol=1e-6)


def test_T02_T03_each_distinct_caption_the_empty_caption_and_the_sample_prompts_are_encoded_once(
    cache, in_process_launch
) -> None:
    cache = cache.with_settings(
        training={"sample_prompts": ["a moon", {"prompt": "a moon", "negative_prompt": "a sun"}]}
    )
    set_caption(cache, "cat", (cache.photos / "rocket.txt").read_text(encoding="utf-8"))
    result = cached(cache, in_process_launch)
    assert counts(result) == {"encoded": 7, "reused": 0, "removed": 0, "failed": 0}
    assert result.report["samples"] == 5
    entries = RecipeEntries(cache.recipe)
    for caption in ("", "a moon", "a sun"):
        assert entries.store.check(entries.text_spec(caption)).valid


def test_T03_a_thousand_samples_with_five_captions_need_six_entries_of_the_predicted_size(
    cache, in_process_launch
) -> None:
    rows = pl.concat(
        cache.captions().with_columns(pl.col("sample_id") + f"-{copy:03}") for copy in range(200)
    )
    result = cache_text(cache.recipe, rows, cache.tables, launch=in_process_launch, log=lambda _: None)
    assert len(result.table) == 1000
    assert result.table["key"].n_unique() == 5
    files = list(cache.recipe.cache_dir.rglob("*.safetensors"))
    predicted_bytes = RecipeEntries(cache.recipe).text_requests(
        needed_captions(cache.recipe, rows["caption"])
    )["num_bytes"]
    assert len(files) == len(predicted_bytes) == 6
    assert sum(file.stat().st_size for file in files) == predicted_bytes.sum() == result.report["bytes"]


def test_a_second_run_encodes_nothing_and_editing_a_caption_encodes_one_entry(
    cache, in_process_launch, forbidden_launch
) -> None:
    cached(cache, in_process_launch)
    second = cached(cache, forbidden_launch)
    assert counts(second) == {"encoded": 0, "reused": 6, "removed": 0, "failed": 0}
    set_caption(cache, "cat", "another cat")
    assert counts(cached(cache, in_process_launch)) == {"encoded": 1, "reused": 5, "removed": 1, "failed": 0}


def test_the_needed_captions_do_not_depend_on_row_order(cache) -> None:
    captions = cache.captions()["caption"].to_list()
    needed = needed_captions(cache.recipe, captions).to_list()
    assert needed == sorted({*captions, ""})
    assert needed == needed_captions(cache.recipe, captions[::-1]).to_list()


def test_C05_tokens_are_counted_and_the_truncated_part_is_exact_to_the_character(
    cache, in_process_launch
) -> None:
    caption = "Ünïcode 日本 " + "the cat " * 80
    set_caption(cache, "cat", caption)
    result = cached(cache, in_process_launch)
    rows = {row["sample_id"]: row for row in result.table.to_dicts()}
    row = rows["photos/cat.png"]
    entries = RecipeEntries(cache.recipe)
    metadata = entries.store.check(entries.text_spec(row["caption"])).metadata
    assert metadata is not None
    kept, tail = row["caption"][: metadata["cut_from"]], row["caption"][metadata["cut_from"] :]
    assert row["num_tokens"] - 77 == row["num_cut"] > 0
    assert result.report["captions_cut"] == 1
    assert tail.startswith(("the", "cat"))
    cache.recipe.output_dir.mkdir(exist_ok=True)
    set_caption(cache, "rocket", kept.strip())
    rows = {row["sample_id"]: row for row in cached(cache, in_process_launch).table.to_dicts()}
    assert (rows["photos/rocket.png"]["num_tokens"], rows["photos/rocket.png"]["num_cut"]) == (77, 0)
    names = ("photos/cat.png", "photos/rocket.png")
    same = [entries.store.read(entries.text_spec(rows[name]["caption"]))["text_embedding"] for name in names]
    assert np.array_equal(*same)


def test_token_counts_are_the_same_for_trusted_entries_and_after_the_table_is_lost(
    cache, in_process_launch, forbidden_launch
) -> None:
    first = cached(cache, in_process_launch).table
    assert cached(cache, forbidden_launch).table.equals(first)
    cache.tables.path("text_embeddings").unlink()
    assert cached(cache, forbidden_launch).table.equals(first)


@pytest.mark.parametrize(
    "changes",
    [{"num_tokens": ...}, {"num_cut": None}, {"num_cut": "3"}, {"num_tokens": 2**40}, {"num_cut": [1]}],
    ids=str,
)
def test_the_fix_of_an_entry_with_metadata_of_somebody_else_works(
    cache, in_process_launch, forbidden_launch, changes
) -> None:
    """Whoever may write a shared cache may write an entry with a valid checksum."""
    first = cached(cache, in_process_launch).table
    entries = RecipeEntries(cache.recipe)
    path = entries.store.path(entries.text_spec(first["caption"][0]))
    forge(path, **changes)
    with pytest.raises(StoreError, match="metadata that Latentline does not write") as raised:
        cached(cache, forbidden_launch)
    assert raised.value.where == str(path)
    assert raised.value.fix.startswith("delete the file and start the job again")
    Path(raised.value.where).unlink()
    again = cached(cache, in_process_launch)
    assert again.report["encoded"] == 1
    assert again.table["num_tokens"].equals(first["num_tokens"])


def test_a_very_long_caption_still_fits_an_entrys_header(cache, in_process_launch) -> None:
    set_caption(cache, "cat", "日" * 20_000)
    assert cached(cache, in_process_launch).report["failed"] == 0


def with_scaled_output(cache, folder: Path, factor: float):
    """Return the cache with a base model whose text encoder multiplies its output by a factor."""
    shutil.copytree(cache.recipe.model.base, folder)
    file = folder / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if ".final_layer_norm." in f".{name}"]:
        weights[name] = weights[name] * factor
    save_file(weights, file, {"format": "pt"})
    return cache.with_settings(model={"base": str(folder)}, text={"dtype": "float32"})


def test_a_text_encoder_that_returns_nan_is_an_error_that_names_the_model(
    cache, in_process_launch, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    with pytest.raises(ModelError, match="not finite") as excinfo:
        cached(with_scaled_output(cache, folder, float("nan")), in_process_launch)
    assert str(folder) in str(excinfo.value)


def test_captions_that_overflow_in_half_precision_and_no_others_are_encoded_again_in_float32(
    cache, in_process_launch, tmp_path: Path
) -> None:
    embeddings: dict[tuple[float, str], list[torch.Tensor]] = {}
    for factor in (1.0, 1e6):
        scaled = with_scaled_output(cache, tmp_path / f"times {factor:g}", factor)
        for dtype in ("float32", "float16"):
            computed = scaled.with_settings(text={"dtype": "float32", "compute_dtype": dtype})
            in_process_launch.lines.clear()
            cached(computed, in_process_launch)
            entries = RecipeEntries(computed.recipe)
            embeddings[factor, dtype] = [
                read_torch(entries.store, entries.text_spec(caption))["text_embedding"]
                for caption in cache.captions()["caption"]
            ]
            again = [line for line in in_process_launch.lines if "encoding again in float32" in line]
            assert len(again) == (6 if (factor, dtype) == (1e6, "float16") else 0), (factor, dtype, again)

    assert max(each.abs().max() for each in embeddings[1e6, "float32"]) > 65504, "beyond float16"
    for exact, repeated in zip(embeddings[1e6, "float32"], embeddings[1e6, "float16"], strict=True):
        assert torch.equal(exact, repeated)
    for exact, half in zip(embeddings[1.0, "float32"], embeddings[1.0, "float16"], strict=True):
        assert not torch.equal(exact, half), "values within the range of float16 are not encoded again"


def test_entries_do_not_depend_on_whether_layers_are_streamed(
    cache, in_process_launch, tmp_path: Path
) -> None:
    written: dict[str | int, dict[str, bytes]] = {}
    for offload in ("none", 0):
        folder = tmp_path / f"cache {offload}"
        separate = cache.with_settings(cache_dir=str(folder), text={"offload": offload})
        cached(separate, in_process_launch)
        written[offload] = {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}
    assert len(written["none"]) == 6
    assert written[0] == written["none"]
    (line,) = [line for line in in_process_launch.lines if "text.offload" in line]
    assert "text.offload: 0 streams 2 of 2 layers of text_encoder" in line


@pytest.mark.parametrize(
    ("offload", "advises"), [("auto", True), ("none", True), (1, True), (0, False)], ids=str
)
def test_an_out_of_memory_error_of_the_text_encoders_suggests_a_smaller_dtype_and_to_stream_all_layers(
    cache, in_process_launch, monkeypatch: pytest.MonkeyPatch, offload: str | int, advises: bool
) -> None:
    """Each caption allocates more memory than any machine has, so the allocator raises the error."""
    needs = "pipeline.models.worker.text.TextConditioner.encode_caption"
    monkeypatch.setattr(needs, lambda *_: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(LaunchError, match="memory ran out with the text encoders in float32") as excinfo:
        cached(cache.with_settings(text={"offload": offload}), in_process_launch)
    assert "text.compute_dtype: bfloat16" in excinfo.value.fix
    assert "on cpu" in excinfo.value.where
    assert ("set text.offload: 0" in excinfo.value.fix) == advises


def test_rows_are_joined_by_sample_id_and_not_by_position(cache, in_process_launch) -> None:
    cached(cache, in_process_launch)
    shuffled = cache.captions().sample(fraction=1.0, shuffle=True, seed=3)
    result = cache_text(cache.recipe, shuffled, cache.tables, launch=in_process_launch, log=lambda _: None)
    entries = RecipeEntries(cache.recipe)
    captions = dict(cache.captions().select("sample_id", "caption").iter_rows())
    assert [entries.text_spec(captions[name]).key for name in result.table["sample_id"]] == result.table[
        "key"
    ].to_list()
    assert result.table["sample_id"].is_sorted()
    assert isinstance(result.rejected, pl.DataFrame)


def test_entries_stay_valid_when_captions_get_more_suffixes_and_a_fallback(job, forbidden_launch) -> None:
    before = job.tables.read("text_embeddings")
    photos = job.recipe.datasets[0].path
    (photos / "cat.txt").rename(photos / "cat.caption")
    captions = {"suffix": [".txt", ".caption"], "fallback": "a photograph"}
    dataset = {"name": "photos", "path": str(photos), "captions": captions}
    job.recipe, job.launch = job.changed(datasets=[dataset]), forbidden_launch
    job.run()
    assert job.tables.read("text_embeddings")["key"].to_list() == before["key"].to_list()
