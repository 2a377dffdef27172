"""Options as TRL and transformers spell them, where that means exactly what an option here does.

Defaults stay those of this project: a synonym says another name, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

SYNONYMS: Mapping[str, str] = {
    "model_revision": "model.revision",
    "dataset_config": "dataset.subset",
    "dataset_train_split": "dataset.source_split",
    "max_seq_length": "max_length",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "lora_modules_to_save": "lora.modules_to_save",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
    "bnb_4bit_quant_type": "quantization.type",
    "use_bnb_nested_quant": "quantization.double",
    "activation_checkpointing": "gradient_checkpointing",
    "loss_type": "loss",
    "beta": "loss.beta",
    "label_smoothing": "loss.label_smoothing",
    "f_divergence_type": "loss.f_divergence_type",
    "f_alpha_divergence_coef": "loss.f_alpha_divergence_coef",
    "discopop_tau": "loss.discopop_tau",
    "desirable_weight": "loss.desirable_weight",
    "undesirable_weight": "loss.undesirable_weight",
    "cpo_alpha": "loss.cpo_alpha",
    "tpo_alpha": "loss.tpo_alpha",
}
"""Options of this command line by other names of theirs."""

COMMANDS: Mapping[str, str] = {
    "dataset_test_split": "evaluate on it with --eval_dataset NAME --eval_dataset.source_split test",
    "dataset_streaming": "it is --dataset.stream 1000, which reads so many first rows",
    "dataset_text_field": "it is --dataset.columns '{OLD: text}'",
    "overwrite_output_dir": "it is --overwrite",
    "alpha": "it is --loss alphapo --loss.alpha 0.25, or that of adapters: --lora.alpha 32",
    "use_cpu": "it is --gpus 0, which is the default",
    "no_cuda": "it is --gpus 0, which is the default",
    "chat_template_path": "it is --model.template NAME, or --model.template ./FILE.jinja",
    "model_init_kwargs": "options of `model.load` follow a dot, as in --model.revision",
    "eval_strategy": "it is --eval_steps 100 beside --eval_dataset; leave it out where nothing is evaluated on",
    "evaluation_strategy": "it is --eval_steps 100 beside --eval_dataset",
    "do_eval": "it is --eval_dataset; leave it out",
}
"""Options whose place is taken by one of the command, or of what it loads."""


def known(words: Sequence[str], own: Collection[str] = ()) -> list[str]:
    """Return words of a command line with synonyms as options are called here.

    Args:
        words: The words.
        own: Options of the trainer, which stay what they are.
    """
    return [_known(word, own) if word.startswith("--") else word for word in words]


def known_options(options: Mapping[str, object], own: Collection[str] = ()) -> dict[str, object]:
    """Return options of a file in the same way."""
    return {called(str(name), own): value for name, value in options.items()}


def called(name: str, own: Collection[str] = ()) -> str:
    """Return what an option is called here."""
    plain = name.replace("-", "_")
    return name if plain in own else SYNONYMS.get(plain, name)


def _known(word: str, own: Collection[str]) -> str:
    name, equals, value = word.removeprefix("--").partition("=")
    return f"--{called(name, own)}{equals}{value}"
