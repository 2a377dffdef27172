"""The losses, by family."""

from __future__ import annotations

from posttrain import Registration

_HERE = "posttrain_plugins.losses"

TOKEN = [
    Registration(
        "nll",
        "Negative log-likelihood of the supervised tokens",
        f"{_HERE}.token.nll:Nll",
        reference="https://arxiv.org/abs/2203.02155",
    ),
    Registration(
        "label_smoothing",
        "Likelihood whose labels are partly spread over the vocabulary",
        f"{_HERE}.token.label_smoothing:LabelSmoothing",
        reference="https://arxiv.org/abs/1512.00567",
    ),
    Registration(
        "dft",
        "Likelihood weighted by itself: unlikely tokens count less",
        f"{_HERE}.token.dft:Dft",
        reference="https://arxiv.org/abs/2508.05629",
    ),
    Registration(
        "focal",
        "Likelihood in which tokens that are known count less",
        f"{_HERE}.token.focal:Focal",
        reference="https://arxiv.org/abs/1708.02002",
    ),
]
PREFERENCE = [
    Registration(
        "sigmoid",
        "DPO's logistic loss on the implicit reward margin",
        f"{_HERE}.preference.sigmoid:Sigmoid",
        reference="https://arxiv.org/abs/2305.18290",
    ),
    Registration(
        "hinge",
        "SLiC's hinge on the implicit reward margin",
        f"{_HERE}.preference.hinge:Hinge",
        reference="https://arxiv.org/abs/2305.10425",
    ),
    Registration(
        "ipo",
        "IPO: a squared distance of mean log-ratios from a target margin",
        f"{_HERE}.preference.ipo:Ipo",
        reference="https://arxiv.org/abs/2310.12036",
    ),
    Registration(
        "exo_pair",
        "EXO: reverse KL divergence from the preference that the data gives",
        f"{_HERE}.preference.exo_pair:ExoPair",
        reference="https://arxiv.org/abs/2402.00856",
    ),
    Registration(
        "nca_pair",
        "NCA: absolute implicit rewards, so that chosen answers become likelier",
        f"{_HERE}.preference.nca_pair:NcaPair",
        reference="https://arxiv.org/abs/2402.05369",
    ),
    Registration(
        "robust",
        "DPO made unbiased where a known share of preferences is swapped",
        f"{_HERE}.preference.robust:Robust",
        reference="https://arxiv.org/abs/2403.00409",
    ),
    Registration(
        "bco_pair",
        "A classifier of chosen and rejected answers against the running mean of rewards",
        f"{_HERE}.preference.bco_pair:BcoPair",
        reference="https://arxiv.org/abs/2404.04656",
    ),
    Registration(
        "sppo_hard",
        "SPPO: log-ratios of both answers towards plus and minus a target",
        f"{_HERE}.preference.sppo_hard:SppoHard",
        reference="https://arxiv.org/abs/2405.00675",
    ),
    Registration(
        "aot",
        "AOT: the policy's margins above the reference's as a distribution",
        f"{_HERE}.preference.aot:Aot",
        reference="https://arxiv.org/abs/2406.05882",
    ),
    Registration(
        "aot_unpaired",
        "AOT: rewards of chosen above those of rejected answers as a distribution",
        f"{_HERE}.preference.aot_unpaired:AotUnpaired",
        reference="https://arxiv.org/abs/2406.05882",
    ),
    Registration(
        "apo_zero",
        "APO for chosen answers that are better than the policy's own",
        f"{_HERE}.preference.apo_zero:ApoZero",
        reference="https://arxiv.org/abs/2408.06266",
    ),
    Registration(
        "apo_down",
        "APO for chosen answers that are worse than the policy's own",
        f"{_HERE}.preference.apo_down:ApoDown",
        reference="https://arxiv.org/abs/2408.06266",
    ),
    Registration(
        "discopop",
        "A discovered mixture of the logistic and the exponential loss",
        f"{_HERE}.preference.discopop:Discopop",
        reference="https://arxiv.org/abs/2406.08414",
    ),
    Registration(
        "sigmoid_norm",
        "DPO's logistic loss on mean log-ratios of tokens",
        f"{_HERE}.preference.sigmoid_norm:SigmoidNorm",
        reference="https://arxiv.org/abs/2411.15124",
    ),
    Registration(
        "xpo",
        "XPO: DPO that makes what the reference says anyway less likely",
        f"{_HERE}.preference.xpo:Xpo",
        reference="https://arxiv.org/abs/2405.21046",
    ),
    Registration(
        "nash_md",
        "Nash-MD: policy gradients of how likely the policy's answer is preferred",
        f"{_HERE}.preference.nash_md:NashMd",
        reference="https://arxiv.org/abs/2312.00886",
    ),
    Registration(
        "sft",
        "Negative log-likelihood of the chosen answers, as one loss of several",
        f"{_HERE}.preference.sft:Sft",
        reference="https://arxiv.org/abs/2404.19733",
    ),
    Registration(
        "cpo",
        "CPO: log-probs without a reference, beside the likelihood of the chosen answers",
        f"{_HERE}.preference.cpo:Cpo",
        reference="https://arxiv.org/abs/2401.08417",
    ),
    Registration(
        "simpo",
        "SimPO: mean log-probs without a reference, and a margin",
        f"{_HERE}.preference.simpo:Simpo",
        reference="https://arxiv.org/abs/2405.14734",
    ),
    Registration(
        "alphapo",
        "AlphaPO: SimPO with a reward of another shape",
        f"{_HERE}.preference.alphapo:AlphaPo",
        reference="https://arxiv.org/abs/2501.03884",
    ),
    Registration(
        "orpo",
        "ORPO: likelihood of the chosen answers and the ratio of odds",
        f"{_HERE}.preference.orpo:Orpo",
        reference="https://arxiv.org/abs/2403.07691",
    ),
]
THREE_WAY = [
    Registration(
        "tpo",
        "TPO: CPO whose likelihood is that of a gold answer",
        f"{_HERE}.three_way.tpo:Tpo",
        reference="https://arxiv.org/abs/2405.16681",
    ),
    Registration(
        "tpo_l",
        "TPO-L: mean log-probs, a margin, and the likelihood of a gold answer",
        f"{_HERE}.three_way.tpo_l:TpoL",
        reference="https://arxiv.org/abs/2405.16681",
    ),
]
UNPAIRED = [
    Registration(
        "kto",
        "Good answers above a measured divergence from the reference, bad ones below",
        f"{_HERE}.unpaired.kto:Kto",
        reference="https://arxiv.org/abs/2402.01306",
    ),
    Registration(
        "apo_zero_unpaired",
        "Good answers likelier than under the reference, bad ones less likely",
        f"{_HERE}.unpaired.apo_zero_unpaired:ApoZeroUnpaired",
        reference="https://arxiv.org/abs/2408.06266",
    ),
    Registration(
        "bco",
        "A classifier of good and bad answers against the running mean of rewards",
        f"{_HERE}.unpaired.bco:Bco",
        reference="https://arxiv.org/abs/2404.04656",
    ),
]
REWARD = [
    Registration(
        "bradley_terry",
        "A better answer's reward above a worse one's, with a margin and centring",
        f"{_HERE}.reward.bradley_terry:BradleyTerry",
        reference="https://arxiv.org/abs/2203.02155",
    ),
    Registration(
        "plackett_luce",
        "The likelihood of a whole ranking of answers",
        f"{_HERE}.reward.plackett_luce:PlackettLuce",
        reference="https://doi.org/10.2307/2346567",
    ),
    Registration(
        "regression",
        "The squared distance of a reward from a given score",
        f"{_HERE}.reward.regression:Regression",
        reference="https://arxiv.org/abs/2311.09528",
    ),
]
PROCESS_REWARD = [
    Registration(
        "step_cross_entropy",
        "Cross-entropy of the labels of steps, hard or soft",
        f"{_HERE}.process_reward.step_cross_entropy:StepCrossEntropy",
        reference="https://arxiv.org/abs/2305.20050",
    ),
]

LOSSES = [*TOKEN, *PREFERENCE, *THREE_WAY, *UNPAIRED, *REWARD, *PROCESS_REWARD]
