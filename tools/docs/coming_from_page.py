"""Generator of docs/coming_from.md, the page for users of other trainers.

Run `python -m tools.docs.coming_from_page` to write the page.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe.other_trainers import Term, terms_by_trainer
from pipeline.recipe.project import project_root
from pipeline.storage.atomic import write_text

_TOP = """\
# Coming from another trainer

This page is for users of sd-scripts, kohya's GUI, OneTrainer, ai-toolkit, SimpleTuner and diffusion-pipe. You
can keep your folder of images and captions as it is: Latentline only reads it, and keeps its cache in another
folder. A recipe replaces command line arguments, TOML files, presets and data backend files.

If a recipe contains a setting of another trainer that [the last section](#equivalent-settings) lists, the
error message names the key to use instead. Settings that are not listed there may have no equivalent.

## Import your datasets

`latentline new` reads the datasets of another trainer and writes a recipe for them. It prints each setting
that it imported, and each that it did not, with the reason:

    latentline new roses --images config/roses.yaml --base black-forest-labs/FLUX.1-dev

`--images` is one of:

| trainer | folder or file |
|---|---|
| sd-scripts, kohya's GUI | the folder with sub-folders such as `10_sks dog`, also below `img/` and `reg/` |
| sd-scripts | the TOML file of `--dataset_config` |
| OneTrainer | the concepts file, or a configuration that contains or names the concepts |
| ai-toolkit | the YAML file of the job |
| SimpleTuner | `multidatabackend.json`, or the `config.json` that names it |
| diffusion-pipe | the dataset's TOML file |
| sd-scripts, Hugging Face, COCO | `meta_cap.json`, `metadata.jsonl`, `captions.json`, or the folder |

The base model and the training settings are not imported; the command prints the recipe keys to set.
Relative paths in a file are searched in its folder, in the folder above, and in the working directory. Names
of datasets are written in ASCII (`Blüten` becomes `Blueten`); paths and captions stay as they are.

Trainers read the same folder differently. The recipe is written so that images and captions are used as they
were before. A cell shows the keys for this, or what the recipe does:

| | sub-folders | several lines in a caption file | images that are not used |
|---|---|---|---|
| sd-scripts | `exclude: ["*/*"]` | reported: the recipe uses all, not the first | samples of kohya's GUI |
| OneTrainer | as the concept sets | `lines: each` | `*-masklabel.png`, `*-condlabel.png` |
| ai-toolkit | read | one caption | `_controls`, folders of masks or control images |
| SimpleTuner | read | `lines: each` | |
| diffusion-pipe | `exclude: ["*/*"]` | one caption | |

Some things work differently, or need another step:

- **Regularisation images** become an ordinary dataset. Add `role: prior` to it for
  [prior preservation](recipe_guide.md#prior-preservation). `weight` sets its share of the training samples.
- **Masks** are excluded, so that they are not trained on as pictures, but not used either. To use them, add
  [`datasets[].mask`](recipe_guide.md#masks).
- **Resolution, mirroring and caption dropout** are settings of the recipe if all of your datasets agree on
  them, and settings of each dataset otherwise. The same images at several resolutions become one dataset with
  `resolutions`.
- **Shuffled tags.** Captions are encoded before training, so a fixed number of orders (`variants`) is chosen
  for each caption. Prefix and postfix keep their place.
- **`loss.weighting: debiased` with v-prediction** follows the paper: the weight of an error of the predicted
  noise, 1 / sqrt(SNR), is converted to the velocity, which gives 0.068 at the last timestep of Stable
  Diffusion's schedule. sd-scripts' `--debiased_estimation_loss` uses 1 / (SNR + 1) there, 0.995. Both give
  14.6 if the model predicts noise.
- **ai-toolkit's trigger word** is added as `word, caption`. `[trigger]` in a caption becomes the word.

## A folder for sd-scripts

In sd-scripts, the name of a subfolder such as `10_sks dog` sets the number of repeats and the caption of its
images. In a recipe, each subfolder is a dataset, with both as keys:

```yaml
datasets:
  - name: dog
    path: data/train/10_sks dog
    repeats: 10
    captions: {from: fixed, text: sks dog}       # or {from: sidecar, suffix: .txt}
  - name: regularisation
    path: data/reg/1_dog
    role: prior
    captions: {from: fixed, text: dog}
```

`latentline new dog --images data/train` writes such a recipe for a folder with such subfolders:

- A subfolder without a number in its name becomes a dataset with `repeats: 1`.
- If only some images have caption files, the class tokens (`sks dog`) become `captions.fallback` for the
  others.
- Cache files of sd-scripts next to the images (`.npz`) are ignored.

## A folder for SimpleTuner, ai-toolkit, OneTrainer or diffusion-pipe

| your folder | the key in the recipe |
|---|---|
| a text file next to each image | `captions: {from: sidecar, suffix: .txt}` |
| text files with two suffixes | `captions: {from: sidecar, suffix: [.txt, .caption]}` |
| a default for images without a text file | `captions: {fallback: a photograph}` |
| one caption per line of that file | `captions: {lines: each}` |
| the file name | `captions: {from: filename}` |
| one caption for all images | `captions: {from: fixed, text: ...}` |
| captions with `[trigger]` for the trigger word | `captions: {trigger: sks, placeholder: "[trigger]"}` |
| a column of a `.parquet`, `.jsonl` or `.csv` file | `captions: {from: column, columns: [text]}` |
| masks in a folder, with the names of the images | `mask: {path: data/masks}` |
| masks next to the images, such as `rose-masklabel.png` | `mask: {path: data/flowers, suffix: -masklabel}` |
| transparent images, with their opacity as the mask | `mask: {from: alpha}` |
| control images in a folder, for a model that edits images | `references: [{path: data/before}]` |
| control images next to the images | `references: [{path: data/flowers, suffix: -before}]` |
| control images that the base model does not see | `exclude: [controls, "*-condlabel.png"]` |

If your images are listed in a `.parquet`, `.jsonl` or `.csv` file, that file is the dataset's `path`. Name
its column of image paths with `path_column`, such as `path_column: file_name`.

## A checkpoint in one file

`model.base` is a diffusers folder or a Hub id. If you have a model in a single `.safetensors` file, as
Civitai distributes them, convert it to a folder once. The file is not modified:

    latentline convert-checkpoint juggernaut.safetensors models/juggernaut

[families.md](families.md#converting-a-single-file) lists the supported models.

## An existing LoRA

To continue training from a LoRA of another trainer, name its file in `training.lora.start_from`. It may be in
the layout of diffusers, kohya or ComfyUI. Every run exports all three layouts.

## Errors of scripts that LoRAs were trained with

If a LoRA of one of these scripts is worse than its settings suggest, this may be the reason. Each row was
read in the script of the first and the last release that it names. The scripts are in `examples/dreambooth`
of diffusers, and their names begin with `train_dreambooth_lora_`.

| script | diffusers | error | in Latentline |
|---|---|---|---|"""

_SCRIPT_ERRORS = (
    (
        "flux_kontext.py",
        "0.35.0 to 0.40.0",
        "With a caption per image, text embeddings are stored by step, and the batches are shuffled again in "
        "each pass over the data. Images are trained with captions of other images.",
        "An entry is found by the hash of its caption or image, in any order.",
    ),
    (
        "z_image.py",
        "0.37.0, 0.38.0",
        "The same with a caption per image, unless `--cache_latents` is set.",
        "",
    ),
    (
        "flux2_klein.py",
        "0.37.0 to 0.40.0",
        "`--text_encoder_out_layers` is 10, 20 and 30 by default. The pipeline draws with the text encoder's "
        "layers 9, 18 and 27.",
        "The layers are the pipeline's.",
    ),
    (
        "hidream.py",
        "0.34.0 to 0.40.0",
        "The transformer is loaded with `force_inference_output=True`, which computes its experts without "
        "gradients. The layers before them learn only from what passes around the experts.",
        "Gradients pass through the experts.",
    ),
    (
        "flux2_img2img.py",
        "0.37.0 to 0.40.0",
        "The references of a batch get the position ids of several references of one sample: their time "
        "coordinates are 10, 20, 30 and so on. Drawing with one reference uses 10.",
        "Positions do not depend on the batch.",
    ),
    ("flux2_klein_img2img.py", "0.37.0, 0.38.0", "The same.", ""),
)

_SETTINGS = """\
## Equivalent settings

Settings with the same name and meaning, such as `learning_rate`, are not listed. If a setting has no key, its
note says what Latentline does instead. [recipes.md](recipes.md) describes every key.

### Defaults that differ from sd-scripts

- In Stable Diffusion, the LoRA adapts the attention projections only. `training.lora.targets: blocks` also
  adapts the feed-forward layers.
- Text encoders are not trained unless `training.lora.text_encoders` is set.
- `text.caption_dropout` is 0.1 instead of 0, `training.lora.alpha` is 16 instead of 1, and
  `captions.shuffle.keep` is 1 instead of 0.
- Captions for CLIP are cut after 77 tokens. `max_token_length`, `clip_skip` and weighted captions have no
  equivalent. The check `captions_fit` lists captions that are cut.
- `accelerate.mixed_precision: auto` trains UNets in float32; `latentline new` writes `bf16`.
- Random changes of images and captions have a fixed number of variants, because all of them are in the cache:
  `captions.shuffle.variants`, `captions.drop_tags.variants`, `latents.flip` and random crops. Changed colours
  have no equivalent.

### Tables

`python -m tools.docs.coming_from_page` generates this page from the table that the error messages use.
"""


def page_text() -> str:
    """Return the page in Markdown; it depends on the table of settings only."""
    errors = ["| `{}` | {} | {} | {} |".format(*row) for row in _SCRIPT_ERRORS]
    parts = [_TOP, *errors, "", _SETTINGS]
    for trainer, terms in terms_by_trainer().items():
        parts.append(f"### {trainer}\n\n| setting | key in a recipe | note |\n|---|---|---|")
        parts += [_row(term) for term in terms]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def page_path() -> Path:
    """Return the path of the page."""
    return project_root() / "docs" / "coming_from.md"


def _row(term: Term) -> str:
    here = "" if term.shown is None else f"`{term.shown}`"
    return f"| `{term.theirs}` | {here} | {term.note} |"


if __name__ == "__main__":
    write_text(page_path(), page_text())
