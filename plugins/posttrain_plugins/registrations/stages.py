"""The stages that train nothing."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins"

STAGES = [
    Registration(
        "data.load",
        "Rows of a JSONL, JSON, CSV, Parquet or Hugging Face dataset",
        f"{_HERE}.data.load:Load",
        numerics=2,
    ),
    Registration("data.synthetic", "Rows of a seeded generator", f"{_HERE}.data.synthetic:Synthetic"),
    Registration("data.convert", "Rows in another format", f"{_HERE}.data.convert:Convert"),
    Registration("data.mix", "Rows of several datasets in exact shares", f"{_HERE}.data.mix:Mix"),
    Registration(
        "data.validate",
        "A report of all that is wrong or odd with rows",
        f"{_HERE}.data.validate:Validate",
        numerics=2,
    ),
    Registration(
        "data.best_of_n",
        "Preference pairs from a policy's own best and worst completions",
        f"{_HERE}.data.best_of_n:BestOfN",
        reference="https://arxiv.org/abs/2112.09332",
    ),
    Registration(
        "data.score_steps",
        "Answers with what a process reward model says of their steps",
        f"{_HERE}.data.score_steps:ScoreSteps",
        reference="https://arxiv.org/abs/2305.20050",
    ),
    Registration("data.tokenize", "Rows as tokens, with what is learned", f"{_HERE}.data.tokenize:Tokenize"),
    Registration(
        "data.match_prompts",
        "Weights that make up for different prompts of good and bad answers",
        f"{_HERE}.data.match_prompts:MatchPrompts",
        reference="https://arxiv.org/abs/2404.04656",
    ),
    Registration(
        "data.log_probs",
        "What a reference says of answers, once for many trainings",
        f"{_HERE}.data.log_probs:LogProbs",
    ),
    Registration(
        "data.pack",
        "Tokenized documents in rows that are nearly full",
        f"{_HERE}.data.pack:Pack",
        reference="https://arxiv.org/abs/2404.10830",
    ),
    Registration("data.split", "Rows in parts, by their content", f"{_HERE}.data.split:Split"),
    Registration(
        "data.dedup",
        "One of each set of equal or nearly equal rows",
        f"{_HERE}.data.dedup:Dedup",
        reference="https://arxiv.org/abs/2107.06499",
    ),
    Registration(
        "data.contamination",
        "Evaluation rows that occur in training data",
        f"{_HERE}.data.contamination:Contamination",
        reference="https://arxiv.org/abs/2005.14165",
    ),
    Registration(
        "model.init", "A small new model with a tokenizer made from the data", f"{_HERE}.models.init:Init"
    ),
    Registration("model.load", "A Hugging Face directory or id, or a GGUF file", f"{_HERE}.models.load:Load"),
    Registration("store.load", "An artifact of a store, as it is", f"{_HERE}.stored:Load"),
    Registration(
        "model.merge",
        "An adapter merged into its base, and compared with it",
        f"{_HERE}.models.merge:Merge",
    ),
    Registration(
        "model.average",
        "Several models of one architecture averaged, interpolated or added up",
        f"{_HERE}.models.average:Average",
        reference="https://arxiv.org/abs/2203.05482",
    ),
    Registration(
        "evaluate.preferences",
        "How often reward models and policies prefer the better answer, with intervals",
        f"{_HERE}.evaluation.preferences:Preferences",
    ),
    Registration(
        "evaluate.steps",
        "How often process reward models judge steps as their labels do, with intervals",
        f"{_HERE}.evaluation.steps:Steps",
        reference="https://arxiv.org/abs/2305.20050",
    ),
    Registration(
        "data.elo",
        "Ratings of answers, fitted to which of them won",
        f"{_HERE}.data.elo:Elo",
        reference="https://doi.org/10.1214/aos/1079120141",
    ),
    Registration(
        "evaluate", "Greedy generation scored with intervals", f"{_HERE}.evaluation.evaluate:Evaluate"
    ),
    Registration("gate", "Pass, reject or call it inconclusive", f"{_HERE}.evaluation.gate:Gate"),
]
