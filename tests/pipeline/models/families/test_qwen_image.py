from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diffusers import QwenImagePipeline

from demo.tiny_models import make_tiny_qwen_image
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.qwen_image_case import QwenImageCase


class TextToImageCase(QwenImageCase):
    pipeline_class = QwenImagePipeline

    def make(self, folder: Path) -> None:
        make_tiny_qwen_image(folder)


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(TextToImageCase())
