"""docs/coming_from.md: for those who know another trainer.

`python -m tools.docs.coming_from_page` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe.load import project_root
from pipeline.recipe.other_trainers import ALL, Term
from pipeline.storage.atomic import write_text

_TOP = """\
# Coming from another trainer

Your folder of images and captions stays as it is: Latentline only reads there, and keeps its cache
elsewhere. A recipe takes the place of arguments, TOML files, presets and data backends; a key of another
trainer that is met in one is refused with the name that it has here.

## A folder of sd-scripts

A sub-folder's name, such as `10_sks dog`, says how often its images are repeated and what their caption is.
Here each is a dataset:

```yaml
datasets:
  - name: dog
    path: data/train/10_sks dog
    repeats: 10
    captions: {from: fixed, text: sks dog}       # or {from: sidecar, suffix: .txt}
  - name: regularisation
    path: data/reg/1_dog
    captions: {from: fixed, text: dog}
```

`latentline new dog --images data/train` writes such a recipe for a folder of those.

Regularisation images are a dataset like any other; `weight` says how much of the training they are,
whatever their number. Caches that sd-scripts left beside the images (`.npz`) are no images and not read.

## A folder for SimpleTuner, ai-toolkit, OneTrainer or diffusion-pipe

A text file beside each image is `captions: {from: sidecar, suffix: .txt}`; one caption on each of its lines,
`lines: each`; the caption in the file's name, `{from: filename}`; one for all, `{from: fixed, text: ...}`. A
table of paths and captions (`.parquet`, `.jsonl` or `.csv`) is the dataset's `path`, with `path_column:
file_name` and `captions: {from: column, columns: [text]}` where its columns are called so.

## A checkpoint in one file

`model.base` is a diffusers folder or a Hub id. A `.safetensors` file, as Civitai and the other trainers have
models, becomes a folder once, and is only read:

    latentline convert-checkpoint juggernaut.safetensors models/juggernaut

[families.md](families.md#a-model-in-one-file) says for which models.

## A LoRA that you have

`training.lora.start_from` goes on from its file, in diffusers', kohya's or ComfyUI's layout. Each training
leaves all three.

## Whose word for what

This page is written by `python -m tools.docs.coming_from_page`, from the table that messages are made of.
Settings of the same name and meaning, such as `learning_rate`, are not in it; [recipes.md](recipes.md) has
every key.
"""


def page_text() -> str:
    """The page, in Markdown; the same for the same table."""
    parts = [_TOP]
    for trainer, terms in ALL.items():
        parts.append(f"### {trainer}\n\n| there | here | |\n|---|---|---|")
        parts += [_row(term) for term in terms]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def page_path() -> Path:
    """Where the page lies."""
    return project_root() / "docs" / "coming_from.md"


def _row(term: Term) -> str:
    here = "" if term.shown is None else f"`{term.shown}`"
    return f"| `{term.theirs}` | {here} | {term.note} |"


if __name__ == "__main__":
    write_text(page_path(), page_text())
