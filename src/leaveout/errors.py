"""What leaveout refuses, and why: every error says in one sentence what is wrong and what to do."""


class LeaveoutError(Exception):
    """The base of every error that leaveout raises on purpose."""


class InputError(LeaveoutError, ValueError):
    """An argument cannot be used as it was given."""


class UnsupportedError(LeaveoutError):
    """A model or optimizer that cannot be handled exactly."""


class RunError(LeaveoutError):
    """A run directory is missing, incomplete, taken or damaged."""


class MismatchError(LeaveoutError):
    """Data or task differ from what the run was trained with."""
