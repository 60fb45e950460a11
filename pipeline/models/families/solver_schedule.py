"""Flow-matching models published with the configuration of another solver: its shift has another name."""

from __future__ import annotations

from typing import Any

from pipeline.models.families.flow_transformer import FlowTransformer


class SolverSchedule(FlowTransformer):
    """A flow transformer trained with the shift that its solver's configuration has."""

    def timestep_facts(self) -> dict[str, Any]:
        """What the schedule's configuration says of the shift, by the solver's name for it too."""
        return {**super().timestep_facts(), "flow_shift": self.scheduler_config.get("flow_shift")}

    def load_noise_scheduler(self) -> Any:
        """A `FlowMatchEulerDiscreteScheduler` with the shift of the base model's solver."""
        config = self.scheduler_config
        shift = float(config.get("flow_shift") or config.get("shift") or 1.0)
        return self.class_of("scheduler")(num_train_timesteps=self.num_timesteps, shift=shift)
