from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import Kandinsky5T2IPipeline
from transformers import AutoTokenizer

from demo.tiny_models import make_tiny_kandinsky5
from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

ENDS = ("to_query", "to_key", "to_value", "out_layer")
FEED_FORWARD = ("feed_forward.in_layer", "feed_forward.out_layer")
SELF = tuple(f"self_attention.{end}" for end in ENDS)
CROSS = tuple(f"cross_attention.{end}" for end in ENDS)


class Kandinsky5Case(Case):
    pipeline_class = Kandinsky5T2IPipeline
    targets: ClassVar[list[str]] = [*SELF, *CROSS, *FEED_FORWARD]

    def make(self, folder: Path) -> None:
        make_tiny_kandinsky5(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        """Load the pipeline with a tokenizer only, and add small sizes to its seven."""
        pipe = Kandinsky5T2IPipeline.from_pretrained(folder, tokenizer=None, **parts)
        pipe.register_modules(tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"))
        pipe.resolutions += [(width, height) for width in range(32, 161, 32) for height in range(32, 161, 32)]
        return pipe

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        states, pooled, ends = pipe.encode_prompt(caption)
        assert ends.tolist() == [0, states.shape[1]]
        return {
            "text_embedding": states,
            "text_mask": torch.ones(states.shape[:2]),
            "pooled_text_embedding": pooled,
        }

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the latent that the end of the pipeline converts back to the raw latent, without a shift."""
        assert pipe.vae.config.shift_factor
        return pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without padding tokens; channels are last, after the frame axis."""
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            prediction = pipe.transformer(
                noisy[index].movedim(0, -1)[None, None],
                text[None, :length],
                micro.timesteps[index : index + 1],
                micro.conditions["pooled_text_embedding"][index : index + 1],
                [torch.arange(1), torch.arange(noisy.shape[2] // 2), torch.arange(noisy.shape[3] // 2)],
                torch.arange(length),
            ).sample
            predictions.append(prediction[0].movedim(-1, 1))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        text = {f"text_transformer_blocks.0.{layer}" for layer in SELF + FEED_FORWARD}
        layers = SELF + CROSS + FEED_FORWARD
        visual = {f"visual_transformer_blocks.{block}.{layer}" for block in range(2) for layer in layers}
        return {f"lora_unet_{module.replace('.', '_')}" for module in text | visual}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(Kandinsky5Case())


@pytest.mark.parametrize(("word", "last"), [("cat", "cat"), ("astronaut", "a")])
def test_a_caption_is_cut_where_the_language_models_input_ends(word: str, last: str, tmp_path: Path) -> None:
    """With long words at the limit and a short last one, the pipeline removes more than the excess."""
    make_tiny_kandinsky5(tmp_path)
    family = load_family(tmp_path)
    encoders = family.text.load("float32", "cpu")
    token_ids: list[list[int]] = []
    encoders.text_encoder.register_forward_pre_hook(
        lambda _, __, kwargs: token_ids.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    fits = 552 - family.text.encode_caption(encoders, f"{last} {last}").num_tokens
    for extra in (1, 2, 3, 9, 40):
        caption = last + f" {word}" * (fits + extra) + f" {last}"
        encoded = family.text.encode_caption(encoders, caption)
        assert encoded.num_tokens == 552 + extra
        assert 0 < encoded.num_cut < encoded.num_tokens
        cut = encoded.cut_from
        assert cut is not None
        before, _ = encoders.prompt_template.split("{}")
        decoded_text = encoders.tokenizer.decode(token_ids[-1])
        assert decoded_text.startswith(before + caption[:cut])
        assert cut == len(caption) or decoded_text == before + caption[:cut]


def test_a_size_beyond_the_position_tables_is_an_error(tmp_path: Path) -> None:
    make_tiny_kandinsky5(tmp_path)
    assert load_family(tmp_path).latent_shape(Size(2048, 64)) == (16, 256, 8)
    with pytest.raises(BucketError, match="64x2064"):
        load_family(tmp_path).latent_shape(Size(64, 2064))
