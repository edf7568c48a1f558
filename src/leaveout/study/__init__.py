"""One place of questions and answers about a run."""

from leaveout.study.study import Study

__all__ = ["Study"]
