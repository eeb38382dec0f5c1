"""The exceptions of the library for which Python and PyTorch have no name."""


class CouplingMismatchError(ValueError):
    """An update or a theorem needs a property that the coupling does not declare, such as symmetry.

    Examples:
        >>> try:
        ...     CrankNicolson(tau=0.5)(x, GATDiffusivity(4)(x, graph))  # softmax over edges is not reversible
        ... except CouplingMismatchError:
        ...     print("refused")
        refused
    """


class SingularSystemError(ValueError):
    """The steady state does not exist or is not unique, because its linear system is singular.

    Examples:
        >>> issubclass(SingularSystemError, Exception)
        True
    """


class ConvergenceError(RuntimeError):
    """An iteration used up its budget before it reached its tolerance.

    Examples:
        >>> issubclass(ConvergenceError, RuntimeError)
        True
    """


class BackendError(RuntimeError):
    """The backend that was selected by name cannot compute this operation."""
