"""A short soak: each command killed a few times. ``python tests/soak.py`` does it at length."""

import pytest

from soak import COMMANDS, Soak


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_ends_as_if_it_had_not_been(name, tmp_path):
    assert Soak(tmp_path).killed(name, 2) >= 2
