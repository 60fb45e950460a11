from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np

from pipeline.trained_lora.export.lora_files import LoraModule, factors

QUERY = LoraModule(
    name="block.to_q",
    diffusers="transformer.block.to_q",
    kohya="lora_unet_block_qkv",
    comfyui="transformer.block.to_q",
    in_features=5,
    out_features=6,
    rank=2,
    alpha=4.0,
    kohya_part=1,
    kohya_outs=(3, 6, 4),
)


def test_a_part_of_a_fused_layer_is_a_diagonal_block_of_its_matrices() -> None:
    assert QUERY.shapes("kohya") == {
        "lora_unet_block_qkv.lora_down.weight": (6, 5),
        "lora_unet_block_qkv.lora_up.weight": (13, 6),
        "lora_unet_block_qkv.alpha": (),
    }
    down, up = np.arange(30).reshape(6, 5), np.arange(78).reshape(13, 6)
    tensors = {"lora_unet_block_qkv.lora_down.weight": down, "lora_unet_block_qkv.lora_up.weight": up}
    part_down, part_up = factors(tensors, QUERY, "kohya")
    assert np.array_equal(part_down, down[2:4])
    assert np.array_equal(part_up, up[3:9, 2:4])


def test_only_kohya_stacks_parts_and_a_separate_layer_is_stored_unchanged() -> None:
    for layout in ("diffusers", "comfyui"):
        shapes = list(QUERY.shapes(layout).values())
        assert shapes[:2] == [(2, 5), (6, 2)]
    separate = replace(QUERY, kohya_part=0, kohya_outs=())
    assert list(separate.shapes("kohya").values()) == [(2, 5), (6, 2), ()]


def test_parts_of_different_ranks_follow_each_other() -> None:
    query = replace(QUERY, kohya_ranks=(1, 2, 0))
    assert query.shapes("kohya")["lora_unet_block_qkv.lora_up.weight"] == (13, 3)
    assert query.slices("kohya") == (slice(1, 3), slice(3, 9))
    assert query.slices("comfyui") == (slice(0, 2), slice(0, 6))


def test_a_module_survives_a_json_round_trip() -> None:
    assert LoraModule.from_json(json.loads(json.dumps(asdict(QUERY)))) == QUERY
    mixed = replace(QUERY, kohya_ranks=(1, 2, 0))
    assert LoraModule.from_json(json.loads(json.dumps(asdict(mixed)))) == mixed

    # Release 0.2.0 did not write this key.
    old = {name: value for name, value in asdict(QUERY).items() if name != "kohya_ranks"}
    assert LoraModule.from_json(old) == QUERY
