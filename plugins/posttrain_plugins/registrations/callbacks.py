"""The callbacks: what joins a training beside its loss."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins.callbacks"

CALLBACKS = [
    Registration(
        "completions", "Show sampled completions every few steps", f"{_HERE}.completions:Completions"
    ),
    Registration(
        "bema",
        "Put out a bias-corrected moving average of the weights",
        f"{_HERE}.bema:Bema",
        numerics=2,
        reference="https://arxiv.org/abs/2508.00180",
    ),
    Registration(
        "merge_checkpoints",
        "Put out the mean of the weights at the last few steps",
        f"{_HERE}.merge_checkpoints:MergeCheckpoints",
        reference="https://arxiv.org/abs/1803.05407",
    ),
    Registration(
        "divergence",
        "Fail a training that explodes, at the step where it does",
        f"{_HERE}.divergence:Divergence",
    ),
    Registration(
        "tensorboard",
        "Write metrics for TensorBoard",
        f"{_HERE}.tensorboard:TensorBoard",
        requires=("tensorboard",),
    ),
    Registration(
        "wandb",
        "Report metrics to Weights & Biases, offline by default",
        f"{_HERE}.wandb:Wandb",
        requires=("wandb",),
    ),
    Registration(
        "trackio",
        "Report metrics to trackio on this machine",
        f"{_HERE}.trackio:Trackio",
        requires=("trackio",),
    ),
    Registration("hub_upload", "Upload the finished policy to the hub", f"{_HERE}.hub_upload:HubUpload"),
]
