"""LoRA files in the layouts of diffusers, kohya and ComfyUI, and publishing them."""
