"""The bare steps that training is compared with update the adapter."""

from itertools import pairwise
from pathlib import Path

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig

from bench.figures.training import bare_steps
from pipeline.trained_lora.worker.adapter.lora import adapter_state, trainable_weights
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.tensor_differences import differing_tensors


def test_each_bare_step_changes_the_adapter_and_not_the_base_model(tiny_sd: Path) -> None:
    torch.manual_seed(0)
    unet = UNet2DConditionModel.from_pretrained(tiny_sd / "unet")
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]))
    frozen = {name: w.clone() for name, w in unet.named_parameters() if not w.requires_grad}
    optimizer = torch.optim.AdamW(trainable_weights(unet), lr=1e-2)
    scheduler = DDPMScheduler.from_pretrained(tiny_sd / "scheduler")
    states = [adapter_state(unet)]
    for batch in (batch_for(unet), batch_for(unet)):
        bare_steps(unet, optimizer, scheduler, [batch])
        states.append(adapter_state(unet))
    for before, after in pairwise(states):
        assert differing_tensors(after, before) != [], "a step must change the adapter"
    weights = dict(unet.named_parameters())
    assert differing_tensors({name: weights[name] for name in frozen}, frozen) == []
    assert all(weight.grad is None for weight in trainable_weights(unet)), (
        "each step starts with cleared gradients"
    )


def batch_for(unet: UNet2DConditionModel) -> MicroInput:
    shape = (2, unet.config["in_channels"], 8, 8)
    noise = torch.randn(shape)
    return MicroInput(
        variant_ids=("a", "b"),
        indices=torch.arange(2),
        latent=torch.randn(shape),
        noise=noise,
        input_noise=noise,
        timesteps=torch.tensor([10, 500]),
        conditions={"text_embedding": torch.randn(2, 77, unet.config["cross_attention_dim"])},
        weights=torch.ones(2),
        loss_weights=torch.ones(2),
    )
