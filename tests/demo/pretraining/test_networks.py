"""The base model's tokenizer and networks: small enough for the repository, and able to spell any word."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.pretraining.networks import (
    MAX_TOKENS,
    new_text_encoder,
    new_unet,
    new_vae,
    write_tokenizer,
)
from demo.world import CONCEPT, SHAPES, scenes

MAX_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def test_known_words_are_one_token_and_the_concept_is_spelled(folder: Path) -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(folder)
    for scene in scenes(*SHAPES):
        assert len(tokenizer.tokenize(scene.caption)) == 7
    assert len(tokenizer.tokenize(CONCEPT)) > 1
    text = "Ünicode? 42 words & more"
    assert tokenizer.unk_token not in tokenizer.tokenize(text)
    assert len(tokenizer(text, padding="max_length")["input_ids"]) == MAX_TOKENS


def test_the_tokenizer_is_reproducible(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for file in folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_the_weights_in_float16_fit_in_8_mib(folder: Path) -> None:
    from transformers import CLIPTokenizer

    networks = (new_vae(), new_unet(), new_text_encoder(CLIPTokenizer.from_pretrained(folder)))
    parameters = sum(each.numel() for network in networks for each in network.parameters())
    assert 2 * parameters < 0.95 * MAX_BYTES
