"""The built-in plugins, announced through the same hooks as anybody's. Imports nothing heavy."""

from __future__ import annotations

from posttrain import Registration, hookimpl

POSTTRAIN_API = ">=1,<2"

_HERE = "posttrain_plugins"


@hookimpl
def posttrain_stages() -> list[Registration]:
    """The first stages."""
    return [
        Registration(
            "data.load",
            "Rows of a JSONL, JSON, CSV, Parquet or Hugging Face dataset",
            f"{_HERE}.data.load:Load",
        ),
        Registration("data.synthetic", "Rows of a seeded generator", f"{_HERE}.data.synthetic:Synthetic"),
        Registration(
            "data.best_of_n",
            "Preference pairs from a policy's own best and worst completions",
            f"{_HERE}.data.best_of_n:BestOfN",
            reference="https://arxiv.org/abs/2112.09332",
        ),
        Registration(
            "model.init", "A small new model with a tokenizer made from the data", f"{_HERE}.models.init:Init"
        ),
        Registration(
            "model.load", "A Hugging Face directory or id, or a GGUF file", f"{_HERE}.models.load:Load"
        ),
        Registration(
            "evaluate", "Greedy generation scored with intervals", f"{_HERE}.evaluation.evaluate:Evaluate"
        ),
        Registration("gate", "Pass, reject or call it inconclusive", f"{_HERE}.evaluation.gate:Gate"),
    ]


@hookimpl
def posttrain_trainers() -> list[Registration]:
    """The trainers; each is a stage too."""
    return [
        Registration("train.sft", "Supervised fine-tuning on completions", f"{_HERE}.trainers.sft:Sft"),
        Registration(
            "train.dpo",
            "Direct preference optimization",
            f"{_HERE}.trainers.dpo:Dpo",
            reference="https://arxiv.org/abs/2305.18290",
        ),
    ]


@hookimpl
def posttrain_losses() -> list[Registration]:
    """One file per loss."""
    return [
        Registration("nll", "Negative log-likelihood of the supervised tokens", f"{_HERE}.losses.nll:Nll"),
        Registration(
            "sigmoid",
            "DPO's logistic loss on the implicit reward margin",
            f"{_HERE}.losses.sigmoid:Sigmoid",
            reference="https://arxiv.org/abs/2305.18290",
        ),
    ]


@hookimpl
def posttrain_backends() -> list[Registration]:
    """How the ranks of a training work together."""
    here = f"{_HERE}.backends.catalogue"
    return [
        Registration("single", "One process", f"{here}:SingleProcess"),
        Registration("ddp", "Data parallel: the whole model on every rank", f"{here}:DataParallel"),
        Registration(
            "fsdp2",
            "Weights, gradients and optimizer state split over the ranks",
            f"{here}:FullyShardedDataParallel",
            reference="https://arxiv.org/abs/2304.11277",
        ),
        Registration(
            "deepspeed",
            "DeepSpeed's ZeRO, stages 1 to 3",
            f"{here}:DeepSpeed",
            reference="https://arxiv.org/abs/1910.02054",
            requires=("deepspeed",),
        ),
    ]


@hookimpl
def posttrain_rewards() -> list[Registration]:
    """The rewards."""
    return [
        Registration(
            "exact", "1 when the completion equals the reference answer", f"{_HERE}.rewards.exact:Exact"
        )
    ]


@hookimpl
def posttrain_generators() -> list[Registration]:
    """The synthetic tasks."""
    return [
        Registration("reverse", "Reverse a string", f"{_HERE}.data.generators:Reverse"),
        Registration("addition", "Add two numbers, digits reversed", f"{_HERE}.data.generators:Addition"),
        Registration("sort_words", "Sort a short list of common words", f"{_HERE}.data.sorting:SortWords"),
    ]


@hookimpl
def posttrain_rules() -> list[Registration]:
    """The hand-off rules, one file each."""
    return [
        Registration(
            "template", "Chat template present and agreed on", f"{_HERE}.handoffs.template:Template"
        ),
        Registration(
            "tokenizer", "Tokenizers and vocabulary sizes agree", f"{_HERE}.handoffs.tokenizer:Tokenizer"
        ),
        Registration(
            "tokens", "End-of-sequence and padding tokens make sense", f"{_HERE}.handoffs.tokens:Tokens"
        ),
        Registration(
            "reference",
            "Preference pairs come from the policy that is trained",
            f"{_HERE}.handoffs.reference:Reference",
        ),
        Registration(
            "dataset-format",
            "The dataset's format is one the stage takes",
            f"{_HERE}.handoffs.dataset_format:DatasetFormat",
        ),
        Registration(
            "leakage", "No evaluation prompt occurs in training data", f"{_HERE}.handoffs.leakage:Leakage"
        ),
        Registration(
            "adapter", "An adapter meets the base it was trained on", f"{_HERE}.handoffs.adapter:Adapter"
        ),
    ]
