"""``ImplicitEuler``: a step that no τ makes unstable."""

from diffusion_mp.updates.theta_step import ThetaStep


class ImplicitEuler(ThetaStep):
    r"""One implicit Euler step of Eq. 10 of TfD (Wu, Wipf & Yan, 2025) with leak, for symmetric couplings.

    .. math:: (I + \tau (\Delta + \kappa)) x' = v + \tau \beta h

    The step starts at the values v (the state itself unless given). Where Δ is positive semidefinite (the conservative
    form of any non-negative S, the residual form of a symmetrically normalised one) it never expands, at any τ.
    Where the coupling knows its eigenvectors (`NeumannCoupling`), it is solved in them. For others it is matrix-free
    conjugate gradients; derivatives come from the implicit function theorem, so memory does not grow with the
    iterations; once differentiable.

    Args:
        tau: step size τ > 0, as large as wanted.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        beta: weight β of the source h; needs ``source`` in the call unless zero.
        leak: κ ≥ 0.
        tol: relative residual of every (head, channel) column; see `SolvedUpdate` for the default.
        max_iter: iterations of conjugate gradients at most.

    Shapes:
        x, values, source [N, H, D]; result [N, H, D].

    Raises:
        CouplingMismatchError: the coupling is not symmetric.
        ConvergenceError: ``max_iter`` is not enough or the operator is not positive definite.
        ValueError: an argument out of range, a missing source, shapes that do not fit.
    """

    theta = 1.0
