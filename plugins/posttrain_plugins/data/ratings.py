"""Ratings of players from who beat whom: the Bradley-Terry model with a prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from posttrain.errors import StageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ROUNDS = 200
CLOSE = 1e-9
"""Largest change of a rating in a round when the fit has come to its end."""
ROUNDING = 1e-12
"""Share of a likelihood that may be lost to rounding."""


def ratings(wins: Mapping[tuple[int, int], float], players: int, prior: float) -> list[float]:
    """Return the most likely ratings, as differences in log-odds.

    P(i beats j) = σ(θᵢ − θⱼ) (Bradley and Terry 1952; Hunter 2004, https://doi.org/10.1214/aos/1079120141). Every
    player is given `prior` wins and as many losses against one more player whose rating is 0, so that who has won, or
    lost, every time stays finite, and players that were never compared with each other are comparable (as in Caron and
    Doucet 2012, https://arxiv.org/abs/1011.1761). That likelihood is strictly concave: it has one maximum, which damped
    steps of Newton's method find.

    Args:
        wins: How often (the first player, the second one) ended with the first one's win.
        players: How many players there are, numbered from 0.
        prior: Greater than 0.

    Raises:
        StageError: The fit does not come to an end.
    """
    import numpy as np

    won = np.zeros((players, players))
    for (winner, loser), count in wins.items():
        won[winner, loser] += count
    found = np.zeros(players)
    for _ in range(ROUNDS):
        step = _newton(found, won, prior)
        size = 1.0
        reached = _likelihood(found, won, prior)
        while (
            reached - _likelihood(found + size * step, won, prior) > ROUNDING * abs(reached) and size > CLOSE
        ):
            size /= 2
        found = found + size * step
        if np.abs(step).max() < CLOSE:
            return [float(rating) for rating in found]
    raise StageError(
        "ratings did not settle", found=f"a change of {np.abs(step).max():.3g} after {ROUNDS} rounds"
    )


def _likelihood(of: Floats, won: Floats, prior: float) -> float:
    """Return the log-likelihood of ratings."""
    import numpy as np

    gaps = of[:, None] - of[None, :]
    imagined = np.logaddexp(0, of) + np.logaddexp(0, -of)
    return float(-(won * np.logaddexp(0, -gaps)).sum() - prior * imagined.sum())


def _newton(of: Floats, won: Floats, prior: float) -> Floats:
    """Return the step to the maximum of the parabola that fits the likelihood here."""
    import numpy as np

    lost = _sigmoid(of[None, :] - of[:, None])
    own = _sigmoid(of)
    surprise = won * lost
    gradient = surprise.sum(1) - surprise.sum(0) + prior * (1 - 2 * own)
    curvature = (won + won.T) * lost * lost.T
    hessian = np.diag(curvature.sum(1) + 2 * prior * own * (1 - own)) - curvature
    step: Floats = np.linalg.solve(hessian, gradient)
    return step


def _sigmoid(of: Floats) -> Floats:
    import numpy as np

    found: Floats = np.exp(-np.logaddexp(0, -of))
    return found
