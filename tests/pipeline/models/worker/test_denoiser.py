"""Attention masks, and waiting for the GPU, in the denoisers' forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from tests.tiny_models import TinyModel

MASKED = ["Qwen-Image", "Krea 2", "Bria FIBO"]
WITHOUT_WAITING = [*MASKED, "Kandinsky 5 (image)", "Ideogram 4", "Z-Image"]

Loaded = tuple[WorkerFamily, nn.Module]


@pytest.fixture(scope="module")
def loaded(tiny_model: TinyModel) -> Callable[[str], Loaded]:
    """Return a function that loads the denoiser of a kind of tiny model once."""
    models: dict[str, Loaded] = {}

    def load(kind: str) -> Loaded:
        if kind not in models:
            family = load_family(tiny_model(kind))
            models[kind] = family, family.denoiser.load("float32", "cpu")
        return models[kind]

    return load


def predict(model: Loaded, lengths: list[int], **more: Any) -> Tensor:
    """Call the denoiser with a batch of captions of these lengths, and with more conditions."""
    family, denoiser = model
    shapes = family.text_shapes()
    texts = [
        {
            name: torch.randn(length, *shape[1:]) if name == "text_embedding" else torch.randn(shape)
            for name, shape in shapes.items()
        }
        for length in lengths
    ]
    noisy = torch.randn(len(lengths), *family.latent_shape(Size(64, 64)))
    conditions = family.text.stack(texts) | more
    with torch.no_grad():
        return family.denoiser.predict(denoiser, noisy, torch.full((len(lengths),), 500.0), conditions)


class AttentionMasks(TorchFunctionMode):
    """Record whether attention gets a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
            self.given.append(mask is not None)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("lengths", [[5], [7, 7]], ids=["batch 1", "equal lengths"])
def test_no_mask_reaches_attention_if_no_caption_is_padded(
    loaded: Callable[[str], Loaded], kind: str, lengths: list[int]
) -> None:
    with AttentionMasks() as masks:
        predict(loaded(kind), lengths)
    assert masks.given
    assert not any(masks.given)


@pytest.mark.parametrize("kind", MASKED)
def test_a_mask_hides_the_padding_of_shorter_captions(loaded: Callable[[str], Loaded], kind: str) -> None:
    with AttentionMasks() as masks:
        predict(loaded(kind), [5, 7])
    assert True in masks.given


WAITING = (
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.nonzero,
    torch.nonzero,
    torch.masked_select,
    Tensor.cpu,
)
"""Calls for which the host waits for the GPU, besides indexing by booleans."""


class NeverWaiting(TorchFunctionMode):
    """Raise for calls that would make the host wait for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_booleans = (
            func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        )
        if func in WAITING or by_booleans:
            raise AssertionError(f"{func.__name__} waits for the GPU")
        return func(*args, **(kwargs or {}))


def test_the_imitation_notices_each_way_of_waiting() -> None:
    value = torch.ones(1)
    ways: list[Callable[[], object]] = [
        value.item,
        value.tolist,
        lambda: bool(value),
        lambda: int(value),
        lambda: value[value.bool()],
        lambda: torch.nonzero(value),
    ]
    for way in ways:
        with pytest.raises(AssertionError, match="waits for the GPU"), NeverWaiting():
            way()


@pytest.mark.parametrize("kind", WITHOUT_WAITING)
@pytest.mark.parametrize("lengths", [[5], [7, 7], [5, 7]], ids=["batch 1", "equal", "padded"])
def test_the_host_never_waits_for_the_gpu_inside_a_forward_pass(
    loaded: Callable[[str], Loaded], kind: str, lengths: list[int]
) -> None:
    model = loaded(kind)
    predict(model, lengths)  # tables of positions are computed once
    with NeverWaiting():
        assert predict(model, lengths).shape[0] == len(lengths)


# CPU autocast leaves the weights of norms in float32, which torch reports once per process.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("kind", WITHOUT_WAITING)
def test_timesteps_reach_the_denoiser_in_float32(loaded: Callable[[str], Loaded], kind: str) -> None:
    """Half precision would round them before they are embedded."""
    family, denoiser = loaded(kind)
    parameters = inspect.signature(denoiser.forward).parameters
    (name,) = {"timestep", "timesteps", "t"} & set(parameters)
    dtypes: list[torch.dtype] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        position = list(parameters).index(name)
        value = kwargs[name] if name in kwargs else args[position]
        dtypes.append(value.dtype)

    hook = denoiser.register_forward_pre_hook(record, with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        predict((family, denoiser), [5])
    hook.remove()
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("kind", ["FLUX.1 dev", "FLUX.1 Kontext", "FLUX.2 dev"])
def test_a_denoiser_with_distilled_guidance_gets_the_scale_of_the_conditions(
    loaded: Callable[[str], Loaded], kind: str
) -> None:
    model = loaded(kind)
    given: list[Tensor] = []
    hook = model[1].register_forward_pre_hook(
        lambda _module, _arguments, named: given.append(named["guidance"]), with_kwargs=True
    )
    predictions = []
    for more in ({}, {"guidance": 1.0}, {"guidance": 3.5}):
        torch.manual_seed(1)
        predictions.append(predict(model, [6, 6], **more))
    hook.remove()
    assert [each.tolist() for each in given] == [[1.0, 1.0], [1.0, 1.0], [3.5, 3.5]]
    assert torch.equal(predictions[0], predictions[1])
    assert not torch.allclose(predictions[0], predictions[2])
