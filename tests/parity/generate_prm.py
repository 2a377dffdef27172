"""Writes `prm_of_trl.json`: what process reward models come to in trl 1.13.0, the last release that trains them.

It does not install beside the release that other tests compare with. Unpack its wheel and name the folder:
`PYTHONPATH=FOLDER:tests OMP_NUM_THREADS=1 .venv/bin/python tests/parity/generate_prm.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers.prm_runs import CASES, rows, start
from helpers.trl_runs import tokenizer, trl_arguments, trl_losses

FIXTURE = Path(__file__).with_name("prm_of_trl.json")


def main() -> None:
    """Train each case with trl."""
    import trl

    with TemporaryDirectory() as directory:
        model = start(Path(directory))
        runs = {name: _run(model, Path(directory) / name, options) for name, options in CASES.items()}
    written = {"trl": trl.__version__, "runs": runs}
    FIXTURE.write_text(json.dumps(written, separators=(",", ":")) + "\n", encoding="utf-8")


def _run(artifact: Any, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForTokenClassification
    from trl.experimental.prm import PRMConfig, PRMTrainer

    model = AutoModelForTokenClassification.from_pretrained(artifact.path)
    data = Dataset.from_list(rows())
    trainer = PRMTrainer(
        model=model,
        args=trl_arguments(
            PRMConfig,
            directory,
            "train.prm",
            4,
            1,
            eval_strategy="no",
            per_device_eval_batch_size=64,
            **options,
        ),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(artifact),
    )
    prepared = list(trainer.train_dataset)
    return {
        "tokens": [row["input_ids"] for row in prepared],
        "labels": [row["labels"] for row in prepared],
        "start": _judged(trainer),
        "losses": trl_losses(trainer),
        "end": _judged(trainer),
        "weights": {name: tensor.abs().sum().item() for name, tensor in model.named_parameters()},
    }


def _judged(trainer: Any) -> list[float]:
    """Return loss and accuracy over all steps of all rows, in one batch."""
    found = trainer.evaluate()
    return [found["eval_loss"], found["eval_accuracy"]]


if __name__ == "__main__":
    main()
