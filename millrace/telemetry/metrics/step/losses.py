"""What the policy's and the critic's updates report. Means are over the tokens that count."""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

TRAINER = Owner.TRAINER

LOSSES = (
    StepMetric("actor/pg_loss", Unit.LOSS, TRAINER, "Policy loss, without KL and entropy."),
    StepMetric("actor/kl_loss", Unit.NATS, TRAINER, "KL to the reference, before its coefficient."),
    StepMetric("actor/entropy", Unit.NATS, TRAINER, "Entropy of the policy."),
    StepMetric("actor/grad_norm", Unit.NORM, TRAINER, "Norm of the policy's gradient before it is clipped."),
    StepMetric("actor/lr", Unit.LEARNING_RATE, TRAINER, "Learning rate of the policy."),
    StepMetric(
        "actor/reference_kl",
        Unit.NATS,
        TRAINER,
        "Mean KL to the reference under the weights that the step began with; what `algorithm.kl_target` steers.",
    ),
    StepMetric("actor/kl_coef", Unit.RATIO, TRAINER, "Coefficient of the KL term in this step."),
    StepMetric("actor/ppo_kl", Unit.NATS, TRAINER, "Estimate k1 of KL(π_old‖π): mean of log π_old − log π."),
    StepMetric("actor/approx_kl_k3", Unit.NATS, TRAINER, "Estimate k3 of KL(π_old‖π)."),
    StepMetric("actor/ratio_mean", Unit.RATIO, TRAINER, "Mean of π/π_old."),
    StepMetric("actor/ratio_max", Unit.RATIO, TRAINER, "Largest π/π_old."),
    StepMetric("actor/ratio_min", Unit.RATIO, TRAINER, "Smallest π/π_old."),
    StepMetric("actor/ratio_p01", Unit.RATIO, TRAINER, "1 % quantile of π/π_old."),
    StepMetric("actor/ratio_p50", Unit.RATIO, TRAINER, "Median of π/π_old."),
    StepMetric("actor/ratio_p99", Unit.RATIO, TRAINER, "99 % quantile of π/π_old."),
    StepMetric("actor/pg_clipfrac", Unit.SHARE, TRAINER, "Tokens that the policy loss clips or leaves out."),
    StepMetric("actor/clip_fraction_low", Unit.SHARE, TRAINER, "Tokens that are clipped at the lower bound."),
    StepMetric("actor/clip_fraction_high", Unit.SHARE, TRAINER, "Tokens that are clipped at the upper bound."),
    StepMetric("actor/pg_clipfrac_lower", Unit.SHARE, TRAINER, "Tokens whose loss dual clipping limits (`dual_clip`)."),
    StepMetric("actor/cap_fraction", Unit.SHARE, TRAINER, "Tokens whose ratio is above `cap` (`dppo_tv`, `dppo_kl`)."),
    StepMetric(
        "actor/cov_fraction",
        Unit.SHARE,
        TRAINER,
        "Tokens that were selected for their covariance (`clip_cov`, `kl_cov`).",
    ),
    StepMetric(
        "actor/top_entropy_threshold",
        Unit.NATS,
        TRAINER,
        "Smallest entropy of a token whose policy loss counts (`algorithm.top_entropy_fraction`).",
    ),
    StepMetric(
        "actor/off_policy_fraction", Unit.SHARE, TRAINER, "Tokens that `algorithm.off_policy_limit` leaves out."
    ),
    StepMetric("actor/quadratic_penalty", Unit.LOSS, TRAINER, "Mean of beta/2·(log π/π_old)² (`dro`)."),
    StepMetric("actor/gate_slope", Unit.RATIO, TRAINER, "Mean slope of the gate, 1 if π = π_old (`sapo`)."),
    StepMetric(
        "actor/behaviour_weight", Unit.RATIO, TRAINER, "Mean of π_old/π_behaviour as applied (`decoupled_ppo`)."
    ),
    StepMetric(
        "actor/behaviour_cap_fraction",
        Unit.SHARE,
        TRAINER,
        "Tokens that are left out as π_old/π_behaviour is above `cap` (`decoupled_ppo`).",
    ),
    StepMetric(
        "actor/{name}",
        Unit.REPORTED,
        TRAINER,
        "Mean of what a user's own policy loss reports for each token.",
        user_defined=True,
    ),
    StepMetric("distillation/loss", Unit.LOSS, TRAINER, "Distillation loss, before its coefficient."),
    StepMetric(
        "distillation/kl",
        Unit.NATS,
        TRAINER,
        "Mean of log π − log p over the sampled tokens, p the teacher: the estimate k1 of KL(π‖p).",
    ),
    StepMetric("distillation/abs_logprob_diff", Unit.NATS, TRAINER, "Mean of |log π − log p| over the sampled tokens."),
    StepMetric(
        "distillation/teacher_mass",
        Unit.SHARE,
        TRAINER,
        "Probability of the teacher's most likely tokens under the teacher (`forward_kl_topk`).",
    ),
    StepMetric("distillation/student_mass", Unit.SHARE, TRAINER, "The same under the policy (`forward_kl_topk`)."),
    StepMetric("distillation/cap_fraction", Unit.SHARE, TRAINER, "Tokens whose cost is limited by `cap` (`k1`)."),
    StepMetric(
        "distillation/{name}",
        Unit.REPORTED,
        TRAINER,
        "Mean of what a user's own distillation loss reports for each token.",
        user_defined=True,
    ),
    StepMetric("critic/vf_loss", Unit.LOSS, TRAINER, "Value loss."),
    StepMetric("critic/vf_clipfrac", Unit.SHARE, TRAINER, "Tokens whose value loss is clipped."),
    StepMetric("critic/vpred_mean", Unit.REWARD, TRAINER, "Mean value during the update."),
    StepMetric("critic/return_mean", Unit.REWARD, TRAINER, "Mean return that the update learns from."),
    StepMetric("critic/value_square_error", Unit.REWARD_SQUARED, TRAINER, "Mean of (value − return)²."),
    StepMetric("critic/grad_norm", Unit.NORM, TRAINER, "Norm of the critic's gradient before it is clipped."),
    StepMetric("critic/lr", Unit.LEARNING_RATE, TRAINER, "Learning rate of the critic."),
)
