"""A finished run with its published files, written without training."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pipeline.recipe import recipe_from_mapping
from pipeline.recipe.check_specs import SPECS
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.export.lora_files import ADAPTER_METADATA_KEY, LAYOUTS, LoraModule, layout_file
from pipeline.trained_lora.run_folder import RunLayout, run_folder

MODULES = [
    LoraModule(
        name=f"{name}.to_q",
        diffusers=f"unet.{name}.to_q",
        kohya=f"lora_unet_{name}_to_q",
        comfyui=f"diffusion_model.{name}.to_q",
        in_features=6,
        out_features=5,
        rank=4,
        alpha=2.0,
    )
    for name in ("left", "right")
]
"""Two linear layers of the rank and alpha that the recipe requests."""

Tensors = dict[str, np.ndarray[Any, Any]]


class PublishedRun:
    """A finished run of 3 steps, its published files, and the findings of trained_lora's checks on them."""

    def __init__(
        self, folder: Path, *, lora: dict[str, Any] | None = None, modules: Sequence[LoraModule] = MODULES
    ) -> None:
        self.modules = modules
        values = {
            "datasets": [{"name": "photos", "path": folder / "photos"}],
            "cache_dir": folder / "cache",
            "output_dir": folder / "output",
            "model": {"base": "models/tiny"},
            "training": {"steps": 3, "lora": {"rank": 4, "alpha": 2.0, **(lora or {})}},
        }
        self.recipe = recipe_from_mapping("demo", values)
        self.lora = self.recipe.output_dir / "lora"
        self.layout = RunLayout(run_folder(self.recipe.output_dir, "abc"))
        self.lora.mkdir(parents=True)
        self.layout.metrics.parent.mkdir(parents=True)
        self.output_change = 0.25
        self.trend: dict[str, float] | None = {"first": 1.1, "last": 0.9, "error": 0.05}
        self.metrics = [{"step": step, "loss": 0.5} for step in range(3)]
        dtype = np.float16 if self.recipe.training.lora.save_dtype == "float16" else np.float32
        rng = np.random.default_rng(1)
        self.factors: dict[str, tuple[Any, Any]] = {}
        self.magnitudes: dict[str, Any] = {}
        for module in modules:
            down, up, *magnitude = module.shapes("diffusers").values()
            self.factors[module.name] = (
                rng.standard_normal(down).astype(dtype),
                rng.standard_normal(up).astype(dtype),
            )
            if magnitude:
                self.magnitudes[module.name] = rng.random(magnitude[0]).astype(np.float32)
        self.write_all()

    def tensors(self, layout: Any) -> Tensors:
        tensors: Tensors = {}
        for module in self.modules:
            down, up, alpha = module.keys(layout)
            tensors[down], tensors[up] = self.factors[module.name]
            if alpha is not None:
                tensors[alpha] = np.array(module.alpha, dtype=np.float32)
            if module.magnitude:
                key = module.magnitude_key(layout)
                tensors[key] = self.magnitudes[module.name].reshape(module.shapes(layout)[key])
        return tensors

    def path(self, layout: Any) -> Path:
        return self.lora / layout_file(layout, "demo")

    def write(self, layout: Any, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
        save_file(tensors, self.path(layout), metadata=self.metadata() if metadata is None else metadata)

    def write_all(self) -> None:
        """Write the current factors in each layout, and record the files."""
        for layout in LAYOUTS:
            self.write(layout, self.tensors(layout))
        self.record()

    def metadata(self) -> dict[str, str]:
        """Return peft's configuration, with a pattern for each module of another rank or alpha."""
        lora = self.recipe.training.lora
        patterns = {"rank_pattern": "rank", "alpha_pattern": "alpha"}
        adapter: dict[str, Any] = {
            f"unet.{name}": {"^" + re.escape(each.name): getattr(each, value) for each in self.modules}
            for name, value in patterns.items()
        }
        adapter |= {"unet.r": lora.rank, "unet.lora_alpha": lora.alpha}
        return {ADAPTER_METADATA_KEY: json.dumps(adapter)}

    def record(self, steps: int = 3) -> None:
        """Record the current files in finished.json, as the launching process does."""
        files = [
            {
                "name": self.path(layout).name,
                "max_error": 0.0,
                "sha256": hashlib.sha256(self.path(layout).read_bytes()).hexdigest(),
            }
            for layout in LAYOUTS
        ]
        finished = {"steps": steps, "modules": [asdict(module) for module in self.modules], "files": files}
        finished |= {"output_change": self.output_change, "loss_trend": self.trend}
        self.layout.finished.write_text(json.dumps(finished))
        (self.lora / "provenance.json").write_text(json.dumps({"run": "abc"}))
        self.write_metrics()

    def write_metrics(self) -> None:
        self.layout.metrics.write_text("".join(json.dumps(line) + "\n" for line in self.metrics))

    def write_validation(self, *losses: float) -> None:
        lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses)]
        self.layout.validation.write_text("".join(lines))

    def lengthen(self, steps: int) -> None:
        """Make it a run of that many steps, as the recipe requests."""
        training = self.recipe.training.model_copy(update={"steps": steps})
        self.recipe = self.recipe.model_copy(update={"training": training})
        self.metrics = [{"step": step, "loss": 0.5} for step in range(steps)]
        self.record(steps=steps)

    def findings(self, overrides: dict[str, Any] | None = None) -> dict[str, Finding]:
        """Return the findings by check; `overrides` are those of the run."""
        reports = {} if overrides is None else {"trained_lora": {"overrides": overrides}}
        findings = trained_lora.run(CheckContext(self.recipe, Tables(self.recipe.output_dir), reports))
        assert [finding.name for finding in findings] == [spec.name for spec in SPECS["trained_lora"]]
        return {finding.name: finding for finding in findings}

    def failed(self) -> set[str]:
        return {name for name, finding in self.findings().items() if not finding.passed}
