"""Types of the recipe's keys that hold a path or an address."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

from pipeline.recipe.validators import check_address, check_folder, check_not_manifest, check_output
from pipeline.storage.addresses import Address, Url, is_url


def _address(value: object, as_path: ValidatorFunctionWrapHandler) -> Address:
    return Url(value) if isinstance(value, str) and is_url(value) else as_path(value)


# The schema is that of a path, so that a value of the wrong type is reported once. A union of Path and Url
# would report it once per member.
_PATH_OR_URL = [WrapValidator(_address), BeforeValidator(check_address), PlainSerializer(str)]
if TYPE_CHECKING:
    RecipeAddress = Address
    FolderAddress = Address
    OutputFolder = Path
else:
    RecipeAddress = Annotated[Path, *_PATH_OR_URL]
    FolderAddress = Annotated[Path, *_PATH_OR_URL, BeforeValidator(check_not_manifest)]
    # A recipe file may name an address. Loading replaces it with the path of the working copy.
    _wrap, *_checks = _PATH_OR_URL
    _output = (BeforeValidator(check_output), *_checks, BeforeValidator(check_not_manifest))
    OutputFolder = Annotated[Path, _wrap, *_output]
FolderPath = Annotated[Path, BeforeValidator(check_folder)]
