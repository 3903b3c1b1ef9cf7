"""How much a rollout still has to make, from what is believed of lengths, its finished siblings and its prompt's past.

    prec = 1/s_b^2 + n/s_w^2 + 1/s_h^2          n finished siblings, a history of mean m_h where there is one
    m    = (mu/s_b^2 + sum ln L/s_w^2 + m_h/s_h^2) / prec          s^2 = s_w^2 + 1/prec
    F    = Phi((ln d - m)/s)                    d tokens made
    Q_q  = exp(m + s Phi^-1(1 - (1 - q)(1 - F))), cut at the cap

With s_b = 0 siblings and history say nothing, and the rule is equal progress: rollouts of equal length look the same.

Promises: pure; about a microsecond a call (a queue is keyed with it). Source: our scheduling study, section 3, step 2.
Phi is `math.erfc` on the side of the tail, so that nothing is lost far out; Phi^-1 is `statistics.NormalDist`'s
(Wichura, AS 241; relative error about 1e-16).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from gruppetto.scheduler.beliefs.lengths import LengthBelief

PESSIMISTIC = 0.97
"""The quantile that rollouts are ordered by: what is unknown counts as long."""

_inverse = NormalDist().inv_cdf
_ROOT_HALF = math.sqrt(0.5)
_FAR = 30.0
"""Standard deviations beyond which a normal tail is exp(-z^2/2) to the digits that matter, and soon no float."""
_CERTAIN = 1e-9
"""A standard deviation of ln L below this is none."""
_LEAST = 1e-300
_MOST = 1 - 2.0**-53


class Siblings(NamedTuple):
    """The finished members of a rollout's group."""

    finished: int = 0
    log_sum: float = 0.0
    """Sum of ln(tokens)."""


class History(NamedTuple):
    """What an earlier epoch says of a prompt."""

    log_mean: float
    """Mean of ln(tokens) of its group then."""
    s_h: float
    """Standard deviation of this epoch's group mean around that; infinite where it says nothing."""


NO_SIBLINGS = Siblings()


def remaining_quantile(
    belief: LengthBelief,
    made: int,
    siblings: Siblings = NO_SIBLINGS,
    history: History | None = None,
    q: float = PESSIMISTIC,
) -> float:
    """Tokens still to make, at quantile `q` (0 < q < 1) given that `made` were not the end.

    At least 1 and at most `cap - made`; 0 where the cap is reached.
    """
    cap = belief.cap
    if made >= cap:
        return 0.0
    m, s = log_length(belief, siblings, history)
    if s < _CERTAIN:
        return max(1.0, min(math.exp(min(m, 700.0)), cap) - made)
    tail, z = 1 - q, -math.inf
    if made > 0:
        z = (math.log(made) - m) / s
        if z < _FAR:
            tail *= 0.5 * math.erfc(z * _ROOT_HALF)
    reach = -_inverse(tail) if z < _FAR else math.sqrt(z * z - 2 * math.log(tail))
    return max(1.0, min(math.exp(min(m + s * reach, 700.0)), cap) - made)


def sample_remaining(
    belief: LengthBelief,
    made: int,
    siblings: Siblings,
    history: History | None,
    u: float,
) -> float:
    """Tokens still to make, at `u` of the same posterior: a draw where `u` is uniform in (0, 1).

    A share `cap_share` of rollouts runs to the cap, the rest is the posterior below it. The longer a rollout has gone
    on, the likelier it is one of the first; one that has outrun the posterior runs to the cap. At least 1 and at most
    `cap - made`; 0 where the cap is reached.
    """
    cap = belief.cap
    if made >= cap:
        return 0.0
    m, s = log_length(belief, siblings, history)
    if s < _CERTAIN:
        return _sample_certain(belief, made, math.exp(min(m, 700.0)), u)
    beyond = 0.5 * math.erfc((math.log(cap) - m) / s * _ROOT_HALF)
    left = 0.5 * math.erfc((math.log(made) - m) / s * _ROOT_HALF) if made > 0 else 1.0
    body = (1 - belief.cap_share) * (left - beyond) / (1 - beyond) if beyond < 1 else 0.0
    share = body / (body + belief.cap_share) if body > 0 else 0.0
    if u >= share:
        return float(cap - made)
    tail = left - u / share * (left - beyond)
    tail = min(max(tail, _LEAST), _MOST)
    return max(1.0, min(math.exp(min(m - s * _inverse(tail), 700.0)), cap) - made)


def log_length(belief: LengthBelief, siblings: Siblings, history: History | None) -> tuple[float, float]:
    """(m, s): mean and standard deviation of ln L of a member that is not finished."""
    within = belief.s_w * belief.s_w
    if belief.s_b < _CERTAIN:
        return belief.mu, belief.s_w
    count = siblings.finished
    if count and belief.s_w < _CERTAIN:
        return siblings.log_sum / count, 0.0
    precision = 1 / (belief.s_b * belief.s_b)
    weighted = belief.mu * precision
    if count:
        precision += count / within
        weighted += siblings.log_sum / within
    if history is not None:
        if history.s_h < _CERTAIN:
            return history.log_mean, belief.s_w
        told = 1 / (history.s_h * history.s_h)
        precision += told
        weighted += history.log_mean * told
    return weighted / precision, math.sqrt(within + 1 / precision)


def _sample_certain(belief: LengthBelief, made: int, length: float, u: float) -> float:
    """The draw where nothing varies but who runs away."""
    ends_later = length > made and length < belief.cap
    if not ends_later or u >= 1 - belief.cap_share:
        return float(belief.cap - made)
    return max(1.0, length - made)
