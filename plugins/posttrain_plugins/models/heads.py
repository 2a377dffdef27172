"""Heads for numbers on decoders: read from files, or drawn and put on the trunk of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.errors import StageError, StoreError
from posttrain_plugins.models.adapters import merged, open_adapter
from posttrain_plugins.models.policy import load_as, load_model, open_policy
from posttrain_plugins.models.seeing import class_with_head, with_trunk
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.training.head.value import HEADS, value_parts

if TYPE_CHECKING:
    from posttrain_plugins.training.peft_options import Quantization

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

    @property
    def ending(self) -> str:
        """How the names of its classes end."""
        return self.architecture.removeprefix("AutoModel")


FORMS: Mapping[Kind, Form] = {
    Kind.REWARD_MODEL: Form("AutoModelForSequenceClassification", "SEQ_CLS", 1),
    Kind.PROCESS_REWARD_MODEL: Form("AutoModelForTokenClassification", "TOKEN_CLS", 2),
}


@dataclass(frozen=True)
class Loading:
    """How models with a head for numbers are loaded.

    Args:
        form: Which kind they are of.
        outputs: Outputs of the head.
        seed: Decides a fresh head's weights.
        dtype: Precision to compute in.
        attention: The attention implementation; None leaves the choice to transformers.
        quantization: Hold all but the head and the embeddings in 4 bits.
        pad: What transformers' own pooling skips at the end of a row; see `pooling_pad`.
    """

    form: Form
    outputs: int
    seed: int
    dtype: str
    attention: str | None
    quantization: Quantization | None
    pad: int | None

    def opened(
        self, artifact: Artifact, context: Any, kind: Kind, trainable: bool
    ) -> tuple[Any, Artifact | None]:
        """Return the model, and its base where it stays an adapter."""
        base = None if artifact.facts.base is None else context.artifact(artifact.facts.base)
        if artifact.kind is kind and base is not None:
            model = self.model(base, fresh=base.kind is not kind)
            return open_adapter(model, artifact.path, trainable), base
        if artifact.kind is not Kind.ADAPTER:
            model = self.model(artifact, fresh=artifact.kind is not kind)
        elif base is None:
            raise StoreError("the adapter does not say which model it belongs to", where=artifact.ref)
        else:
            model = self.on_top_of(_merged(artifact, context, self.dtype, self.quantization))
        return model.requires_grad_(trainable and self.quantization is None), None

    def model(self, artifact: Artifact, fresh: bool) -> Any:
        """Load the weights of a directory; the head is a fresh one or stands in the files."""
        config = self._config(artifact.path)
        if not fresh:
            self._require_outputs(config, artifact.path)
        made = class_with_head(config, self.form.ending)
        if made is not None and fresh:
            # Its weights may lie under older names, which transformers knows of its own class alone.
            return self.on_top_of(load_model(artifact.path, self.dtype, self.attention, self.quantization))
        try:
            with _without_load_report():
                model = load_as(
                    made or self._architecture,
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
        made = class_with_head(config, self.form.ending)
        if made is not None:
            return self._finished(with_trunk(made, policy), fresh=True)
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

    @staticmethod
    def _config(directory: Path) -> Any:
        import transformers

        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True)

    def _require_outputs(self, config: Any, directory: Path) -> None:
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


def pooling_pad(encoder: Encoder) -> int | None:
    """Return the id that transformers' own pooling may skip at the end of a row, or None.

    It reads a row's number at the last token that is not padding, by its id. Where that id also ends answers it would
    read before their end; without one it takes rows one at a time and reads their last token, which is right.
    """
    pad = encoder.declared_pad
    return None if pad is None or pad in encoder.stop_ids else pad


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
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            drawn = torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
            parameter.copy_(torch.zeros_like(drawn) if name.endswith("bias") else drawn)


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
