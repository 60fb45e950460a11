"""The command line and environment of a launch, and the error of a failed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import psutil
import pytest

from pipeline import errors
from pipeline.errors import LatentlineError, LaunchError, StoppedError, StoreError, TrainingError
from pipeline.processes import launch
from pipeline.processes.launch import (
    ALLOCATOR_VARIABLES,
    OUTPUT_TAIL_LINES,
    WAIT_VARIABLES,
    LocalLaunch,
    describe_status,
    error_from_json,
    error_in_output,
    error_to_json,
    launch_command,
    launch_environment,
    launch_error,
    worker_variables,
)
from pipeline.processes.machines import Machines
from pipeline.recipe import AccelerateSettings


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


ONE, TWO = AccelerateSettings(), AccelerateSettings(num_processes=2)

ACCELERATE_LAUNCH = [sys.executable, "-m", "pipeline.processes.worker.accelerate_launch"]


def test_only_several_processes_are_started_by_accelerates_launcher() -> None:
    one = launch_command(ONE, "pipeline.trained_lora.worker", Path("order.json"))
    two = launch_command(TWO, "pipeline.trained_lora.worker", Path("order.json"))
    assert one == [sys.executable, "-m", "pipeline.trained_lora.worker", "order.json"]
    assert two[:3] == ACCELERATE_LAUNCH
    assert two[-4:] == ["--multi_gpu", "-m", "pipeline.trained_lora.worker", "order.json"]
    assert value(two, "--num_processes") == "2"


SHOWS_ENVIRONMENT = """
import json, os, sys
variables = dict(os.environ)
if sys.argv[2:] == ["state"]:
    from accelerate import Accelerator
    variables["state"] = repr(Accelerator().state)
json.dump(variables, open(sys.argv[1], "w"))
"""


def shown(folder: Path, settings: AccelerateSettings, *, launcher: bool, state: bool) -> dict[str, str]:
    """Return the environment of a process started by accelerate's own launcher, or as a launch starts it."""
    script, result = folder / "shows_environment.py", folder / "shown.json"
    script.write_text(SHOWS_ENVIRONMENT, encoding="utf-8")
    variables = launch_environment(settings, folder / "error.json")
    command = [sys.executable]
    if launcher:
        variables = {name: each for name, each in variables.items() if not name.startswith("ACCELERATE_")}
        precision = "no" if settings.mixed_precision == "auto" else settings.mixed_precision
        command += ["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
        command += ["--config_file", value(launch_command(TWO, "m", Path("o")), "--config_file")]
        command += ["--mixed_precision", precision, "--dynamo_backend", "no"]
        command += ["--num_cpu_threads_per_process", str(settings.cpu_threads)]
    command += [str(script), str(result), *(["state"] if state else [])]
    subprocess.run(command, env=variables, check=True, capture_output=True)
    return json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("precision", "state"),
    [
        ("bf16", False),
        pytest.param("auto", True, marks=pytest.mark.slow),
        pytest.param("no", True, marks=pytest.mark.slow),
        pytest.param("fp16", True, marks=pytest.mark.slow),
        pytest.param("bf16", True, marks=pytest.mark.slow),
    ],
)
def test_a_single_process_has_the_environment_and_state_that_accelerates_launcher_would_give_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: Literal["auto", "no", "fp16", "bf16"],
    *,
    state: bool,
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    settings = AccelerateSettings(mixed_precision=precision, cpu_threads=3)
    expected = shown(tmp_path, settings, launcher=True, state=state)
    assert shown(tmp_path, settings, launcher=False, state=state) == expected
    assert expected["OMP_NUM_THREADS"] == "3"
    assert "ACCELERATE_MIXED_PRECISION" in expected
    assert ("Mixed precision type: " in expected.get("state", "")) == state


def test_processes_that_cannot_be_divided_among_the_machines_are_refused() -> None:
    with pytest.raises(LaunchError, match="3"):
        launch_command(AccelerateSettings(num_processes=3), "m", Path("o"), Machines(2, 1, "node1", 9, 60))


def test_the_users_accelerate_configuration_is_not_read() -> None:
    command = launch_command(TWO, "m", Path("o"))
    assert Path(value(command, "--config_file")).is_file()


@pytest.mark.parametrize("cpu_threads", [None, 7])
def test_the_number_of_threads_is_two_unless_the_recipe_sets_it(
    tmp_path: Path, cpu_threads: int | None
) -> None:
    chosen = {} if cpu_threads is None else {"cpu_threads": cpu_threads}
    settings, threads = AccelerateSettings(**chosen), str(cpu_threads or 2)
    two = AccelerateSettings(num_processes=2, **chosen)
    assert value(launch_command(two, "m", Path("o")), "--num_cpu_threads_per_process") == threads
    variables = launch_environment(settings, tmp_path / "e")
    assert variables["OMP_NUM_THREADS"] == threads, "for a process that accelerate does not start"
    code = "from pipeline.processes.launch import cpu_threads; print(cpu_threads())"
    process = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == threads


