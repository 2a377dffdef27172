"""The hook specifications. pluggy registers plugins here; nothing hot runs through it.

A plugin module names the core API it was written for, `POSTTRAIN_API = ">=1,<2"`, and implements any of these hooks
with `@posttrain.hookimpl`. Each returns light registrations, so a plugin's module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from posttrain.contracts.registration import Registration

API_VERSION = 1
"""The version of these hooks and of the contracts. It rises when a plugin written for the old one would break."""

PROJECT = "posttrain"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def posttrain_stages() -> Sequence[Registration]:
    """Register stages: targets are subclasses of `posttrain.Stage`."""
    return ()


@hookspec
def posttrain_trainers() -> Sequence[Registration]:
    """Register trainers: targets are subclasses of `posttrain.Trainer`; each is a stage too."""
    return ()


@hookspec
def posttrain_losses() -> Sequence[Registration]:
    """Register losses: targets satisfy `posttrain.Loss`."""
    return ()


@hookspec
def posttrain_backends() -> Sequence[Registration]:
    """Register backends, how the ranks of a training work together: targets are subclasses of `posttrain.Backend`."""
    return ()


@hookspec
def posttrain_callbacks() -> Sequence[Registration]:
    """Register callbacks, what joins a training beside its loss: targets are subclasses of `posttrain.Callback`."""
    return ()


@hookspec
def posttrain_formats() -> Sequence[Registration]:
    """Register formats of dataset rows: targets are subclasses of `posttrain.Format`."""
    return ()


@hookspec
def posttrain_rewards() -> Sequence[Registration]:
    """Register rewards: targets satisfy `posttrain.Reward`."""
    return ()


@hookspec
def posttrain_generators() -> Sequence[Registration]:
    """Register generators of synthetic rows: targets satisfy `posttrain.Generator`."""
    return ()


@hookspec
def posttrain_rules() -> Sequence[Registration]:
    """Register hand-off rules: targets are subclasses of `posttrain.Rule`."""
    return ()


@hookspec
def posttrain_runners() -> Sequence[Registration]:
    """Register runners: targets satisfy `posttrain.contracts.runner.Runner`."""
    return ()


@hookspec
def posttrain_trackers() -> Sequence[Registration]:
    """Register trackers: targets satisfy `posttrain.contracts.tracker.Tracker`."""
    return ()


@hookspec
def posttrain_commands() -> Sequence[Registration]:
    """Register command-line verbs: targets are typer-compatible functions, imported when the verb is called.

    A target may also be a tuple of registrations of such functions: a group of verbs, such as `posttrain data`.
    """
    return ()


@hookspec
def posttrain_recipes() -> Sequence[Registration]:
    """Register recipes: targets are paths of pipeline files."""
    return ()
