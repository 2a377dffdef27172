"""A small SFT → DPO pipeline with everything it is made of, to put faults into."""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from helpers import foreign_stages
from helpers.models import tiny_llama

from posttrain.contracts.stage import Level
from posttrain.errors import PosttrainError
from posttrain.pipeline import Pipeline, Selection
from posttrain_plugins.models.policy import save_policy
from posttrain_plugins.models.vocabulary import character_tokenizer, write_tokenizer
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.library import chatml

PLUGIN = Path(foreign_stages.__file__)
LETTERS = "abcdef"
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?<|>_/='\n"
SYSTEM = {"role": "system", "content": "Be brief."}
READERS = ("data.", "model.", "foreign/alter", "foreign/mask")
"""Stages that only read and hand on: what one of them refuses is found before the next training."""
JUDGES = ("gate", "promote")
WEAK = 150
"""Steps of the base model: enough to know the form of an answer and to guess the letter better than by chance."""


def rows_of(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Words with their first letter and another one; rows of different seeds have no word in common."""
    words = ["".join(word) for word in _product(LETTERS, 5)]
    random.Random(7).shuffle(words)
    chosen = words[seed * 400 : seed * 400 + count]
    drawn = random.Random(seed)
    return [(w, w[0], drawn.choice([x for x in LETTERS if x != w[0]])) for w in chosen]


def _product(letters: str, length: int) -> list[tuple[str, ...]]:
    from itertools import product

    return list(product(letters, repeat=length))


def user(word: str) -> dict[str, str]:
    return {"role": "user", "content": f"first of {word}"}


def answer(letter: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"it is {letter}."}


def demonstrations(count: int = 160) -> list[dict[str, Any]]:
    return [{"messages": [SYSTEM, user(w), answer(right)]} for w, right, _ in rows_of(count, 0)]


def preferences(count: int = 64) -> list[dict[str, Any]]:
    return [
        {"prompt": [SYSTEM, user(w)], "chosen": [answer(right)], "rejected": [answer(wrong)],
         "chosen_score": 1.0, "rejected_score": 0.0}
        for w, right, wrong in rows_of(count, 1)
    ]  # fmt: skip


def questions(count: int = 48, seed: int = 2) -> list[dict[str, Any]]:
    return [{"messages": [SYSTEM, user(w), answer(right)]} for w, right, _ in rows_of(count, seed)]


@cache
def base_model(bos: bool = False) -> Path:
    """Train a small model for a moment; it knows ChatML and the form of the answers."""
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="base-"))
    source = directory / "source"
    source.mkdir()
    tokenizer = character_tokenizer([ALPHABET])
    tokenizer.add_special_tokens(["<|endoftext|>", "<s>"])
    write_tokenizer(source, tokenizer, ("{{ bos_token }}" if bos else "") + chatml())
    if bos:
        _patch(source / "tokenizer_config.json", bos_token="<s>", add_bos_token=True, pad_token="<|im_end|>")
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    model = tiny_llama(size, hidden_size=32, intermediate_size=64)
    encoder = Encoder.open(source)
    encoded = [encoder.encode_messages(row["messages"]) for row in [*demonstrations(400), *questions(400, 3)]]
    _learn(model, encoded)
    model.eval()
    save_policy(directory, model, source)
    shutil.rmtree(source)
    return directory


def _learn(model: Any, encoded: Sequence[Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    drawn = random.Random(0)
    for _ in range(WEAK):
        batch = drawn.sample(list(encoded), 32)
        longest = max(len(each.tokens) for each in batch)
        ids = torch.tensor([each.tokens + [0] * (longest - len(each.tokens)) for each in batch])
        labels = torch.tensor(
            [
                [id if on else -100 for id, on in zip(each.tokens, each.supervised, strict=True)]
                + [-100] * (longest - len(each.tokens))
                for each in batch
            ]
        )
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _patch(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


STAGES: Mapping[str, Mapping[str, Any]] = {
    "base": {"uses": "model.load", "with": {"path": "base"}},
    "chats": {"uses": "data.load", "with": {"path": "chats.jsonl"}},
    "sft": {
        "uses": "train.sft",
        "inputs": {"model": "base", "data": "chats"},
        "with": {"learning_rate": 1e-3, "batch_size": 16, "max_steps": 8, "logging_steps": 1},
    },
    "prefs": {"uses": "data.load", "with": {"path": "prefs.jsonl"}},
    "dpo": {
        "uses": "train.dpo",
        "inputs": {"model": "sft", "data": "prefs"},
        "with": {"learning_rate": 1e-4, "batch_size": 8, "max_steps": 3, "logging_steps": 1},
    },
    "test": {"uses": "data.load", "with": {"path": "test.jsonl"}},
    "eval": {
        "uses": "evaluate",
        "inputs": {"models": ["sft", "dpo"], "data": "test"},
        "with": {"metrics": ["exact_match", "perplexity"], "max_new_tokens": 16},
    },
    "gate": {
        "uses": "gate",
        "inputs": {"report": "eval", "candidate": "dpo", "baseline": "sft"},
        "with": {"min_improvement": -0.9},
    },
    "promote": {
        "uses": "promote",
        "inputs": {"model": "dpo", "verdict": "gate"},
        "with": {"name": "lab"},
    },
}


@dataclass
class Lab:
    """A directory with a model, rows and a pipeline; a fault changes them before they are used.

    Args:
        base: The directory.
        files: The rows of each file.
        stages: The pipeline.
        drifted: Whether SFT was trained with other versions of libraries before.
    """

    base: Path
    files: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=lambda: copy.deepcopy(dict(STAGES)))
    drifted: bool = False

    def __post_init__(self) -> None:
        self.base.mkdir(parents=True, exist_ok=True)
        self.model = self.base / "base"
        shutil.copytree(base_model(), self.model)
        self.files |= {"chats": demonstrations(), "prefs": preferences(), "test": questions()}

    def options(self, stage: str, **changes: Any) -> None:
        """Change a stage's options."""
        self.stages[stage].setdefault("with", {}).update(changes)

    def connect(self, stage: str, **inputs: Any) -> None:
        """Change a stage's inputs."""
        self.stages[stage]["inputs"].update(inputs)

    def between(self, change: str, stage: str = "sft", reader: str = "dpo") -> None:
        """Put a foreign stage between a policy and who reads it."""
        self.stages["altered"] = {
            "uses": "foreign/alter",
            "inputs": {"model": stage},
            "with": {"change": change},
        }
        self.connect(reader, model="altered")

    def json(self, name: str, **changes: Any) -> None:
        """Change a JSON file of the base model."""
        _patch(self.model / name, **changes)

    def write(self) -> Pipeline:
        """Write the files and return the pipeline."""
        for name, rows in self.files.items():
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (self.base / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        return Pipeline(
            self.stages,
            name="lab",
            plugins=[str(PLUGIN)],
            defaults={"*": {"resources": {"cpus": 1}}},
            base=self.base,
        )


@dataclass
class Seen:
    """What was said about a pipeline: when, at which moment, by whom."""

    moment: str
    seconds: float
    node: str
    level: str
    text: str

    @property
    def who(self) -> str:
        """The code of the rule, or the stage that says it."""
        return self.text.split(" ", 1)[0] if self.text[:1] == "H" and self.text[1:4].isdigit() else self.node


class Watcher:
    """Runs a lab's pipeline and writes down every warning and error."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.seen: list[Seen] = []
        self.status = "refused"
        self._began: set[str] = set()
        self._learned: set[str] = set()
        self._start = time.perf_counter()

    def run(self, stop_at_plan: bool = True) -> list[Seen]:
        """Plan and, unless the plan says enough, run; return what was said, in its order."""
        pipeline = self.lab.write()
        if self.lab.drifted:
            self._drift(pipeline)
        self._start = time.perf_counter()
        try:
            plan = pipeline.plan(self.lab.base / ".posttrain")
        except PosttrainError as error:
            self._see("plan", "spec", Level.ERROR, error.message)
            return self.seen
        for node in plan.nodes.values():
            for finding in node.findings:
                if finding.level is not Level.NOTE:
                    self._see("plan", node.node, finding.level, f"{finding.label}: {finding.message}")
            for change in node.drift:
                self._see("plan", node.node, Level.WARNING, f"versions have changed: {change}")
        if plan.refused or (self.seen and stop_at_plan):
            return self.seen
        self._execute(pipeline, plan)
        return self.seen

    def _drift(self, pipeline: Pipeline) -> None:
        """Run the pipeline up to SFT, as if with another version of a library."""
        workspace = self.lab.base / ".posttrain"
        pipeline.run(workspace, runner="inline", selection=Selection(only=("sft",)), track=False)
        for path in (workspace / "store" / "keys").glob("*.json"):
            record = json.loads(path.read_text())
            record["versions"]["transformers"] = "4.0.0"
            path.write_text(json.dumps(record))

    def _execute(self, pipeline: Pipeline, plan: Any) -> None:
        try:
            report = pipeline.run(
                self.lab.base / ".posttrain", runner="inline", observer=self._hear, plan=plan, track=False
            )
            self.status = report.status
        except PosttrainError as error:
            if not any(each.level == "error" for each in self.seen):
                self._see("later", "run", Level.ERROR, error.message)

    def _hear(self, event: Mapping[str, Any]) -> None:
        kind, node = event.get("type"), str(event.get("node", ""))
        if kind == "node-started":
            self._began.add(node)
        elif kind in ("metrics", "progress") and (event.get("step") or event.get("done")):
            if event.get("unit", "steps") == "steps":
                self._learned.add(node)
        elif kind == "note" and node and event.get("level") in ("warning", "error"):
            self._see(self._moment(node), node, event["level"], event["message"])
        elif kind == "note" and not node:
            name, _, text = event["message"].partition(": ")
            self._see(self._bound(name), name, Level.WARNING, text)
        elif kind == "node-ended" and event["status"] in ("failed", "rejected", "inconclusive"):
            error = event.get("error") or {"message": event["summary"]}
            refused = error.get("type") == "HandoffError" and node not in self._began
            text = f"{error['message']} {error.get('found') or ''}".strip()
            self._see(self._bound(node) if refused else self._moment(node), node, Level.ERROR, text)

    def _bound(self, node: str) -> str:
        """Return when a stage that decides about a trained model is bound: after the training."""
        return "later" if self.lab.stages[node]["uses"] in JUDGES else "bind"

    def _moment(self, node: str) -> str:
        uses = self.lab.stages[node]["uses"]
        if uses.startswith("train."):
            return "later" if node in self._learned else "step 0"
        return "load" if uses.startswith(READERS) else "later"

    def _see(self, moment: str, node: str, level: Any, text: str) -> None:
        self.seen.append(Seen(moment, time.perf_counter() - self._start, node, str(level), text))
