"""Which imports of launched processes a run starts before their steps."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from pipeline.encoding.workers import WORKERS, surely_launched
from pipeline.processes.fork_server import fork_server
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.recipe.deployment import load_deployment
from pipeline.trained_lora.recipe_facts import will_train

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def imports_ahead(recipe: Recipe, assets: Collection[str]) -> AbstractContextManager[None]:
    """Return a context in which processes of these assets are forked after imports that start now.

    Nothing is imported unless the run will surely launch a process here.
    """
    deployment = load_deployment()
    starts_here = deployment.executor.import_path == "in_process" and deployment.launcher.kind == "local"
    # The launcher of several processes imports torch itself.
    if not starts_here or recipe.accelerate.num_processes != 1:
        return nullcontext()

    stages = {"vae_latents": WORKERS["latents"], "text_embeddings": WORKERS["text"]}
    launched = surely_launched(recipe)
    modules = [module for asset, module in stages.items() if asset in assets and module in launched]
    if "trained_lora" in assets and will_train(recipe):
        modules.append(TRAINING_MODULE)
    # Of the optional assets, only captions come before the training.
    is_last = not set(recipe.optional_assets) - {"captions"}
    return fork_server(modules, recipe.accelerate, last=TRAINING_MODULE if is_last else None)
