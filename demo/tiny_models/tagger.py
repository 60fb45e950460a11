"""A tiny tagger with random weights in the format of the WD14 family: a ViT as model.onnx with its tags."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.storage.atomic import write_text

EDGE = 32
"""Edge of the square input in pixels."""

TAGS = (
    *(("general", 9), ("sensitive", 9), ("explicit", 9)),
    *(("1girl", 0), ("long_hair", 0), ("red_flower", 0), ("outdoors", 0), ("^_^", 0), ("no_humans", 0)),
    *(("hatsune_miku", 4), ("rose_(garden)", 4), ("some_hero", 4)),
)
"""Name and category of each tag, in the order of the outputs."""


class TinyTagger(nn.Module):
    """A ViT whose inputs and outputs are those of the published files: (B, E, E, 3) in BGR to (B, T)."""

    def __init__(self, seed: int = 0) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        torch.manual_seed(seed)
        config: Any = ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=EDGE,
            patch_size=8,
            num_labels=len(TAGS),  # pyright: ignore[reportCallIssue] - of the base class
            # The exporter of torch has no rule for the fused attention.
            attn_implementation="eager",  # pyright: ignore[reportCallIssue] - of the base class
        )
        self.vit = ViTForImageClassification(config).eval()
        # Initial weights are so small that every tag has the probability 0.5.
        for parameter in self.vit.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(6)

    def forward(self, images: Tensor) -> Tensor:
        """Return the probability of each tag; values of the images are from 0 to 255."""
        pixels = images.permute(0, 3, 1, 2) / 127.5 - 1
        return torch.sigmoid(self.vit(pixel_values=pixels).logits)


def write_tagger(folder: Path, *, seed: int = 0) -> None:
    """Write model.onnx and selected_tags.csv."""
    image = torch.zeros(1, EDGE, EDGE, 3)
    with warnings.catch_warnings():
        # The exporter without further packages is the older one, which warns of its age.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            TinyTagger(seed).eval(),
            (image,),
            str(folder / "model.onnx"),
            dynamo=False,
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": {0: "batch_size"}, "output": {0: "batch_size"}},
            opset_version=17,
        )
    lines = (f"{number},{name},{category},{1000 - number}" for number, (name, category) in enumerate(TAGS))
    write_text(folder / "selected_tags.csv", "\n".join(("tag_id,name,category,count", *lines, "")))
