"""A model that writes hostile text, forced by its weights: nothing but the words of captions changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, Blip2ForConditionalGeneration

from demo.tiny_models.captioners import write_blip2
from pipeline.captions.export import export_captions
from pipeline.cli.caption import sample_line
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.captions import canonical
from pipeline.validated_dataset.stage import validate
from tests.pipeline.captions.conftest import Captioned, picture

PROMPT = "a photo of"

HOSTILE = {
    "markup": "<script>alert(1)</script> ![x](http://a/b.png) </table> &amp; [bold]x[/]",
    "paths": "../../../outside.txt\nC:\\x\r\nfile:///etc/passwd ~/.netrc ./a.txt",
    "controls": "NUL \x00 bell \x07 red \x1b[31m back \u202e left \u2028 end",
    "syntax": "datasets: [{path: /}]\n---\nfrom: fixed # [trigger] {a|b} __wild__ <lora:x:1> $(rm) %s",
    "fake line": "a rose\nphotos/b.png: a lily\nerror: the disk is full",
}

HARMLESS = "a red rose in a garden"


def write_forced(folder: Path, text: str) -> int:
    """Write a BLIP-2 whose weights make it write `text`, whatever it sees; return the number of tokens.

    The layers of its language model add nothing, and the embedding of each position is the direction of the
    token that follows there. The logits are products with those directions.
    """
    folder.mkdir()
    write_blip2(folder)
    processor: Any = AutoProcessor.from_pretrained(folder, backend="pil")
    model: Any = Blip2ForConditionalGeneration.from_pretrained(folder)
    end = model.generation_config.eos_token_id
    tokens = [*processor.tokenizer.encode(text, add_special_tokens=False), end]
    assert processor.tokenizer.decode(tokens[:-1]) == text
    prompt = processor(images=[picture(0)], text=[PROMPT], return_tensors="pt")["input_ids"]

    decoder = model.language_model.model.decoder
    with torch.no_grad():
        for layer in decoder.layers:
            for linear in (layer.self_attn.out_proj, layer.fc2):
                linear.weight.zero_()
                linear.bias.zero_()
        # Directions of sum 0 and length 1, which the last layer norm only scales.
        directions = torch.randn_like(decoder.embed_tokens.weight)
        directions -= directions.mean(1, keepdim=True)
        directions /= directions.norm(dim=1, keepdim=True)
        decoder.embed_tokens.weight.copy_(directions)
        model.language_model.lm_head.weight.copy_(directions)
        offset = decoder.embed_positions.offset
        for number, token in enumerate(tokens):
            position = prompt.shape[1] - 1 + number + offset
            decoder.embed_positions.weight[position] = 1e6 * directions[token]
    model.save_pretrained(folder)
    return len(tokens) - 1


def names_below(folder: Path) -> set[str]:
    """Return the names of files, without those of entries, which are hashes of their keys."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "cache" not in path.parts}


@pytest.mark.parametrize("kind", HOSTILE)
def test_C18_hostile_text_changes_nothing_but_the_words_of_captions(tmp_path: Path, kind: str) -> None:
    results: list[tuple[Any, ...]] = []
    for name, text in (("harmless", HARMLESS), ("hostile", HOSTILE[kind])):
        num_tokens = write_forced(tmp_path / f"{name}_model", text)
        (tmp_path / name).mkdir()
        captioned = Captioned(tmp_path / name, tmp_path / f"{name}_model")
        captioned.captions |= {"prompt": PROMPT, "max_tokens": 200}
        (captioned.images / "b.txt").write_text("a lily of a person", encoding="utf-8")
        images = {path: path.read_bytes() for path in captioned.images.iterdir()}

        table, report, _ = captioned.run()
        assert table["sample_id"].to_list() == ["photos/a.png", "photos/c.png"]
        assert table["caption"].to_list() == [canonical(text)] * 2
        assert (table["num_tokens"].to_list(), table["cut"].to_list()) == ([num_tokens] * 2, [False] * 2)
        assert report["unreadable"] == 0

        recipe = captioned.recipe(trigger="sks")
        tables = Tables(recipe.output_dir)
        result = validate(recipe, captioned.raw(recipe), tables, log=lambda _: None, written=table)
        assert result.table["caption"].to_list() == [
            f"sks, {canonical(text)}",
            "sks, a lily of a person",
            f"sks, {canonical(text)}",
        ]
        tables.write("validated_dataset", result.table)
        assert export_captions(recipe, captioned.folder / "exported") == 3
        exported = captioned.folder / "exported" / "photos" / "a.txt"
        assert exported.read_text(encoding="utf-8") == f"sks, {canonical(text)}\n"
        assert {path: path.read_bytes() for path in captioned.images.iterdir()} == images

        others = result.table.drop("caption", strict=True)
        columns = [each for each in others.columns if "caption" not in each]
        results.append((names_below(captioned.folder), others.select(columns).rows()))
    assert results[0] == results[1]


def test_C18_a_caption_that_is_too_long_for_an_entry_fails_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_forced(model, "banana")
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    longer = {"type": "Replace", "pattern": {"String": "n"}, "content": "n" * 600_000}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], longer]}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    captioned = Captioned(tmp_path, model)
    table, report, _ = captioned.run(prompt=PROMPT)
    assert table.is_empty()
    assert report["unreadable"] == 3
    assert "more than 1,000,000 bytes" in report["named"]["unreadable"][0]["what"]


def test_a_caption_is_one_line_on_the_terminal() -> None:
    assert sample_line("photos/a.png", HOSTILE["fake line"]).splitlines() == [
        "photos/a.png: a rose photos/b.png: a lily error: the disk is full"
    ]
