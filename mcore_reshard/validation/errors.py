"""What keeps a validation from being run."""


class ValidationError(RuntimeError):
    """The validation could not be run; this says nothing about the plan."""
