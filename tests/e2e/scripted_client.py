"""A client of `latentline` that only knows the documents of `--json`, and imports nothing of the project.

    python scripted_client.py RECIPE COMMAND...

It repairs the recipe and its dataset by rules, trains, and checks the exported LoRA. Each document is a line
of its log on standard error; standard output gets its repairs and the LoRA's files, as JSON.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MAX_ROUNDS = 5

SET_ASIDE = {"captions_present", "shape_uniformity", "rejected_fraction", "one_colour"}
"""Checks of single images: the client moves the images that these name out of the dataset."""


class Client:
    """One recipe, and the command line that starts `latentline`."""

    def __init__(self, recipe: str, command: list[str]) -> None:
        self._recipe = recipe
        self._command = command
        self.repairs: list[str] = []

    def call(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Return the exit status and the document of a command."""
        command = [*self._command, *arguments, "--json"]
        process = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        document = json.loads(process.stdout)
        sys.stderr.write(f"{arguments} {process.returncode} {json.dumps(document)}\n")
        return process.returncode, document

    def result(self, *arguments: str) -> dict[str, Any]:
        """Return the document of a command that must succeed."""
        status, document = self.call(*arguments)
        assert status == 0, document
        return document

    def repair_recipe(self) -> dict[str, str]:
        """Correct misspelled keys, and return the folder of each dataset."""
        for _ in range(MAX_ROUNDS):
            status, document = self.call("validate", self._recipe)
            if status == 0:
                return document["datasets"]
            self._correct_key(document["error"])
        raise AssertionError("the recipe has too many mistakes")

    def _correct_key(self, error: dict[str, str]) -> None:
        place = re.fullmatch(r"(?P<file>.+):(?P<line>\d+), (?P<key>\S+)", error["where"])
        better = re.fullmatch(r"did you mean (\w+)\?", error["fix"])
        assert place, error
        assert better, error
        file, number = Path(place["file"]), int(place["line"]) - 1
        wrong = place["key"].rpartition(".")[2]
        lines = file.read_text("utf-8").splitlines(keepends=True)
        lines[number] = re.sub(rf"\b{wrong}\b", better[1], lines[number])
        file.write_text("".join(lines), encoding="utf-8")
        self.repairs.append(f"{wrong} -> {better[1]}")

    def repair_images(self, folders: dict[str, str]) -> None:
        """Move images out of the datasets until no check names one."""
        for _ in range(MAX_ROUNDS):
            _, document = self.call("run", self._recipe, "--cache-only")
            [run] = document["recipes"]
            faulty = {
                name for checks in run["checks"].values() for check in checks for name in _faulty(check)
            }
            if not faulty:
                assert run["outcome"] == "done", run["errors"]
                return
            for name in sorted(faulty):
                self._set_aside(name, folders)
        raise AssertionError("the images have too many faults")

    def _set_aside(self, sample_id: str, folders: dict[str, str]) -> None:
        dataset, _, path = sample_id.partition("/")
        folder = Path(folders[dataset])
        aside = folder.parent / f"{folder.name}_set_aside"
        aside.mkdir(exist_ok=True)
        image = folder / path
        for file in folder.glob(f"{image.stem}.*"):
            file.rename(aside / file.name)
        self.repairs.append(sample_id)

    def train(self) -> list[str]:
        """Train, publish the last step, and return the files of the LoRA after reading one of them."""
        plan = self.result("plan", self._recipe, "--no-memory")
        assert plan["closed"] == []
        assert plan["latents_to_make"] == plan["text_to_make"] == 0

        [run] = self.result("run", self._recipe)["recipes"]
        trained = run["reports"]["trained_lora"]
        steps = self.result("export", self._recipe)["steps"]
        exported = self.result("export", self._recipe, "--step", str(steps[-1]))
        assert exported["run"] == trained["run"]

        folder = Path(run["output_dir"]) / "lora"
        assert self.result("lora", "info", str(folder))["layers"]
        return sorted(str(file) for file in folder.glob("*.safetensors"))


def _faulty(check: dict[str, Any]) -> list[str]:
    if check["name"] == "look_alikes":
        return [row["images"] for row in check["rows"] if row["what"] == "copy, left out"]
    return [row["sample_id"] for row in check["rows"]] if check["name"] in SET_ASIDE else []


def main(recipe: str, *command: str) -> None:
    """Repair, train and export a recipe."""
    client = Client(recipe, list(command))
    folders = client.repair_recipe()
    client.repair_images(folders)
    json.dump({"lora": client.train(), "repairs": client.repairs}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
