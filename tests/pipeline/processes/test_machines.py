"""The processes of each machine, and the network interface between machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import LaunchError
from pipeline.processes.launch import TRAINING_MODULE, launch_command, launch_environment
from pipeline.processes.machines import (
    GLOO_INTERFACE_VARIABLE,
    ONE_MACHINE,
    Machines,
    interface_towards,
    machines_of_this_process,
)
from pipeline.recipe import AccelerateSettings

TWO = Machines(2, 1, "127.0.0.1", 29500)


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_number_of_processes_is_that_of_all_machines_together() -> None:
    settings = AccelerateSettings(num_processes=4)
    command = launch_command(settings, TRAINING_MODULE, Path("order.json"), TWO)
    options = {
        name: value(command, f"--{name}") for name in ("num_processes", "num_machines", "machine_rank")
    }
    assert options == {"num_processes": "4", "num_machines": "2", "machine_rank": "1"}
    assert value(command, "--main_process_ip") == "127.0.0.1"
    assert value(command, "--main_process_port") == "29500"
    assert TWO.num_processes_here(settings) == 2
    assert TWO.on_one(settings).num_processes == 2

    alone = launch_command(settings, TRAINING_MODULE, Path("order.json"))
    assert (value(alone, "--num_machines"), value(alone, "--main_process_port")) == ("1", "0")


def test_machines_cannot_have_different_numbers_of_processes() -> None:
    with pytest.raises(
        LaunchError, match="divisible by the number of machines, got 3 on 2 machines"
    ) as caught:
        launch_command(AccelerateSettings(num_processes=3), TRAINING_MODULE, Path("order.json"), TWO)
    assert caught.value.where == "accelerate.num_processes"


def test_launched_processes_read_the_machines_and_the_interface_from_their_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = AccelerateSettings(num_processes=2)
    monkeypatch.delenv(GLOO_INTERFACE_VARIABLE, raising=False)
    variables = launch_environment(settings, tmp_path / "error.json", TWO)
    assert variables[GLOO_INTERFACE_VARIABLE] == "lo"
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert machines_of_this_process() == TWO

    monkeypatch.setenv(GLOO_INTERFACE_VARIABLE, "eth7")
    assert launch_environment(settings, tmp_path / "error.json", TWO)[GLOO_INTERFACE_VARIABLE] == "eth7"


def test_a_single_machine_has_no_variables() -> None:
    assert ONE_MACHINE.environment() == {}
    assert machines_of_this_process() == ONE_MACHINE


def test_an_unknown_host_has_no_interface() -> None:
    assert interface_towards("no-such-host.invalid") is None


def test_the_command_for_the_other_machines_can_be_copied() -> None:
    order = "/shared/my run/order.json"
    assert Machines(2, 0, "a", 5).command_of_others(order) == (
        "on machine 1: latentline train '/shared/my run/order.json' --machines 2 --rank 1 --master a:5"
    )
    assert "on machines 1 to 3, each with its own rank:" in Machines(4, 0, "a", 5).command_of_others(order)
