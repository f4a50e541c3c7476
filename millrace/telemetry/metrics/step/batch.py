"""What a step was trained on: rewards, lengths, staleness, and how it was cut into micro-batches."""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

COORDINATOR, TRAINER = Owner.COORDINATOR, Owner.TRAINER

SCORE = "critic/score"
MEAN_SCORE = f"{SCORE}/mean"
RESPONSES_CUT = "response_length/clip_ratio"
STALE_TRAJECTORIES = "fully_async/count/stale_trajectory_processed"
GROUPS_WITHOUT_SIGNAL = "training/groups_without_signal"

BATCH = (
    StepMetric("training/global_step", Unit.STEP, COORDINATOR, "The number of the step; 0 is before training."),
    StepMetric(
        "training/epoch",
        Unit.COUNT,
        COORDINATOR,
        "The pass over the data that the step's prompts are from, counted from 0; of two passes the later.",
    ),
    StepMetric(
        "critic/score/{statistic}",
        Unit.REWARD,
        COORDINATOR,
        "Reward of an episode as the reward function gave it, with the rewards of its turns.",
    ),
    StepMetric(
        "rewards/{reward_part}/{statistic}",
        Unit.REWARD,
        COORDINATOR,
        "Score of an episode by one of `reward.functions`, before its weight, or one of the numbers that `reward.parts`"
        " names.",
    ),
    StepMetric(
        "critic/rewards/{statistic}",
        Unit.REWARD,
        TRAINER,
        "Reward of an episode as the advantages use it: with the overlong penalty, and with the KL penalty where"
        " `algorithm.kl_in` is `reward`.",
    ),
    StepMetric("critic/advantages/{statistic}", Unit.REWARD, TRAINER, "Advantage of a sampled token."),
    StepMetric("critic/values/{statistic}", Unit.REWARD, TRAINER, "Value that the critic gave a sampled token."),
    StepMetric(
        "critic/returns/{statistic}", Unit.REWARD, TRAINER, "Return of a sampled token, which the critic learns."
    ),
    StepMetric(
        "critic/vf_explained_var",
        Unit.SHARE,
        TRAINER,
        "1 − Var(return − value) / Var(return): 1 for a perfect critic, 0 or less for a useless one.",
    ),
    StepMetric(
        "response_length/{statistic}",
        Unit.TOKENS,
        COORDINATOR,
        "Length of a response: all tokens after the prompt, sampled and given.",
    ),
    StepMetric(
        "response/sampled_ratio",
        Unit.SHARE,
        COORDINATOR,
        "Part of the response tokens that the policy sampled; the others are results of tools and what users said. Only"
        " if an episode has several turns or trajectories, as with the next two.",
    ),
    StepMetric("num_turns/{statistic}", Unit.COUNT, COORDINATOR, "Turns of an episode: answers of the policy in it."),
    StepMetric(
        "num_trajectories/{statistic}",
        Unit.COUNT,
        COORDINATOR,
        "Trajectories of an episode: more than one if its history was rewritten.",
    ),
    StepMetric(
        "tool_calls/{statistic}",
        Unit.COUNT,
        COORDINATOR,
        "Calls of tools in an episode. Only with `rollout.environment`, as with the next four.",
    ),
    StepMetric(
        "tool_calls/failed_ratio", Unit.SHARE, COORDINATOR, "Part of the calls of tools whose result was an error."
    ),
    StepMetric("timing_s/tools/{statistic}", Unit.SECONDS, COORDINATOR, "Time in tools in an episode."),
    StepMetric(
        "episode/truncated_ratio",
        Unit.SHARE,
        COORDINATOR,
        "Episodes that ended at a limit of turns or tokens, not by their environment.",
    ),
    StepMetric(
        "episode/rerun_ratio",
        Unit.SHARE,
        COORDINATOR,
        "Episodes that were run again because their environment failed or took too long.",
    ),
    StepMetric(
        "episode/cached_prefix_ratio",
        Unit.SHARE,
        COORDINATOR,
        "Of the tokens of the turn before, with which a turn begins: those whose keys and values the engine's cache"
        " still had. The others were computed again. Only turns under the same weights count, and only of engines that"
        " tell (vllm, sglang).",
    ),
    StepMetric(
        "episode/limit",
        Unit.COUNT,
        COORDINATOR,
        "Episodes that a replica let go on at once, mean over the episodes at their end. It falls where the engine's"
        " cache is too small for those that are open. Only where replicas admit episodes by the cache, as with the"
        " next two.",
    ),
    StepMetric(
        "episode/open", Unit.COUNT, COORDINATOR, "Episodes that went on at once on their replica, the same way."
    ),
    StepMetric(
        "timing_s/held_back",
        Unit.SECONDS,
        COORDINATOR,
        "Time that an episode waited for room in the engine's cache, before its first turn and between turns.",
    ),
    StepMetric(
        "episode/cancelled_ratio",
        Unit.SHARE,
        COORDINATOR,
        "Episodes that were cancelled when their group had `rollout.min_samples` others. Only if some are missing,"
        " as with the next one.",
    ),
    StepMetric(
        "episode/failed_ratio",
        Unit.SHARE,
        COORDINATOR,
        "Episodes that failed and were left out of their group, which had `rollout.min_samples` others.",
    ),
    StepMetric(
        "response/aborted_ratio",
        Unit.SHARE,
        COORDINATOR,
        "Responses without a token, as in verl. It is 0: a group with such a response is dropped (`malformed_group`).",
    ),
    StepMetric(
        RESPONSES_CUT,
        Unit.SHARE,
        COORDINATOR,
        "Responses that are as long as `rollout.max_response_tokens` allows.",
    ),
    StepMetric("prompt_length/{statistic}", Unit.TOKENS, COORDINATOR, "Length of a prompt; over the groups."),
    StepMetric(
        "prompt_length/clip_ratio",
        Unit.SHARE,
        COORDINATOR,
        "Prompts that are as long as `data.max_prompt_tokens` allows.",
    ),
    StepMetric(
        "training/staleness/{statistic}",
        Unit.VERSIONS,
        COORDINATOR,
        "Version that the trainer held less the oldest version among a trajectory's tokens.",
    ),
    StepMetric(
        "training/mean_staleness/{statistic}",
        Unit.VERSIONS,
        COORDINATOR,
        "Version that the trainer held less the mean version of a trajectory's tokens.",
    ),
    StepMetric(
        "training/off_policy/trajectory_spans/{statistic}",
        Unit.VERSIONS,
        COORDINATOR,
        "Versions from the oldest to the newest of a trajectory's tokens, both counted: 1 if one version sampled all.",
    ),
    StepMetric(
        "training/off_policy/trajectory_staleness/{statistic}",
        Unit.VERSIONS,
        COORDINATOR,
        "Version that the trainer held less the newest version among a trajectory's tokens.",
    ),
    StepMetric(
        "training/off_policy/trajectory_staleness_worst/{statistic}",
        Unit.VERSIONS,
        COORDINATOR,
        "The same as `training/staleness/{statistic}`, by verl's name.",
    ),
    StepMetric(
        STALE_TRAJECTORIES,
        Unit.COUNT,
        COORDINATOR,
        "Trajectories that the job was trained on so far whose newest version was not the trainer's.",
    ),
    StepMetric(
        "training/too_stale_groups",
        Unit.COUNT,
        COORDINATOR,
        "Groups that came too late for the step: `schedule.too_stale` says what became of them.",
    ),
    StepMetric(
        "response_length/offered_mean",
        Unit.TOKENS,
        COORDINATOR,
        "Mean over all responses that were complete for the step, trained or not. If `response_length/mean` differs "
        "much, steps favour a length.",
    ),
    StepMetric(
        "response_length/too_stale_mean",
        Unit.TOKENS,
        COORDINATOR,
        "Mean over the responses of `training/too_stale_groups`; if there are any.",
    ),
    StepMetric(
        "response_length/without_signal_mean",
        Unit.TOKENS,
        COORDINATOR,
        "Mean over the responses of groups that were dropped because their rewards are equal; if there are any.",
    ),
    StepMetric(
        "response_length/carried_mean",
        Unit.TOKENS,
        COORDINATOR,
        "Mean over the step's responses with tokens of several versions; if there are any.",
    ),
    StepMetric(
        "fully_async/partial/total_partial_num",
        Unit.COUNT,
        COORDINATOR,
        "The step's responses with tokens of several versions, which verl calls partial.",
    ),
    StepMetric("fully_async/partial/partial_ratio", Unit.SHARE, COORDINATOR, "Their share of the step's responses."),
    StepMetric(
        "fully_async/partial/max_partial_span",
        Unit.VERSIONS,
        COORDINATOR,
        "Newest less oldest version of a response, at most.",
    ),
    StepMetric(
        GROUPS_WITHOUT_SIGNAL,
        Unit.COUNT,
        COORDINATOR,
        "Groups of the step whose rewards are all equal.",
    ),
    StepMetric(
        "global_seqlen/min",
        Unit.TOKENS,
        TRAINER,
        "Tokens of the data-parallel rank that would have fewest if the trajectories were dealt out in their order.",
    ),
    StepMetric("global_seqlen/max", Unit.TOKENS, TRAINER, "Tokens of the rank that would then have most."),
    StepMetric("global_seqlen/minmax_diff", Unit.TOKENS, TRAINER, "The difference of the two."),
    StepMetric("global_seqlen/balanced_min", Unit.TOKENS, TRAINER, "Tokens of the rank that has fewest."),
    StepMetric("global_seqlen/balanced_max", Unit.TOKENS, TRAINER, "Tokens of the rank that has most."),
    StepMetric("global_seqlen/mean", Unit.TOKENS, TRAINER, "Mean over the ranks."),
    StepMetric(
        "batch/token_budget",
        Unit.TOKENS,
        TRAINER,
        "Tokens that a micro-batch may have: `trainer.token_budget`, or less since a rank ran out of memory.",
    ),
    StepMetric(
        "batch/parts",
        Unit.COUNT,
        TRAINER,
        "Parts in which the trainer took the step's groups: more than 1 with `trainer.streaming`.",
    ),
    StepMetric("batch/microbatches", Unit.COUNT, TRAINER, "Micro-batches of a rank, over all updates of the step."),
    StepMetric(
        "batch/waste", Unit.SHARE, TRAINER, "Part of the token budget of all micro-batches that holds no token."
    ),
    StepMetric(
        "batch/imbalance",
        Unit.RATIO,
        TRAINER,
        "Cost of the costliest rank of each micro-batch over the mean cost of the ranks, less 1; 0 is even.",
    ),
)