def test_one_machine_uses_any_free_port_and_several_meet_at_the_address_of_the_first() -> None:
    settings = AccelerateSettings(num_processes=4)
    one = launch_command(settings, "m", Path("o"))
    assert (value(one, "--num_machines"), value(one, "--main_process_port")) == ("1", "0")
    assert not {"--machine_rank", "--main_process_ip", "--rdzv_conf"} & set(one)

    two = launch_command(settings, "m", Path("o"), Machines(2, 1, "node1", 29500, 60))
    options = {
        "--num_machines": "2",
        "--num_processes": "4",
        "--machine_rank": "1",
        "--main_process_ip": "node1",
        "--main_process_port": "29500",
        "--rdzv_conf": "timeout=60",
    }
    assert {name: value(two, name) for name in options} == options


@pytest.mark.parametrize(("chosen", "passed"), [("auto", "no"), ("no", "no"), ("bf16", "bf16")])
def test_the_process_chooses_the_precision_if_the_recipe_leaves_it_open(
    chosen: Literal["auto", "no", "bf16"], passed: str
) -> None:
    two = AccelerateSettings(num_processes=2, mixed_precision=chosen)
    assert value(launch_command(two, "m", Path("o")), "--mixed_precision") == passed


def test_the_variables_of_a_launched_process_are_those_of_the_recipe_and_not_of_a_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", *WAIT_VARIABLES, *ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OWN", "kept")
    monkeypatch.setattr(launch, "num_cores", lambda: 2)
    settings = AccelerateSettings(cpu_threads=3)
    same_on_all_machines = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # more threads than cores
        "OMP_NUM_THREADS": "3",
        "LATENTLINE_CPU_THREADS": "3",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if sys.platform == "linux":
        same_on_all_machines["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    assert worker_variables(settings) == same_on_all_machines

    variables = launch_environment(settings, tmp_path / "error.json", Machines(2, 1, "localhost", 29500, 60))
    expected = {
        **same_on_all_machines,
        "OWN": "kept",
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        "LATENTLINE_ERROR_FILE": str(tmp_path / "error.json"),
        "LATENTLINE_PARENT_PID": str(os.getpid()),
    }
    assert expected.items() <= variables.items()
    assert "RANK" not in variables
    assert json.loads(variables["LATENTLINE_MACHINES"])["rank"] == 1


def test_a_launched_process_has_its_parents_id_and_imports_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/other")
    variables = launch_environment(AccelerateSettings(), tmp_path / "error.json")
    root = Path(__file__).resolve().parents[3]
    assert variables["PYTHONPATH"] == f"{root}{os.pathsep}/other"
    assert variables["LATENTLINE_PARENT_PID"] == str(os.getpid())


SLOW_ENTRY = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1]).parent
(folder / "started").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slow_entry.py").write_text(SLOW_ENTRY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "order.json"


def processes_of(order: Path) -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if str(order) in process.cmdline()]


def test_meanwhile_runs_while_the_process_runs(order: Path) -> None:
    def meanwhile() -> None:
        while not (order.parent / "started").exists():
            time.sleep(0.01)
        (order.parent / "go").touch()

    LocalLaunch(AccelerateSettings())("slow_entry", order, meanwhile)
    assert processes_of(order) == []


def test_an_error_of_meanwhile_ends_the_process_and_is_raised(order: Path) -> None:
    def meanwhile() -> None:
        assert len(processes_of(order)) == 1
        raise StoreError("no room", where="disk", fix="free some")

    with pytest.raises(StoreError, match="no room"):
        LocalLaunch(AccelerateSettings())("slow_entry", order, meanwhile)
    assert processes_of(order) == []


def test_a_process_that_is_stopped_with_its_command_has_time_for_a_checkpoint(order: Path) -> None:
    saves = "import signal\nsignal.signal(15, lambda *_: (time.sleep(0.3), saved.touch(), sys.exit(143)))"
    code = SLOW_ENTRY.replace("\n(folder", f"\nsaved = folder / 'saved'\n{saves}\n(folder", 1)
    (order.parent / "slow_entry.py").write_text(code, encoding="utf-8")

    def meanwhile() -> None:
        while not (order.parent / "started").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalLaunch(AccelerateSettings())("slow_entry", order, meanwhile)
    assert (order.parent / "saved").exists()
    assert processes_of(order) == []


