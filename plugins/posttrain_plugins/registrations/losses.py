"""The losses, by family."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins.losses"

TOKEN = [
    Registration("nll", "Negative log-likelihood of the supervised tokens", f"{_HERE}.token.nll:Nll"),
]
PREFERENCE = [
    Registration(
        "sigmoid",
        "DPO's logistic loss on the implicit reward margin",
        f"{_HERE}.preference.sigmoid:Sigmoid",
        reference="https://arxiv.org/abs/2305.18290",
    ),
]
THREE_WAY: list[Registration] = []
UNPAIRED: list[Registration] = []
REWARD: list[Registration] = []
PROCESS_REWARD: list[Registration] = []

LOSSES = [*TOKEN, *PREFERENCE, *THREE_WAY, *UNPAIRED, *REWARD, *PROCESS_REWARD]
