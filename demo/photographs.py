"""The demo's dataset: 24 captioned crops of photographs that scikit-image includes.

    python -m demo.photographs data/demo

The photographs are in the public domain or under permissive terms (see skimage/data/README.txt). The crops
have aspect ratios from 0.5 to 2, which fill several buckets.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image


@dataclass(frozen=True)
class Shot:
    """A captioned crop of one photograph, in the photograph's pixels."""

    name: str
    photograph: str
    top: int
    left: int
    height: int
    width: int
    caption: str


SHOTS = (
    Shot(
        "astronaut_portrait",
        "astronaut.png",
        0,
        90,
        440,
        300,
        "portrait of a smiling astronaut in an orange suit",
    ),
    Shot(
        "astronaut_wide",
        "astronaut.png",
        0,
        0,
        380,
        512,
        "an astronaut in an orange suit between a flag and a model",
    ),
    Shot(
        "astronaut_face",
        "astronaut.png",
        20,
        140,
        220,
        180,
        "face of a smiling astronaut with short brown hair",
    ),
    Shot(
        "astronaut_shuttle",
        "astronaut.png",
        20,
        330,
        280,
        150,
        "a model of a space shuttle, standing upright",
    ),
    Shot("cat_face", "chelsea.png", 20, 100, 240, 250, "face of a tabby cat, looking past the camera"),
    Shot("cat_wide", "chelsea.png", 0, 0, 300, 451, "a tabby cat in front of a blurred background"),
    Shot("cat_eyes", "chelsea.png", 75, 110, 110, 220, "green eyes of a tabby cat, close-up"),
    Shot("cat_fur", "chelsea.png", 0, 60, 200, 110, "brown fur of a tabby cat beside one eye, close-up"),
    Shot("coffee_cup", "coffee.png", 40, 120, 320, 340, "a cup of espresso with a spoon on a red saucer"),
    Shot("coffee_table", "coffee.png", 0, 0, 400, 600, "an espresso cup on a red saucer on a wooden table"),
    Shot("coffee_handle", "coffee.png", 150, 30, 150, 290, "the handle of a red espresso cup"),
    Shot("coffee_crema", "coffee.png", 60, 230, 180, 130, "brown crema in a white cup, from above"),
    Shot("rocket_pad", "rocket.jpg", 0, 180, 427, 260, "a white rocket on its launch pad at dusk"),
    Shot(
        "rocket_wide", "rocket.jpg", 100, 0, 320, 640, "a rocket between lattice towers in the evening light"
    ),
    Shot("rocket_tower", "rocket.jpg", 40, 80, 340, 200, "a lattice tower against a dark blue sky"),
    Shot("hubble_field", "hubble_deep_field.jpg", 0, 0, 872, 1000, "hundreds of galaxies on a black sky"),
    Shot("hubble_left", "hubble_deep_field.jpg", 100, 0, 700, 420, "many small galaxies on a black sky"),
    Shot(
        "hubble_strip",
        "hubble_deep_field.jpg",
        400,
        100,
        420,
        840,
        "a wide strip of the sky with distant galaxies",
    ),
    Shot(
        "photographer",
        "camera.png",
        40,
        60,
        440,
        330,
        "a man in a dark coat behind a camera on a tripod, black and white",
    ),
    Shot(
        "photographer_lawn",
        "camera.png",
        60,
        0,
        340,
        512,
        "a photographer with a tripod on a lawn, black and white",
    ),
    Shot("motorcycle", "motorcycle_left.png", 60, 80, 400, 600, "a red motorcycle in a garage"),
    Shot("motorcycle_wheel", "motorcycle_left.png", 200, 60, 280, 260, "the rear wheel of a red motorcycle"),
    Shot(
        "coins_rows",
        "coins.png",
        0,
        0,
        303,
        384,
        "four rows of ancient coins on a dark cloth, black and white",
    ),
    Shot("grass_blades", "grass.png", 0, 0, 512, 400, "blades of grass, black and white"),
)
"""The 24 crops."""


def write_photographs(folder: Path) -> int:
    """Write each shot as `<name>.jpg` or `<name>.png` with its caption in `<name>.txt`.

    Every fifth shot is a JPEG, so that the demo has both formats. Existing files are not overwritten, so a
    second demo has unchanged sources, and edited files keep their edits.

    Returns:
        The number of new files.
    """
    import skimage

    bundled = Path(skimage.__file__).parent / "data"
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for number, shot in enumerate(SHOTS):
        image = folder / f"{shot.name}{'.jpg' if number % 5 == 0 else '.png'}"
        caption = image.with_suffix(".txt")
        if not image.exists():
            box = (shot.left, shot.top, shot.left + shot.width, shot.top + shot.height)
            with Image.open(bundled / shot.photograph) as photograph:
                photograph.convert("RGB").crop(box).save(image, quality=92)
            written += 1
        if not caption.exists():
            caption.write_text(shot.caption + "\n", encoding="utf-8")
            written += 1
    return written


if __name__ == "__main__":
    target = Path(sys.argv[1])
    number = write_photographs(target)
    print(f"demo photographs: {len(SHOTS)} pictures with captions in {target}, {number} new files")
