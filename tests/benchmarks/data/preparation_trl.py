"""TRL's side: what `SFTTrainer` does to a dataset when packing is on."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Prepare the dataset and print what that came to; reading the file into Arrow is not counted."""
    import numpy as np
    import trl
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rows = load_dataset("json", data_files=f"{job['data']}/rows.jsonl", split="train")
    spent: list[float] = []
    prepare = SFTTrainer._prepare_dataset

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        made = prepare(*arguments, **options)
        spent.append(time.perf_counter() - start)
        return made

    SFTTrainer._prepare_dataset = timed
    config = SFTConfig(
        output_dir=job["directory"],
        packing=True,
        max_length=job["length"],
        assistant_only_loss=job["masks"],
        dataset_num_proc=job["processes"],
        report_to="none",
        use_cpu=True,
    )
    made = SFTTrainer(
        LlamaForCausalLM(shape), config, train_dataset=rows, processing_class=tokenizer
    ).train_dataset
    table = made.with_format("arrow")[:]
    tokens = len(table["input_ids"].combine_chunks().flatten())
    labels = np.asarray(table["labels"].combine_chunks().flatten())
    told = {
        "seconds": sum(spent),
        "rows": len(made),
        "documents": len(table["seq_lengths"].combine_chunks().flatten()),
        "tokens": tokens,
        "supervised": int((labels != -100).sum()),
        "efficiency": tokens / (len(made) * job["length"]),
        "version": trl.__version__,
    }
    print("TOLD " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