@pytest.mark.parametrize("status", [-15, 143])
def test_a_process_that_ended_on_sigterm_was_stopped_and_has_not_failed(tmp_path: Path, status: int) -> None:
    assert isinstance(launch_error("m", status, output=[], error_file=tmp_path / "none"), StoppedError)
    assert not isinstance(launch_error("m", -9, output=[], error_file=tmp_path / "none"), StoppedError)


def test_a_process_that_ctrl_c_ended_interrupts_its_parent_too(order: Path) -> None:
    def meanwhile() -> None:
        while not (order.parent / "started").exists():
            time.sleep(0.01)
        [process] = processes_of(order)
        process.send_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        LocalLaunch(AccelerateSettings())("slow_entry", order, meanwhile)


def test_a_process_that_ctrl_c_ended_during_its_start_interrupts_its_parent_too(
    tmp_path: Path, order: Path
) -> None:
    code = "import sys, traceback\ntry:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n"
    code += "    traceback.print_exc()\n    sys.exit(1)\n"
    (tmp_path / "slow_entry.py").write_text(code, encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        LocalLaunch(AccelerateSettings())("slow_entry", order)


@pytest.mark.parametrize("status", [130, -2])
def test_a_process_with_the_status_of_ctrl_c_interrupts_its_parent_too(order: Path, status: int) -> None:
    code = f"import os, signal, sys\nstatus = {status}\n"
    code += "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    code += "os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)\n"
    (order.parent / "slow_entry.py").write_text(code, encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        LocalLaunch(AccelerateSettings())("slow_entry", order)


@pytest.mark.parametrize("logs", [True, False], ids=["with a log", "without a log"])
def test_output_that_is_not_text_is_logged_and_quoted_and_each_line_is_logged_once(
    order: Path, logs: bool
) -> None:
    code = "import os, sys, time\n"
    code += "for part in (b'first ', b'line\\nsec', b'ond\\ncaf\\xe9'):\n"
    code += "    os.write(1, part)\n    time.sleep(0.3)\n"
    code += "sys.exit(3)\n"
    (order.parent / "slow_entry.py").write_text(code, encoding="utf-8")
    lines = list[str]()
    with pytest.raises(LaunchError, match=r"ended with exit status 3: caf"):
        LocalLaunch(AccelerateSettings(), lines.append if logs else None)("slow_entry", order)
    assert lines == (["first line", "second", "caf\ufffd"] if logs else [])


REPORTING_ENTRY = """
import sys, time
from pathlib import Path
from pipeline.errors import TrainingError
from pipeline.processes.pipes import reporter
with reporter() as report:
    report.info("half of the work is done")
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    if Path(sys.argv[1]).read_text() == "fail":
        raise TrainingError("loss is NaN", where="step 3", fix="lower it")
    report.info("all of it is done")
"""


@pytest.mark.parametrize("ending", ["end", "fail"])
def test_lines_are_logged_while_the_process_runs_and_an_error_is_only_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    (tmp_path / "reporting_entry.py").write_text(REPORTING_ENTRY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    order, lines = tmp_path / "order.json", list[str]()

    def log(line: str) -> None:
        lines.append(line)
        (tmp_path / "ending").write_text(ending, encoding="utf-8")
        (tmp_path / "ending").replace(order)

    launch = LocalLaunch(AccelerateSettings(), log)
    if ending == "fail":
        with pytest.raises(TrainingError, match="loss is NaN"):
            launch("reporting_entry", order)
        assert lines == ["half of the work is done"]
    else:
        launch("reporting_entry", order)
        assert lines == ["half of the work is done", "all of it is done"]


def test_the_error_that_a_process_wrote_is_raised(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"kind": "TrainingError", "what": "a", "where": "b", "fix": "c"}), "utf-8")
    error = launch_error("m", 1, output=["noise"], error_file=file)
    assert isinstance(error, TrainingError)
    assert (error.what, error.where, error.fix) == ("a", "b", "c")


@pytest.mark.parametrize("kind", [each for each in vars(errors).values() if isinstance(each, type)])
def test_every_error_of_latentline_can_be_handed_to_the_launching_process(kind: type) -> None:
    if not issubclass(kind, LatentlineError):
        return
    error = kind("what", where="where", fix="fix")
    copy = error_from_json(error_to_json(error))
    assert type(copy) is kind
    assert (copy.what, copy.where, copy.fix) == ("what", "where", "fix")


def test_an_error_of_an_unknown_kind_is_an_error_of_latentline() -> None:
    text = json.dumps({"kind": "NoSuchError", "what": "a", "where": "b", "fix": "c"})
    assert type(error_from_json(text)) is LatentlineError


