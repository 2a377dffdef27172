"""Models that give numbers: rewards for answers, log-odds for steps. Opened, tried and saved.

They are transformers' own classes for sequences and tokens, so that `AutoModelForSequenceClassification` and
`AutoModelForTokenClassification` open what is saved here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.errors import StageError, StoreError
from posttrain_plugins.models.adapters import merged, open_adapter, save_adapter
from posttrain_plugins.models.artifact import CONFIG, facts_of, write_config
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.models.policy import (
    Policy,
    copy_companions,
    load_as,
    open_policy,
    require_embeddings,
    without_progress_bars,
)
from posttrain_plugins.models.quantized import record
from posttrain_plugins.models.valued_record import Probe, probes_of
from posttrain_plugins.models.wrappers import never_wrapped
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.training.head.value import HEADS, number, value_parts

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain_plugins.training.peft_options import Quantization

AGREES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest difference between a number and the one kept with the model, as a share of it (of 1 where it is smaller), by
the precision it is computed in. A head that was lost is off by about all of it."""
STANDARD = 0.02
"""Standard deviation of a fresh head's weights, where the model's config names none."""


@dataclass(frozen=True)
class Form:
    """How transformers and peft call a kind of model that gives numbers.

    Args:
        architecture: The class that opens it.
        task: What peft calls its task.
        outputs: How many outputs its head has.
    """

    architecture: str
    task: str
    outputs: int


FORMS: Mapping[Kind, Form] = {
    Kind.REWARD_MODEL: Form("AutoModelForSequenceClassification", "SEQ_CLS", 1),
    Kind.PROCESS_REWARD_MODEL: Form("AutoModelForTokenClassification", "TOKEN_CLS", 2),
}


def open_valued(
    artifact: Artifact,
    context: Any,
    kind: Kind,
    outputs: int | None = None,
    *,
    seed: int = 0,
    dtype: str = "float32",
    trainable: bool = False,
    attention: str | None = None,
    device: str = "cpu",
    quantization: Quantization | None = None,
) -> Policy:
    """Open a model that gives numbers, or put a fresh head on a policy, in evaluation mode.

    A model of the kind itself is tried on the conversations kept with it. An adapter on a policy is merged into its
    base in float32 before it gets a head.

    Args:
        artifact: A model of this kind, as weights or as an adapter; or a policy.
        context: Looks up the base of an adapter.
        kind: What is wanted, a key of `FORMS`.
        outputs: Outputs of the head; as many as the kind has by default.
        seed: Decides a fresh head's weights.
        dtype: Precision to compute in.
        trainable: Let gradients reach the weights; of an adapter, only the adapter's and the head's.
        attention: The attention implementation; None leaves the choice to transformers.
        device: Where to put it.
        quantization: Hold all but the head and the embeddings in 4 bits; such weights are frozen.

    Raises:
        StoreError: The adapter does not say what its base is, lacks tensors, or its base is not in the store.
        StageError: There is no such head for this architecture, weights are missing, the head has another number of
            outputs, or the model no longer gives the numbers it was saved with.
    """
    form, encoder = FORMS[kind], Encoder.open(artifact.path)
    outputs = form.outputs if outputs is None else outputs
    loading = _Loading(form, outputs, seed, dtype, attention, quantization, _pooling_pad(encoder))
    base = None if artifact.facts.base is None else context.artifact(artifact.facts.base)
    if artifact.kind is kind and base is not None:
        model = open_adapter(loading.model(base, fresh=base.kind is not kind), artifact.path, trainable)
    elif artifact.kind is Kind.ADAPTER:
        if base is None:
            raise StoreError("the adapter does not say which model it belongs to", where=artifact.ref)
        model, base = loading.on_top_of(_merged(artifact, context, dtype, quantization)), None
    else:
        model = loading.model(artifact, fresh=artifact.kind is not kind)
    model = model.to(device)
    require_embeddings(model, encoder, artifact)
    if base is None:
        model.requires_grad_(trainable and quantization is None)
    opened = Policy(model.eval(), encoder, artifact, base)
    if artifact.kind is kind and quantization is None:
        require_same_numbers(opened.model, artifact.path, dtype)
    return opened


def save_valued(
    directory: Path,
    model: Any,
    source_dir: Path,
    base: str | None = None,
    *,
    initial: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    quantization: Quantization | None = None,
) -> PolicyFacts:
    """Write the files of a model that gives numbers and return its facts.

    Args:
        directory: An existing directory to fill.
        model: A transformers model, or a peft model, of which the adapter and the head alone are written.
        source_dir: A model directory whose tokenizer, chat template and generation config are copied.
        base: Digest of the model that an adapter belongs to; required for a peft model.
        initial: First values of an adapter that was taken out of the base weights.
        weights: The model's tensors by name, where it holds only parts of them; of a peft model, the trained ones.
        quantization: How the base was held while an adapter was trained on it.

    Raises:
        StageError: The head, or a tensor of the adapter, would not be saved.
    """
    if hasattr(model, "peft_config"):
        if base is None:
            raise StageError("an adapter can only be saved with the digest of its base")
        _require_head_kept(model)
        save_adapter(directory, model, base, initial=initial, state=weights)
        write_config(directory / CONFIG, _config_of(model.get_base_model()))
        record(directory, quantization)
    else:
        without_progress_bars()
        with never_wrapped():
            model.save_pretrained(directory, state_dict=None if weights is None else dict(weights))
        write_config(directory / CONFIG, _config_of(model))
    copy_companions(source_dir, directory)
    return facts_of(directory)


