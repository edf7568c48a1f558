"""A bar with rate and remaining time on what takes long, one at a time, and nothing where nobody looks."""

import time

import pytest

from leaveout import Resources
from leaveout.compute import progress


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, as far as rich can tell."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(progress, "MOMENT", 0.1)


def slowly(count, seconds=0.15):
    for number in range(count):
        time.sleep(seconds)
        yield number


def test_long_work_shows_a_bar_with_rate_and_remaining_time(terminal, capsys):
    assert list(Resources().track(slowly(6), 6, "digging")) == list(range(6))
    shown = capsys.readouterr().err
    assert "digging" in shown
    assert "5/6" in shown
    assert "s each" in shown
    assert "left" in shown


def test_short_work_shows_none(terminal, capsys):
    assert list(Resources().track(range(5), 5, "digging")) == list(range(5))
    assert "digging" not in capsys.readouterr().err


def test_work_within_work_shows_none_of_its_own(terminal, capsys):
    for _ in Resources().track(range(2), 2, "outer"):
        assert list(Resources().track(slowly(3), 3, "inner")) == [0, 1, 2]
    shown = capsys.readouterr().err
    assert "outer" in shown
    assert "inner" not in shown
    list(Resources().track(slowly(3), 3, "after"))
    assert "after" in capsys.readouterr().err


def test_the_bar_ends_with_the_work_also_where_it_fails(terminal, capsys):
    def broken():
        yield from slowly(2)
        raise ValueError("a stone")

    with pytest.raises(ValueError, match="a stone"):
        list(Resources().track(broken(), 5, "digging"))
    assert not progress._SHOWING
    left_early = Resources().track(slowly(5), 5, "digging")
    next(left_early)
    left_early.close()
    assert not progress._SHOWING


def test_nothing_is_shown_where_nobody_looks(monkeypatch, capsys):
    monkeypatch.setattr(progress, "MOMENT", 0.05)
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert list(Resources().track(slowly(2), 2, "digging")) == [0, 1]
    assert list(Resources(progress=False).track(slowly(2), 2, "digging")) == [0, 1]
    assert capsys.readouterr() == ("", "")


def test_the_time_left_covers_every_shard(terminal, capsys):
    for number in range(3):
        with progress.part(number, 3):
            list(Resources().track(slowly(3), 3, "digging"))
    shown = capsys.readouterr().err
    assert "5/9" in shown
    assert "8/9" in shown
