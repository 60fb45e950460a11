from __future__ import annotations

import pytest
from transformers.utils import import_utils

from pipeline.models.missing_package import install_command


@pytest.mark.parametrize(
    ("message", "package"),
    [
        ("BS4_IMPORT_ERROR", "beautifulsoup4"),
        ("AV_IMPORT_ERROR", "av"),
        ("SKLEARN_IMPORT_ERROR", "scikit-learn"),
        ("TORCHVISION_IMPORT_ERROR", "torchvision"),
        ("SENTENCEPIECE_IMPORT_ERROR", "sentencepiece"),
        ("PROTOBUF_IMPORT_ERROR", "protobuf"),
    ],
)
def test_the_command_is_in_the_messages_of_transformers(message: str, package: str) -> None:
    error = ImportError(getattr(import_utils, message).format("AClass"))
    assert install_command(error) == f"pip install {package}"


def test_an_error_that_names_no_package_has_no_command() -> None:
    assert install_command(ModuleNotFoundError("No module named 'cv2'", name="cv2")) is None
    assert install_command(ImportError(import_utils.TORCHCODEC_IMPORT_ERROR.format("AClass"))) is None
    assert install_command(ValueError("run pip install example")) is None
