"""The built-in plugins, announced through the same hooks as anybody's. Imports nothing heavy."""

from __future__ import annotations

from posttrain import Registration, hookimpl
from posttrain_plugins.registrations.callbacks import CALLBACKS
from posttrain_plugins.registrations.commands import COMMANDS
from posttrain_plugins.registrations.losses import LOSSES

POSTTRAIN_API = ">=1,<2"

_HERE = "posttrain_plugins"


@hookimpl
def posttrain_stages() -> list[Registration]:
    """The first stages."""
    return [
        Registration(
            "data.load",
            "Rows of a JSONL, JSON, CSV, Parquet or Hugging Face dataset",
            f"{_HERE}.data.load:Load",
        ),
        Registration("data.synthetic", "Rows of a seeded generator", f"{_HERE}.data.synthetic:Synthetic"),
        Registration("data.convert", "Rows in another format", f"{_HERE}.data.convert:Convert"),
        Registration("data.mix", "Rows of several datasets in exact shares", f"{_HERE}.data.mix:Mix"),
        Registration(
            "data.validate",
            "A report of all that is wrong or odd with rows",
            f"{_HERE}.data.validate:Validate",
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
        Registration(
            "data.tokenize", "Rows as tokens, with what is learned", f"{_HERE}.data.tokenize:Tokenize"
        ),
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
        Registration(
            "model.load", "A Hugging Face directory or id, or a GGUF file", f"{_HERE}.models.load:Load"
        ),
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
            "How often reward models prefer the better answer, with intervals",
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


@hookimpl
def posttrain_trainers() -> list[Registration]:
    """The trainers; each is a stage too."""
    return [
        Registration("train.sft", "Supervised fine-tuning on completions", f"{_HERE}.trainers.sft:Sft"),
        Registration(
            "train.dpo",
            "Direct preference optimization",
            f"{_HERE}.trainers.dpo:Dpo",
            reference="https://arxiv.org/abs/2305.18290",
        ),
        Registration(
            "train.prm",
            "Process reward models: whether each step of an answer is right",
            f"{_HERE}.trainers.prm:Prm",
            reference="https://arxiv.org/abs/2305.20050",
        ),
        Registration(
            "train.cpo",
            "Preference optimization without a reference: CPO, SimPO, AlphaPO",
            f"{_HERE}.trainers.cpo:Cpo",
            reference="https://arxiv.org/abs/2401.08417",
        ),
        Registration(
            "train.orpo",
            "Odds ratio preference optimization",
            f"{_HERE}.trainers.orpo:Orpo",
            reference="https://arxiv.org/abs/2403.07691",
        ),
        Registration(
            "train.tpo",
            "Triple preference optimization: pairs beside a gold answer",
            f"{_HERE}.trainers.tpo:Tpo",
            reference="https://arxiv.org/abs/2405.16681",
        ),
        Registration(
            "train.kto",
            "Answers that are good or bad, one by one: KTO, APO, BCO",
            f"{_HERE}.trainers.kto:Kto",
            reference="https://arxiv.org/abs/2402.01306",
        ),
        Registration(
            "train.reward",
            "Reward models: a number for an answer",
            f"{_HERE}.trainers.reward:Reward",
            reference="https://arxiv.org/abs/2203.02155",
        ),
    ]


@hookimpl
def posttrain_losses() -> list[Registration]:
    """One file per loss."""
    return LOSSES


@hookimpl
def posttrain_backends() -> list[Registration]:
    """How the ranks of a training work together."""
    here = f"{_HERE}.backends.catalogue"
    return [
        Registration("single", "One process", f"{here}:SingleProcess"),
        Registration("ddp", "Data parallel: the whole model on every rank", f"{here}:DataParallel"),
        Registration(
            "fsdp2",
            "Weights, gradients and optimizer state split over the ranks",
            f"{here}:FullyShardedDataParallel",
            reference="https://arxiv.org/abs/2304.11277",
        ),
        Registration(
            "deepspeed",
            "DeepSpeed's ZeRO, stages 1 to 3",
            f"{here}:DeepSpeed",
            reference="https://arxiv.org/abs/1910.02054",
            requires=("deepspeed",),
        ),
    ]


@hookimpl
def posttrain_callbacks() -> list[Registration]:
    """One file per callback."""
    return CALLBACKS


@hookimpl
def posttrain_formats() -> list[Registration]:
    """What rows may look like: first those that datasets in the store have, then those of other tools."""
    here = f"{_HERE}.data.formats"
    return [
        Registration("text", "Texts, all of which is learned", f"{here}.language:Text"),
        Registration(
            "messages",
            "Conversations of which the assistant's turns are learned",
            f"{here}.language:Messages",
        ),
        Registration("prompt", "Prompts alone", f"{here}.prompts:Prompt"),
        Registration(
            "prompt_completion", "Prompts with the completion to learn", f"{here}.prompts:PromptCompletion"
        ),
        Registration(
            "preference", "Prompts with a better and a worse completion", f"{here}.preference:Preference"
        ),
        Registration(
            "unpaired_preference",
            "Prompts with a completion that is good or bad",
            f"{here}.preference:UnpairedPreference",
        ),
        Registration(
            "three_way",
            "Pairs beside a gold answer, which is learned",
            f"{here}.three_way:ThreeWay",
            reference="https://arxiv.org/abs/2405.16681",
        ),
        Registration(
            "scored",
            "Completions with a number that says how good each is",
            f"{here}.scored:Scored",
        ),
        Registration(
            "ranked",
            "Several completions of each prompt with a number for each",
            f"{here}.scored:Ranked",
            reference="https://arxiv.org/abs/2203.02155",
        ),
        Registration(
            "stepwise",
            "Answers in steps with a label for each",
            f"{here}.stepwise:Stepwise",
            reference="https://arxiv.org/abs/2305.20050",
        ),
        Registration(
            "implicit_preference",
            "Two conversations whose shared history is the prompt",
            f"{here}.implicit:ImplicitPreference",
        ),
        Registration(
            "full_preference",
            "A prompt beside two conversations that hold it too",
            f"{here}.implicit:FullPreference",
        ),
        Registration(
            "hh_rlhf",
            "Two transcripts with `Human:` and `Assistant:`",
            f"{here}.implicit:HhRlhf",
            reference="https://arxiv.org/abs/2204.05862",
        ),
        Registration("alpaca", "Instruction, input and output", f"{here}.alpaca:Alpaca"),
        Registration("sharegpt", "Conversations of `from` and `value`", f"{here}.sharegpt:ShareGpt"),
        Registration(
            "sharegpt_preference",
            "ShareGPT conversations with two answers",
            f"{here}.sharegpt:ShareGptPreference",
        ),
        Registration("openai_chat", "OpenAI's fine-tuning files", f"{here}.openai_chat:OpenAIChat"),
        Registration(
            "openai_preference", "OpenAI's preference files", f"{here}.openai_chat:OpenAIPreference"
        ),
        Registration(
            "ultrafeedback",
            "An instruction with several rated completions",
            f"{here}.ultrafeedback:UltraFeedback",
            reference="https://arxiv.org/abs/2310.01377",
        ),
    ]


@hookimpl
def posttrain_rewards() -> list[Registration]:
    """The rewards."""
    return [
        Registration(
            "exact", "1 when the completion equals the reference answer", f"{_HERE}.rewards.exact:Exact"
        )
    ]


@hookimpl
def posttrain_generators() -> list[Registration]:
    """The synthetic tasks."""
    return [
        Registration("reverse", "Reverse a string", f"{_HERE}.data.generators.characters:Reverse"),
        Registration(
            "reverse_pairs",
            "Reverse a string: right and nearly right answers in pairs",
            f"{_HERE}.data.generators.characters:ReversePairs",
        ),
        Registration(
            "addition", "Add two numbers, digits reversed", f"{_HERE}.data.generators.characters:Addition"
        ),
        Registration(
            "sort_words", "Sort a short list of common words", f"{_HERE}.data.generators.sorting:SortWords"
        ),
        Registration(
            "running_sum",
            "Add digits up step by step, with labels for the steps",
            f"{_HERE}.data.generators.steps:RunningSum",
        ),
    ]


@hookimpl
def posttrain_rules() -> list[Registration]:
    """The hand-off rules: one class for each failure."""
    rules = (
        ("template-missing", "Conversations without a chat template", "templates:TemplateMissing"),
        (
            "templates-differ",
            "Policies that are used together have different chat templates",
            "templates:TemplatesDiffer",
        ),
        ("template-changed", "The chat template changed on the way", "templates:TemplateChanged"),
        (
            "template-overruled",
            "The file `chat_template.jinja` and the tokenizer's config disagree",
            "templates:TemplateOverruled",
        ),
        ("template-unopened", "The generation prompt does not open an answer", "templates:TemplateUnopened"),
        ("template-dated", "The chat template prints the date", "templates:TemplateDated"),
        ("calls-unshown", "Tool calls that the chat template does not show", "templates:CallsUnshown"),
        ("end-missing", "No end-of-sequence token", "special_tokens:EndMissing"),
        ("token-out-of-range", "A special token out of range", "special_tokens:TokenOutOfRange"),
        (
            "end-of-turn-undeclared",
            "The template's end of turn is not a stop token",
            "special_tokens:EndOfTurnUndeclared",
        ),
        ("pad-missing", "No padding token", "special_tokens:PadMissing"),
        ("pad-is-end", "Padding and end of sequence are one token", "special_tokens:PadIsEnd"),
        ("pad-is-unknown", "Padding and unknown are one token", "special_tokens:PadIsUnknown"),
        ("bos-twice", "BOS in the template and from the tokenizer", "special_tokens:BosTwice"),
        ("ends-changed", "A stop token was lost on the way", "special_tokens:EndsChanged"),
        (
            "generation-lost",
            "The generation config was lost or changed on the way",
            "special_tokens:GenerationLost",
        ),
        ("embeddings-short", "Tokens without an embedding", "tokenizers:EmbeddingsShort"),
        ("tokenizers-differ", "Compared policies have different tokenizers", "tokenizers:TokenizersDiffer"),
        ("data-tokenizer", "Data of a policy with another tokenizer", "tokenizers:DataTokenizer"),
        ("tokenizer-changed", "The tokenizer changed on the way", "tokenizers:TokenizerChanged"),
        ("embeddings-resized", "The embeddings were resized on the way", "tokenizers:EmbeddingsResized"),
        (
            "teacher-vocabulary",
            "Teacher and student have different vocabularies",
            "tokenizers:TeacherVocabulary",
        ),
        (
            "reward-tokenizer",
            "Policy and reward model have different tokenizers",
            "tokenizers:RewardTokenizer",
        ),
        ("weights-missing", "Weights or a head are missing", "weights:WeightsMissing"),
        ("head-wrong", "The head of another kind of model", "weights:HeadWrong"),
        ("dtype-narrowed", "The weights lost precision on the way", "weights:DtypeNarrowed"),
        ("shape-changed", "The architecture's options changed on the way", "weights:ShapeChanged"),
        ("training-idle", "Training changed nothing", "weights:TrainingIdle"),
        ("adapter-base", "An adapter meets another base than its own", "adapters:AdapterBase"),
        ("adapter-changed", "An adapter's options changed on the way", "adapters:AdapterChanged"),
        ("reference-other", "The reference is not the starting policy", "adapters:ReferenceOther"),
        (
            "log-probs-other",
            "Log-probs of another policy, dataset or options",
            "log_probs:LogProbsOther",
        ),
        ("merge-changed", "Merging changed what a model computes", "adapters:MergeChanged"),
        ("off-policy", "Preference pairs of another policy", "preferences:OffPolicy"),
        ("pairs-inverted", "Preference pairs the wrong way round", "preferences:PairsInverted"),
        ("pairs-identical", "Pairs of identical sides", "preferences:PairsIdentical"),
        ("pairs-contradict", "Pairs that contradict each other", "preferences:PairsContradict"),
        ("side-constant", "One side of the pairs is always the same", "preferences:SideConstant"),
        ("dataset-format", "A dataset of another format", "datasets:DatasetFormat"),
        ("dataset-small", "Fewer rows than a step", "datasets:DatasetSmall"),
        ("trained-twice", "The same data is trained on twice", "datasets:TrainedTwice"),
        ("rows-long", "Rows longer than max_length", "datasets:RowsLong"),
        ("tokens-stale", "Tokenized data older than its tokenizer or template", "datasets:TokensStale"),
        ("tokens-long", "Tokenized rows longer than the context", "datasets:TokensLong"),
        ("rows-repeated", "Most rows are copies", "datasets:RowsRepeated"),
        ("answers-first", "The assistant speaks first", "datasets:AnswersFirst"),
        ("leakage", "Evaluation rows occur in training data", "evaluations:Leakage"),
        ("held-out-leakage", "Held-out rows occur in training data", "evaluations:HeldOutLeakage"),
        ("report-unanswered", "A score that rests on no answers", "evaluations:ReportUnanswered"),
        ("report-extreme", "A score of exactly 0 or 1", "evaluations:ReportExtreme"),
        ("judged-other", "Judged is not what was evaluated", "evaluations:JudgedOther"),
        ("same-compared", "A model is compared with itself", "evaluations:SameCompared"),
        (
            "reports-of-different-data",
            "Reports on different data are compared",
            "evaluations:ReportsOfDifferentData",
        ),
    )
    return [Registration(name, summary, f"{_HERE}.handoffs.{target}") for name, summary, target in rules]


@hookimpl
def posttrain_commands() -> list[Registration]:
    """The verbs around data, and those that train without a pipeline file."""
    return COMMANDS
