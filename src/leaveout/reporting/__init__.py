"""The report: one self-contained page about a run, its scores, and how far to trust them.

``gather`` turns a ``topic`` (answers about a run, and its data) into the plain data of ``content``; ``page`` builds the
HTML from that alone. Nothing is computed here: ``lo.report`` and ``study.report`` ask for what is missing.
"""

from leaveout.reporting.gather import gather
from leaveout.reporting.page import Page, page
from leaveout.reporting.show import Show
from leaveout.reporting.topic import Topic

__all__ = ["Page", "Show", "Topic", "gather", "page"]
