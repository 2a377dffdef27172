"""TRL's trainers, driven step by step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gates import Gate, memory
from materials import SEED, encoded, read_rows
from peft import LoraConfig
from scenarios import LORA
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from watching import watch


class _Dpo(DPOTrainer):
    """Takes rows that are tokens already, and does the reference when it is told to, as often as it is told."""

    gate: Gate
    repeats: int

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        for number in range(self.repeats):
            dataset._fingerprint = f"{name}-{number}"
            made = self.gate.timed(
                "reference", lambda: super(_Dpo, self)._precompute_ref_logps(dataset, name, batch_size)
            )
        return made


TRAINERS: dict[str, tuple[Any, Any]] = {"sft": (SFTTrainer, SFTConfig), "dpo": (_Dpo, DPOConfig)}


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
    _Dpo.gate, _Dpo.repeats = gate, job["references"]
    directory = Path(job["model"])
    model = AutoModelForCausalLM.from_pretrained(
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
