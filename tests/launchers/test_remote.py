"""What all launchers on other machines have in common."""

import pytest

from launchers.remote import RemoteLauncher


class Incomplete(RemoteLauncher):
    """A launcher that cannot encode."""


def test_a_launcher_that_cannot_encode_is_rejected_when_it_is_created() -> None:
    with pytest.raises(TypeError, match="encode"):
        Incomplete()
