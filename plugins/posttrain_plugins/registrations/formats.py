"""What rows may look like: first those that datasets in the store have, then those of other tools."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins.data.formats"

FORMATS = [
    Registration("text", "Texts, all of which is learned", f"{_HERE}.language:Text"),
    Registration(
        "messages",
        "Conversations of which the assistant's turns are learned",
        f"{_HERE}.language:Messages",
    ),
    Registration("prompt", "Prompts alone", f"{_HERE}.prompts:Prompt"),
    Registration(
        "prompt_completion", "Prompts with the completion to learn", f"{_HERE}.prompts:PromptCompletion"
    ),
    Registration(
        "preference", "Prompts with a better and a worse completion", f"{_HERE}.preference:Preference"
    ),
    Registration(
        "unpaired_preference",
        "Prompts with a completion that is good or bad",
        f"{_HERE}.preference:UnpairedPreference",
    ),
    Registration(
        "three_way",
        "Pairs beside a gold answer, which is learned",
        f"{_HERE}.three_way:ThreeWay",
        reference="https://arxiv.org/abs/2405.16681",
    ),
    Registration(
        "scored",
        "Completions with a number that says how good each is",
        f"{_HERE}.scored:Scored",
    ),
    Registration(
        "ranked",
        "Several completions of each prompt with a number for each",
        f"{_HERE}.scored:Ranked",
        reference="https://arxiv.org/abs/2203.02155",
    ),
    Registration(
        "stepwise",
        "Answers in steps with a label for each",
        f"{_HERE}.stepwise:Stepwise",
        reference="https://arxiv.org/abs/2305.20050",
    ),
    Registration(
        "implicit_preference",
        "Two conversations whose shared history is the prompt",
        f"{_HERE}.implicit:ImplicitPreference",
    ),
    Registration(
        "full_preference",
        "A prompt beside two conversations that hold it too",
        f"{_HERE}.implicit:FullPreference",
    ),
    Registration(
        "hh_rlhf",
        "Two transcripts with `Human:` and `Assistant:`",
        f"{_HERE}.implicit:HhRlhf",
        reference="https://arxiv.org/abs/2204.05862",
    ),
    Registration("alpaca", "Instruction, input and output", f"{_HERE}.alpaca:Alpaca"),
    Registration("sharegpt", "Conversations of `from` and `value`", f"{_HERE}.sharegpt:ShareGpt"),
    Registration(
        "sharegpt_preference",
        "ShareGPT conversations with two answers",
        f"{_HERE}.sharegpt:ShareGptPreference",
    ),
    Registration("openai_chat", "OpenAI's fine-tuning files", f"{_HERE}.openai_chat:OpenAIChat"),
    Registration("openai_preference", "OpenAI's preference files", f"{_HERE}.openai_chat:OpenAIPreference"),
    Registration(
        "ultrafeedback",
        "An instruction with several rated completions",
        f"{_HERE}.ultrafeedback:UltraFeedback",
        reference="https://arxiv.org/abs/2310.01377",
    ),
]