def numbers(model: Any, probes: Sequence[Probe]) -> list[list[float]]:
    """Return what a model says at the places of each probe, one probe after the other, without padding."""
    decoder, head = value_parts(model)
    device = next(model.parameters()).device
    found = []
    with evaluating(model):
        for probe in probes:
            tokens = torch.tensor([probe.tokens], device=device)
            hidden = decoder(input_ids=tokens, use_cache=False)[0][0]
            found.append(number(head(hidden[list(probe.places)])).float().tolist())
    return found


def require_same_numbers(model: Any, directory: Path, dtype: str = "float32") -> None:
    """Refuse a model that no longer gives the numbers kept with it.

    Raises:
        StageError: It does not: its head or other weights are not those that were saved.
    """
    probes = probes_of(directory)
    for probe, values in zip(probes, numbers(model, probes), strict=True):
        for found, kept in zip(values, probe.values, strict=True):
            # Not `>`: what is not a number does not agree either.
            if not abs(found - kept) <= AGREES[dtype] * max(1.0, abs(kept)):
                raise StageError(
                    "the model does not give the numbers that were kept when it was saved",
                    where=str(directory),
                    found=f"{found:.6g}",
                    expected=f"{kept:.6g}",
                    fix="get the complete model: its head or other weights are not those that were trained",
                )


@dataclass(frozen=True)
class _Loading:
    """How models with a head for numbers are loaded; see `open_valued`."""

    form: Form
    outputs: int
    seed: int
    dtype: str
    attention: str | None
    quantization: Quantization | None
    pad: int | None

    def model(self, artifact: Artifact, fresh: bool) -> Any:
        """Load the weights of a directory; the head is a fresh one or stands in the files."""
        if not fresh:
            self._require_outputs(artifact.path)
        try:
            with _without_load_report():
                model = load_as(
                    self._architecture,
                    artifact.path,
                    self.dtype,
                    self.attention,
                    self.quantization,
                    made_up=HEADS if fresh else (),
                    whole=HEADS,
                    num_labels=self.outputs,
                )
        except ValueError as error:
            raise self._no_head(str(artifact.facts.architecture)) from error
        return self._finished(model, fresh)

    def on_top_of(self, policy: Any) -> Any:
        """Put a fresh head on the trunk of a policy in memory."""
        config = policy.config
        config.num_labels = self.outputs
        try:
            model = self._architecture.from_config(
                config, dtype=policy.dtype, attn_implementation=self.attention
            )
        except ValueError as error:
            raise self._no_head(str(config.model_type)) from error
        trunk, _ = value_parts(model)
        trunk.load_state_dict(policy.base_model.state_dict())
        return self._finished(model, fresh=True)

    @property
    def _architecture(self) -> Any:
        import transformers

        return getattr(transformers, self.form.architecture)

    def _finished(self, model: Any, fresh: bool) -> Any:
        _, head = value_parts(model)
        if fresh:
            _draw(head, self.seed, getattr(model.config.get_text_config(), "initializer_range", STANDARD))
        for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
            config.pad_token_id = self.pad
        return model

    def _require_outputs(self, directory: Path) -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        if config.num_labels != self.outputs:
            raise StageError(
                "the model's head has another number of outputs",
                where=str(directory),
                found=f"{config.num_labels} ({', '.join(config.architectures or ())})",
                expected=str(self.outputs),
                fix="connect a reward model whose head fits, or start from a policy",
            )

    def _no_head(self, name: str) -> StageError:
        return StageError(
            "transformers has no head for numbers for this architecture",
            found=name,
            expected=f"one that `{self.form.architecture}` knows",
            fix="start from another model, such as a Llama, Qwen, Mistral or Gemma",
        )


def _merged(artifact: Artifact, context: Any, dtype: str, quantization: Quantization | None) -> Any:
    """Return the policy that an adapter makes of its base, as one model."""
    if quantization is not None:
        raise StageError(
            "an adapter cannot be merged into weights in 4 bits",
            where=artifact.ref,
            fix="merge it in a stage of its own before, or leave `quantization` out",
        )
    return merged(open_policy(artifact, context, dtype="float32").model).to(getattr(torch, dtype))


def _draw(head: torch.nn.Module, seed: int, deviation: float) -> None:
    """Draw the weights of a fresh head; biases start at zero."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in head.named_parameters():
            drawn = torch.empty(parameter.shape).normal_(0.0, deviation)
            parameter.copy_(torch.zeros_like(drawn) if name.endswith("bias") else drawn)


def _pooling_pad(encoder: Encoder) -> int | None:
    """Return the id that transformers' own pooling may skip at the end of a row, or None.

    It reads a row's number at the last token that is not padding, by its id. Where that id also ends answers it would
    read before their end; without one it takes rows one at a time and reads their last token, which is right.
    """
    pad = encoder.declared_pad
    return None if pad is None or pad in encoder.stop_ids else pad


def _config_of(model: Any) -> dict[str, Any]:
    """Return a model's config as it is saved: its class is named, and 4 bits belong to memory alone."""
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    config.pop("quantization_config", None)
    return {**config, "architectures": [type(model).__name__], "pad_token_id": model.config.pad_token_id}


def _require_head_kept(model: Any) -> None:
    _, head = value_parts(model)
    if not hasattr(head, "modules_to_save"):
        raise StageError(
            "the head would not be saved with the adapter",
            found="an adapter for another task",
            expected=f"the head ({' or '.join(HEADS)}) among the modules that are trained and saved whole",
        )


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers' report of weights it did not find or need out of the log: `load_as` judges them."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
