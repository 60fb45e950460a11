"""Errors say what, where and how to fix it, in that order."""

import pickle

from pipeline.errors import BucketError


def test_an_error_shows_what_where_and_fix_on_aligned_lines() -> None:
    error = BucketError("resolution 1000 is wrong", where="flowers.yaml:14", fix="use 960\nor 1024")
    lines = str(error).splitlines()
    assert lines == [
        "resolution 1000 is wrong",
        "  where: flowers.yaml:14",
        "  fix:   use 960",
        "         or 1024",
    ]


def test_an_error_survives_a_process_boundary() -> None:
    error = BucketError("what", where="where", fix="fix")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is BucketError
    assert (again.what, again.where, again.fix) == ("what", "where", "fix")
