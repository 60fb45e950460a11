"""Latentline's public face: version, command line and the component of Dagster projects."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentline.component import LoraRecipe

__all__ = ["LoraRecipe", "__version__"]

__version__ = "0.3.0"


# The command line imports this package and must start without Dagster.
def __getattr__(name: str) -> object:
    if name == "LoraRecipe":
        from latentline.component import LoraRecipe

        return LoraRecipe
    raise AttributeError(f"module 'latentline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
