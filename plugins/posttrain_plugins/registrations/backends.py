"""How the ranks of a training work together."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins.backends.catalogue"

BACKENDS = [
    Registration("single", "One process", f"{_HERE}:SingleProcess"),
    Registration("ddp", "Data parallel: the whole model on every rank", f"{_HERE}:DataParallel"),
    Registration(
        "fsdp2",
        "Weights, gradients and optimizer state split over the ranks",
        f"{_HERE}:FullyShardedDataParallel",
        reference="https://arxiv.org/abs/2304.11277",
    ),
    Registration(
        "deepspeed",
        "DeepSpeed's ZeRO, stages 1 to 3",
        f"{_HERE}:DeepSpeed",
        reference="https://arxiv.org/abs/1910.02054",
        requires=("deepspeed",),
    ),
]
