"""Errors of validations that cannot run."""


class ValidationError(RuntimeError):
    """The validation could not be run; this says nothing about the plan."""


class BuildError(RuntimeError):
    """Megatron-Bridge or the engine cannot build a model on its mesh, or not load it; the message has its own words."""


class ProcessError(RuntimeError):
    """A process failed, died or was still running at the deadline; the message has its index and stack.

    Of a process that raised: `index` is its number, and `reason` the exception in one text, as in "ValueError: no such model".
    """

    def __init__(self, message: str, index: int = -1, reason: str = "") -> None:
        super().__init__(message)
        self.index, self.reason = index, reason
