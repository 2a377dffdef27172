"""How policies write completions: rollout engines. In-process sampling is the first."""
