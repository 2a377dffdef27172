"""What people bring from other libraries, and what takes its place."""

from __future__ import annotations

_BATCH = "batch_size counts all examples of an optimizer step, and micro_batch_tokens bounds the memory of its parts"
_LENGTH = "max_length bounds prompt and answer together, and truncation says what is cut"
_SYNC = "it is `reference_sync: {steps: 512, alpha: 0.6}`, an option of trainers against a reference"
ELSEWHERE = {
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "micro_batch_size": _BATCH,
    "packing": "`data.pack` makes rows of several documents; layout decides how sequences lie in memory",
    "truncation_mode": "it is truncation",
    "assistant_only_loss": "train.sft learns answers alone unless `supervise` says otherwise",
    "completion_only_loss": "train.sft learns answers alone unless `supervise` says otherwise",
    "padding_free": "it is `layout: packed`",
    "deepspeed": "it is `backend: {name: deepspeed, stage: 2}`",
    "fsdp": "it is `backend: {name: fsdp2}`",
    "use_peft": "it is `lora: {r: 16}`",
    "epochs": "it is num_train_epochs",
    "load_in_4bit": "it is `quantization: {}` beside `lora`",
    "lora_r": "it is `lora: {r: 16}`",
    "lora_alpha": "it is `lora: {alpha: 32}`",
    "lora_dropout": "it is `lora: {dropout: 0.05}`",
    "lora_target_modules": "it is `lora: {target_modules: […]}`",
    "loss_type": "it is `loss: NAME`; a loss has options of its own: `loss: {name: NAME, beta: 0.1}`",
    "use_weighting": "it is `weighting: wpo`, an option of train.dpo",
    "report_to": "it is `callbacks: [tensorboard]`, wandb or trackio; MLflow needs nothing",
    "push_to_hub": "it is `callbacks: [{name: hub_upload, repo_id: OWNER/NAME, token: env:HF_TOKEN}]`",
    "save_strategy": "save_steps says how often; 0 is never",
    "eval_strategy": "eval_steps says how often, and a dataset at the port `eval`",
    "max_prompt_length": _LENGTH,
    "max_completion_length": _LENGTH,
    "precompute_ref_log_probs": "that is always done, once; `data.log_probs` shares it among trainings",
    "ref_model": "the reference is the starting policy",
    "sync_ref_model": _SYNC,
    "ref_model_sync_steps": _SYNC,
    "ref_model_mixup_alpha": _SYNC,
    "rpo_alpha": "it is `loss: [sigmoid, sft]` with loss_weights, options of train.dpo",
    "reference_free": "train.cpo takes the losses without a reference",
    "simpo_gamma": "it is `loss: {name: simpo, gamma: 0.5}`",
    "center_rewards_coefficient": "it is `loss: {name: bradley_terry, center: 0.01}`",
    "label_smoothing_factor": "it is `loss: {name: label_smoothing, epsilon: 0.1}`, a loss of train.sft",
    "disable_dropout": "all trainers but train.sft turn dropout off",
    "use_liger_kernel": "the head never computes more logits than it needs",
    "dataloader_num_workers": "rows are prepared before the first step",
}
"""Options of other libraries, and what to use instead."""