def test_without_a_written_error_the_end_of_the_output_is_quoted(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(OUTPUT_TAIL_LINES + 5)]
    error = launch_error("m", 7, output=lines, error_file=tmp_path / "none")
    assert isinstance(error, LaunchError)
    assert error.what == "m ended with exit status 7: line 24"
    assert "line 4\n" not in error.where
    assert "line 5\n" in error.where
    assert error.fix.startswith("correct the cause")


def test_only_the_last_line_of_a_traceback_is_quoted(tmp_path: Path) -> None:
    trace = [
        "loading",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "    1 / 0",
        "E: zero",
    ]
    error = launch_error("m", 1, output=trace, error_file=tmp_path / "none")
    assert error.what == "m ended with exit status 1: E: zero"
    assert error.where.splitlines()[1:] == ["loading", "E: zero"]


def test_blank_lines_are_not_quoted_and_a_launch_without_output_says_so(tmp_path: Path) -> None:
    error = launch_error("m", 1, output=["a", "  ", "b", ""], error_file=tmp_path / "none")
    assert error.what == "m ended with exit status 1: b"
    assert error.where.splitlines()[1:] == ["a", "b"]
    silent = launch_error("m", 1, output=[""], error_file=tmp_path / "none")
    assert silent.where.splitlines() == ["the processes of m, last output:", "(none)"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "with exit status 1"),
        (128, "with exit status 128"),
        (129, "by signal SIGHUP"),
        (-1, "by signal SIGHUP"),
        (143, "by signal SIGTERM"),
        (-9, "by signal SIGKILL"),
        (255, "with exit status 255"),
    ],
)
def test_a_status_is_described_in_words(status: int, words: str) -> None:
    assert describe_status(status) == words


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (-9, "memory ran out"),
        (137, "memory ran out"),
        (-15, "start the job again, and it resumes"),
        (143, "start the job again, and it resumes"),
        (-2, "start the job again, and it resumes"),
        (130, "start the job again, and it resumes"),
        (1, "correct the cause"),
    ],
)
def test_the_advice_depends_on_how_a_process_ended(tmp_path: Path, status: int, advice: str) -> None:
    assert advice in launch_error("m", status, output=[], error_file=tmp_path / "none").fix


@pytest.mark.parametrize(
    ("num_processes", "cores", "expected"),
    [
        (1, 2, {"GOMP_SPINCOUNT": "5000"}),
        (1, 1, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (2, 3, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (2, 4, {"GOMP_SPINCOUNT": "5000"}),
    ],
)
def test_threads_spin_only_if_each_has_a_core(
    monkeypatch: pytest.MonkeyPatch, num_processes: int, cores: int, expected: dict[str, str]
) -> None:
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "num_cores", lambda: cores)
    variables = worker_variables(AccelerateSettings(num_processes=num_processes, cpu_threads=2))
    assert {name: variables[name] for name in WAIT_VARIABLES if name in variables} == expected


@pytest.mark.parametrize(
    "own",
    [
        {"OMP_WAIT_POLICY": "ACTIVE"},
        {"GOMP_SPINCOUNT": "300000"},
        {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "9"},
    ],
)
def test_a_wait_policy_of_the_user_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, each in own.items():
        monkeypatch.setenv(name, each)
    variables = launch_environment(ONE, tmp_path / "error.json")
    assert {name: variables[name] for name in WAIT_VARIABLES if name in variables} == own


@pytest.mark.skipif(sys.platform != "linux", reason="torch supports expandable segments on Linux")
@pytest.mark.parametrize("own", [None, *ALLOCATOR_VARIABLES])
def test_a_launched_process_expands_its_memory_segments_unless_the_user_configures_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(own, "max_split_size_mb:128")
    variables = launch_environment(AccelerateSettings(), tmp_path / "error.json")
    configured = {name: variables[name] for name in ALLOCATOR_VARIABLES if name in variables}
    default = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert configured == ({own: "max_split_size_mb:128"} if own else default)


def test_an_error_in_the_output_of_a_command_is_read_back_with_its_class_and_parts() -> None:
    error = TrainingError("the loss is nan\nat step 3", where="step 3\nsample a", fix="lower it: now")
    lines = [
        "ValueError: of a library",
        "StoreError: an error without parts",
        *f"TrainingError: {error.text()}".splitlines(),
        *f"StoreError: {StoreError('of another machine', where='a', fix='b').text()}".splitlines(),
        "a later line",
    ]
    found = error_in_output(lines)
    assert type(found) is TrainingError
    assert (found.what, found.where, found.fix) == (error.what, error.where, error.fix)


def test_output_without_an_error_of_latentline_has_none() -> None:
    assert error_in_output([]) is None
    assert error_in_output(["ValueError: x", "  where: y", "  fix:   z"]) is None
    assert error_in_output(["StoreError: x", "  where: y"]) is None
