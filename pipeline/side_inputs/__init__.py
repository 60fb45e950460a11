"""Side inputs: files that belong to images, such as masks and reference images.

The stages iterate over `SIDE_INPUTS`. Each description says in one place how its files are read and checked,
which columns of the tables record them, where their pixels are placed, and which cache entries they need.

| | mask | reference |
|---|---|---|
| files of an image | one | one for each entry of `references`, in order |
| file | a separate file, or the image for its opacity | a separate file |
| size | the size of the image | any size |
| placed by | the geometry of the image | the rules of the family's pipeline |
| entry | weights per latent value, without a model | a latent: the mean of the VAE's posterior |
| columns | one value per column | JSON, since an image may have several |
| in training | weights of the loss by place | a condition of the denoiser |
"""

from pipeline.side_inputs.masks import MASKS
from pipeline.side_inputs.references import REFERENCES
from pipeline.side_inputs.side_input import SideInput

SIDE_INPUTS: tuple[SideInput, ...] = (MASKS, REFERENCES)
"""All side inputs. The first one that cannot be used gives the reason of a rejected sample."""

__all__ = ["MASKS", "REFERENCES", "SIDE_INPUTS", "SideInput"]
