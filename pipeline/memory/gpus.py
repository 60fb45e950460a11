"""Time that counted work takes on a GPU, from its specifications and assumed shares of its peak.

A time is the longer one of

    GPU    operations / (share * peak) of products and of attention, and bytes / (share * bandwidth)
    CPU    kernels * time to start one

docs/hardware.md compares these times with measured and published ones.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNEL_S = 41e-6
"""Time in which the CPU starts a kernel of eager PyTorch with peft and autocast.

The H100 in `bench/results` took 31 to 44 us. The published times of SDXL and Stable Diffusion 1.5 are 44 to
53 us per counted kernel, and those of Qwen-Image and Krea 2 34 to 39 us.
"""

BANDWIDTH_SHARE = 0.9
"""Share of the memory bandwidth that elementwise kernels reach. An assumption."""

FLOAT32_SHARE = 0.5
"""Peak of TF32 products relative to bf16, on all GPUs of the table."""

LOWEST, HIGHEST = 0.58, 1.31
"""Measured and published times relative to computed ones: range of the comparison in docs/hardware.md."""


@dataclass(frozen=True)
class Work:
    """What a step, or a forward pass, does.

    Attributes:
        kernels: Number of kernels, without fused attention and RMS norms.
        product_flops: Operations of matrix products and convolutions.
        attention_flops: Operations of fused attention.
        moved_bytes: Bytes that all other kernels read and write.
        cast_bytes: Part of `moved_bytes` in copies between dtypes.
    """

    kernels: int
    product_flops: int
    attention_flops: int
    moved_bytes: int
    cast_bytes: int


@dataclass(frozen=True)
class Gpu:
    """A GPU, by NVIDIA's specifications, and the shares of its peak that PyTorch reaches.

    Attributes:
        name: Name.
        device_name: Name by which torch lists it. Variants with other clocks and memory have other names.
        gigabytes: Memory in GB.
        peak_flops: Matrix products in bf16 with float32 sums, without sparsity, in operations per second.
        bandwidth: Memory bandwidth in bytes per second.
        product_share: Share of the peak in matrix products and convolutions.
        attention_share: Share of the peak in FlashAttention's forward and backward passes.
    """

    name: str
    device_name: str
    gigabytes: int
    peak_flops: float
    bandwidth: float
    product_share: float = 0.5
    attention_share: float = 0.5

    def seconds(self, work: Work, *, float32: bool = False) -> float:
        """Return the computed time of work in bf16, or in TF32."""
        return max(self.computing_s(work, float32=float32), work.kernels * KERNEL_S)

    def computing_s(self, work: Work, *, float32: bool = False) -> float:
        """Return the computed time of work if the GPU never waits for a kernel's start."""
        peak_flops = self.peak_flops * (FLOAT32_SHARE if float32 else 1)
        gpu_s = work.product_flops / (self.product_share * peak_flops)
        gpu_s += work.attention_flops / (self.attention_share * peak_flops)
        return gpu_s + work.moved_bytes / (BANDWIDTH_SHARE * self.bandwidth)


H100 = Gpu("H100", "NVIDIA H100 80GB HBM3", 80, 989.4e12, 3350e9, product_share=0.8, attention_share=0.26)
"""Shares as measured on an H100: 792 TFLOPS in products, and FlashAttention's 3.5 ms per layer of FLUX.1."""

GPUS = (
    Gpu("RTX 3090", "NVIDIA GeForce RTX 3090", 24, 71e12, 936e9),
    Gpu("RTX 4090", "NVIDIA GeForce RTX 4090", 24, 165.2e12, 1008e9),
    Gpu("L40S", "NVIDIA L40S", 48, 362e12, 864e9),
    H100,
)
"""GPUs for which times are computed."""


def gpu_named(name: str | None) -> Gpu | None:
    """Return the GPU with this name, or with this name in torch; None if its specifications are not here."""
    return next((gpu for gpu in GPUS if name in (gpu.name, gpu.device_name)), None)
