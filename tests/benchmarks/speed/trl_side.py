"""TRL's trainers, driven step by step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gates import Gate, memory
from materials import SEED, encoded, read_rows
from objectives import OBJECTIVES
from peft import LoraConfig
from scenarios import LORA
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from watching import watch


class _Referenced:
    """Takes rows that are tokens already, and does the reference when it is told to, as often as it is told."""

    gate: Gate
    repeats: int

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        score = super()._precompute_ref_logps  # type: ignore[misc]
        for number in range(self.repeats):
            dataset._fingerprint = f"{name}-{number}"
            made = self.gate.timed("reference", lambda: score(dataset, name, batch_size))
        return made


class _Dpo(_Referenced, DPOTrainer):
    pass


class _Kto(_Referenced, KTOTrainer):
    pass


class _Encoded:
    """Takes rows that are tokens already."""

    def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
        return {}


class _Cpo(_Encoded, CPOTrainer):
    pass


class _Orpo(_Encoded, ORPOTrainer):
    """ORPO's likelihood is that of the answers here, as in its paper, and not that of prompts too.

    TRL's CPO has the same forward pass but for that: the same logits and cross-entropy, with prompts masked.
    """

    cpo_alpha, loss_type = 1.0, "simpo"
    concatenated_forward = CPOTrainer.concatenated_forward

    @property
    def pad_token_id(self) -> int:
        return self.padding_value


TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (_Dpo, DPOConfig),
    "kto": (_Kto, KTOConfig),
    "orpo": (_Orpo, ORPOConfig),
    "cpo": (_Cpo, CPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Return what both configs are given beside the setting that is tried."""
    chosen = {
        "output_dir": job["directory"],
        "num_train_epochs": job["epochs"],
        "bf16": False,
        "use_cpu": True,
        "seed": SEED,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **job["setting"],
    }
    for name in ("unordered", "attention"):
        chosen.pop(name, None)
    return chosen


def main() -> None:
    """Build the trainer and train."""
    gate = Gate()
    job = gate.job
    torch.set_num_threads(job["threads"])
    gate.tell(imported=memory("VmRSS"))
    began = time.perf_counter()
    watch(gate, began)
    trainer_class, config_class = TRAINERS[job["objective"]]
    _Referenced.gate, _Referenced.repeats = gate, job["references"]
    directory = Path(job["model"])
    judged = OBJECTIVES[job["objective"]].judged
    model_class = AutoModelForSequenceClassification if judged else AutoModelForCausalLM
    model = model_class.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=job["setting"].get("attention", "sdpa")
    )
    trainer = trainer_class(
        model=model,
        args=config_class(**arguments(job)),
        train_dataset=Dataset.from_list(list(encoded(directory, job["objective"], read_rows(job)))),
        processing_class=AutoTokenizer.from_pretrained(directory),
        peft_config=_lora() if job["lora"] else None,
    )
    trainer.train()


def _lora() -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM", r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear"
    )


if __name__ == "__main__":
    main()
