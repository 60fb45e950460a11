"""Writing the trained adapter in the layouts of diffusers, kohya and ComfyUI, and reading each file back."""
