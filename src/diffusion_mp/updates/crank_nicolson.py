"""``CrankNicolson``: the trapezoidal rule, of second order and stable at any τ."""

from diffusion_mp.updates.theta_step import ThetaStep


class CrankNicolson(ThetaStep):
    r"""One trapezoidal step of Eq. 10 of TfD (Wu, Wipf & Yan, 2025) with leak (Crank & Nicolson, 1947).

    .. math:: (I + \tfrac{\tau}{2} (\Delta + \kappa)) x' = (I - \tfrac{\tau}{2} (\Delta + \kappa)) v + \tau \beta h

    That is half a step of `ImplicitEuler`, from v to m, and as far again: x′ = 2m − v. The error of a step is of third
    order in τ. Where Δ is positive semidefinite it never expands, at any τ; but beyond τ = 2/λ the mode of eigenvalue λ
    changes sign, and for τλ → ∞ it hardly decays: for long steps from rough states take `ImplicitEuler`, `HeatKernel`.

    Args:
        tau: step size τ > 0, as large as wanted.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        beta: weight β of the source h; needs ``source`` in the call unless zero.
        leak: κ ≥ 0.
        tol: relative residual of every (head, channel) column, where conjugate gradients are needed; see `SolvedUpdate`
            for the default.
        max_iter: iterations of conjugate gradients at most.

    Shapes:
        x, values, source [N, H, D]; result [N, H, D].

    Raises:
        CouplingMismatchError: the coupling is not symmetric.
        ConvergenceError: ``max_iter`` is not enough or the operator is not positive definite.
        ValueError: an argument out of range, a missing source, shapes that do not fit.
    """

    theta = 0.5
