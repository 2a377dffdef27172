"""Options as TRL and transformers spell them, where that means exactly what an option here does.

Defaults stay those of this project: a synonym says another name, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

Taken = Mapping[str, object] | None
"""What an option of another tool comes to; None where it is to be refused."""
Exact = Callable[["Given"], Taken]

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

CHOSEN: Mapping[str, tuple[str, Collection[str]]] = {
    "report_to": ("callbacks", frozenset({"tensorboard", "trackio", "wandb"})),
}
"""Options that name what another option names here in the same words, and those words."""


@dataclass(frozen=True)
class Given:
    """An option of another tool, as it was given, and what stands beside it.

    Args:
        value: Its value; true for one without.
        names: All options that are given, as they are called here.
        loss: The loss that is named.
        own: Options of the trainer.
        trainer: Its name.
    """

    value: object
    names: Collection[str]
    loss: object
    own: Collection[str]
    trainer: str

    @property
    def on(self) -> bool:
        """Whether it is a truth value that is true."""
        return self.value is True or str(self.value).lower() == "true"

    @property
    def off(self) -> bool:
        """Whether it is a truth value that is false."""
        return self.value is False or str(self.value).lower() == "false"


def _gamma(*losses: str) -> Exact:
    return lambda given: {"loss.gamma": given.value} if given.loss in losses else None


def _truncation(given: Given) -> Taken:
    return {"truncation": given.value} if given.value == "keep_start" else None


def _weighting(given: Given) -> Taken:
    if given.off:
        return {}
    return {"weighting": "wpo"} if given.on and "weighting" in given.own else None


def _adapters(given: Given) -> Taken:
    return {} if given.off or (given.on and any(name.startswith("lora.") for name in given.names)) else None


def _dropout(given: Given) -> Taken:
    return {} if given.on and given.trainer in _WITHOUT_DROPOUT else None


def _reference(given: Given) -> Taken:
    return {} if (given.on or given.off) and "reference_sync" in given.own else None


def _reports(given: Given) -> Taken:
    return {} if given.value in ("none", ["none"]) else None


_WITHOUT_DROPOUT = (
    "train.dpo",
    "train.kto",
    "train.cpo",
    "train.orpo",
    "train.tpo",
    "train.reward",
    "train.prm",
)

EXACT: Mapping[str, Exact] = {
    "simpo_gamma": _gamma("simpo", "alphapo"),
    "tpo_l_gamma": _gamma("tpo_l"),
    "truncation_mode": _truncation,
    "use_weighting": _weighting,
    "use_peft": _adapters,
    "disable_dropout": _dropout,
    "precompute_ref_log_probs": _reference,
    "report_to": _reports,
}
"""Options that mean the same with some values, or beside some options: what they come to, None where they do not."""


def known(words: Sequence[str], own: Collection[str] = (), trainer: str = "") -> list[str]:
    """Return words of a command line with synonyms as options are called here.

    Args:
        words: The words.
        own: Options of the trainer, which stay what they are.
        trainer: Its name.
    """
    groups: list[list[str]] = []
    for word in (_known(word, own) if word.startswith("--") else word for word in words):
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    values = {_name(group): _given_value(group) for group in groups}
    return [word for group in groups for word in _exact_words(group, values, own, trainer)]


def _name(group: Sequence[str]) -> str:
    return group[0].removeprefix("--").partition("=")[0]


def _given_value(group: Sequence[str]) -> object:
    _, equals, value = group[0].partition("=")
    found = [*([value] if equals else []), *group[1:]]
    return True if not found else found[0] if len(found) == 1 else found


def _exact_words(
    group: list[str], values: Mapping[str, object], own: Collection[str], trainer: str
) -> list[str]:
    name = _name(group)
    taken = _exact(name, _given_value(group), values, own, trainer) if group[0].startswith("--") else None
    if taken is None:
        return group
    return [word for option, value in taken.items() for word in (f"--{option}", str(value))]


def _exact(
    name: str, value: object, values: Mapping[str, object], own: Collection[str], trainer: str
) -> Taken:
    """Return what an option of another tool comes to here; None where that is not exactly anything."""
    plain = name.replace("-", "_")
    if plain in own or plain not in EXACT:
        return None
    return EXACT[plain](Given(value, values.keys(), values.get("loss"), own, trainer))


def known_options(
    options: Mapping[str, object], own: Collection[str] = (), trainer: str = ""
) -> dict[str, object]:
    """Return options of a file in the same way."""
    values = {called(str(name), own): value for name, value in options.items()}
    made: dict[str, object] = {}
    for name, value in values.items():
        taken = _exact(name, value, values, own, trainer)
        made |= {name: value} if taken is None else taken
    return made


def called(name: str, own: Collection[str] = ()) -> str:
    """Return what an option is called here."""
    plain = name.replace("-", "_")
    return name if plain in own else SYNONYMS.get(plain, name)


def _known(word: str, own: Collection[str]) -> str:
    name, equals, value = word.removeprefix("--").partition("=")
    return f"--{called(name, own)}{equals}{value}"
