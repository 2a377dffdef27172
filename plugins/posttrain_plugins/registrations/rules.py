"""The hand-off rules: one class for each failure."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins.handoffs"

_RULES = (
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
RULES = [Registration(name, summary, f"{_HERE}.{target}") for name, summary, target in _RULES]
