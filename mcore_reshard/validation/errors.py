"""Errors of validations that cannot run."""


class ValidationError(RuntimeError):
    """The validation could not be run; this says nothing about the plan."""


class ProcessError(RuntimeError):
    """A process failed, died or was still running at the deadline; the message has its index and stack."""
