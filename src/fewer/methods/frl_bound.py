"""Theorem 1 of FRL: a bound on the gradient of the prepared model.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Theorem 1 and Eq 5.
"""

from __future__ import annotations

from fewer.errors import SettingError


def convergence_error(
    meta_lr: float,
    rounds: int,
    batch_size: int,
    clients: int,
    *,
    smoothness: float,
    sample_variance: float,
    client_variance: float,
) -> float:
    """ε(β, R, |D|, K) of Theorem 1, which the bound of Eq 5 approaches with more episodes.

    ε = β L 2^(R+2) (V_d / |D| + V_p / K), for L-smooth losses whose gradients vary by V_d over the samples of a client
    and by V_p over clients, and for α of at most 1 / L.
    """
    if min(batch_size, clients) < 1:
        raise SettingError(f"batch_size and clients must be >= 1, got batch_size = {batch_size}, clients = {clients}")
    return meta_lr * smoothness * 2.0 ** (rounds + 2) * (sample_variance / batch_size + client_variance / clients)


def convergence_bound(episodes: int, gap: float, meta_lr: float, error: float) -> float:
    """The bound of Eq 5 on the mean of E‖∇F(φ)‖² over T episodes, with `gap` = F(φ⁰) − F(φ*) and `error` = ε."""
    if episodes < 1 or meta_lr <= 0:
        raise SettingError(f"episodes must be >= 1 and meta_lr > 0, got episodes = {episodes}, meta_lr = {meta_lr:g}")
    return 4 * gap / (meta_lr * episodes) + error
