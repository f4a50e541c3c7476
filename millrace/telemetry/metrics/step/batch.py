"""What a step was trained on: rewards, lengths, staleness, and how it was cut into micro-batches."""

from millrace.telemetry.metrics.declaration import Unit, by_coordinator, by_trainer

SCORE = "critic/score"
MEAN_SCORE = f"{SCORE}/mean"
RESPONSES_CUT = "response_length/clip_ratio"
STALE_TRAJECTORIES = "fully_async/count/stale_trajectory_processed"
GROUPS_WITHOUT_SIGNAL = "training/groups_without_signal"

BATCH = (
    by_coordinator("training/global_step", Unit.STEP, "The number of the step; 0 is before training."),
    by_coordinator(
        "training/epoch",
        Unit.COUNT,
        "The pass over the data that the step's prompts are from, counted from 0; of two passes the later.",
    ),
    by_coordinator(
        "critic/score/{statistic}",
        Unit.REWARD,
        "Reward of an episode as the reward function gave it, with the rewards of its turns.",
    ),
    by_coordinator(
        "rewards/{reward_part}/{statistic}",
        Unit.REWARD,
        "Score of an episode by one of `reward.functions`, before its weight, or one of the numbers that `reward.parts`"
        " names.",
    ),
    by_trainer(
        "critic/rewards/{statistic}",
        Unit.REWARD,
        "Reward of an episode as the advantages use it: with the overlong penalty, and with the KL penalty where"
        " `algorithm.kl_in` is `reward`.",
    ),
    by_trainer("critic/advantages/{statistic}", Unit.REWARD, "Advantage of a sampled token."),
    by_trainer("critic/values/{statistic}", Unit.REWARD, "Value that the critic gave a sampled token."),
    by_trainer("critic/returns/{statistic}", Unit.REWARD, "Return of a sampled token, which the critic learns."),
    by_trainer(
        "critic/vf_explained_var",
        Unit.SHARE,
        "1 − Var(return − value) / Var(return): 1 for a perfect critic, 0 or less for a useless one.",
    ),
    by_coordinator(
        "response_length/{statistic}",
        Unit.TOKENS,
        "Length of a response: all tokens after the prompt, sampled and given.",
    ),
    by_coordinator(
        "response/sampled_ratio",
        Unit.SHARE,
        "Part of the response tokens that the policy sampled; the others are results of tools and what users said. Only"
        " if an episode has several turns or trajectories, as with the next two.",
    ),
    by_coordinator("num_turns/{statistic}", Unit.COUNT, "Turns of an episode: answers of the policy in it."),
    by_coordinator(
        "num_trajectories/{statistic}",
        Unit.COUNT,
        "Trajectories of an episode: more than one if its history was rewritten.",
    ),
    by_coordinator(
        "tool_calls/{statistic}",
        Unit.COUNT,
        "Calls of tools in an episode. Only with `rollout.environment`, as with the next four.",
    ),
    by_coordinator("tool_calls/failed_ratio", Unit.SHARE, "Part of the calls of tools whose result was an error."),
    by_coordinator("timing_s/tools/{statistic}", Unit.SECONDS, "Time in tools in an episode."),
    by_coordinator(
        "episode/truncated_ratio",
        Unit.SHARE,
        "Episodes that ended at a limit of turns or tokens, not by their environment.",
    ),
    by_coordinator(
        "episode/rerun_ratio",
        Unit.SHARE,
        "Episodes that were run again because their environment failed or took too long.",
    ),
    by_coordinator(
        "episode/cached_prefix_ratio",
        Unit.SHARE,
        "Of the tokens of the turn before, with which a turn begins: those whose keys and values the engine's cache"
        " still had. The others were computed again. Only turns under the same weights count, and only of engines that"
        " tell (vllm, sglang).",
    ),
    by_coordinator(
        "episode/limit",
        Unit.COUNT,
        "Episodes that a replica let go on at once, mean over the episodes at their end. It falls where the engine's"
        " cache is too small for those that are open. Only where replicas admit episodes by the cache, as with the"
        " next two.",
    ),
    by_coordinator("episode/open", Unit.COUNT, "Episodes that went on at once on their replica, the same way."),
    by_coordinator(
        "timing_s/held_back",
        Unit.SECONDS,
        "Time that an episode waited for room in the engine's cache, before its first turn and between turns.",
    ),
    by_coordinator(
        "episode/cancelled_ratio",
        Unit.SHARE,
        "Episodes that were cancelled when their group had `rollout.min_samples` others. Only if some are missing,"
        " as with the next one.",
    ),
    by_coordinator(
        "episode/failed_ratio",
        Unit.SHARE,
        "Episodes that failed and were left out of their group, which had `rollout.min_samples` others.",
    ),
    by_coordinator(
        "response/aborted_ratio",
        Unit.SHARE,
        "Responses without a token, as in verl. It is 0: a group with such a response is dropped (`malformed_group`).",
    ),
    by_coordinator(RESPONSES_CUT, Unit.SHARE, "Responses that are as long as `rollout.max_response_tokens` allows."),
    by_coordinator("prompt_length/{statistic}", Unit.TOKENS, "Length of a prompt; over the groups."),
    by_coordinator(
        "prompt_length/clip_ratio", Unit.SHARE, "Prompts that are as long as `data.max_prompt_tokens` allows."
    ),
    by_coordinator(
        "training/staleness/{statistic}",
        Unit.VERSIONS,
        "Version that the trainer held less the oldest version among a trajectory's tokens.",
    ),
    by_coordinator(
        "training/mean_staleness/{statistic}",
        Unit.VERSIONS,
        "Version that the trainer held less the mean version of a trajectory's tokens.",
    ),
    by_coordinator(
        "training/off_policy/trajectory_spans/{statistic}",
        Unit.VERSIONS,
        "Versions from the oldest to the newest of a trajectory's tokens, both counted: 1 if one version sampled all.",
    ),
    by_coordinator(
        "training/off_policy/trajectory_staleness/{statistic}",
        Unit.VERSIONS,
        "Version that the trainer held less the newest version among a trajectory's tokens.",
    ),
    by_coordinator(
        "training/off_policy/trajectory_staleness_worst/{statistic}",
        Unit.VERSIONS,
        "The same as `training/staleness/{statistic}`, by verl's name.",
    ),
    by_coordinator(
        STALE_TRAJECTORIES,
        Unit.COUNT,
        "Trajectories that the job was trained on so far whose newest version was not the trainer's.",
    ),
    by_coordinator(
        "training/too_stale_groups",
        Unit.COUNT,
        "Groups that came too late for the step: `schedule.too_stale` says what became of them.",
    ),
    by_coordinator(
        "response_length/offered_mean",
        Unit.TOKENS,
        "Mean over all responses that were complete for the step, trained or not. If `response_length/mean` differs "
        "much, steps favour a length.",
    ),
    by_coordinator(
        "response_length/too_stale_mean",
        Unit.TOKENS,
        "Mean over the responses of `training/too_stale_groups`; if there are any.",
    ),
    by_coordinator(
        "response_length/without_signal_mean",
        Unit.TOKENS,
        "Mean over the responses of groups that were dropped because their rewards are equal; if there are any.",
    ),
    by_coordinator(
        "response_length/carried_mean",
        Unit.TOKENS,
        "Mean over the step's responses with tokens of several versions; if there are any.",
    ),
    by_coordinator(
        "fully_async/partial/total_partial_num",
        Unit.COUNT,
        "The step's responses with tokens of several versions, which verl calls partial.",
    ),
    by_coordinator("fully_async/partial/partial_ratio", Unit.SHARE, "Their share of the step's responses."),
    by_coordinator(
        "fully_async/partial/max_partial_span", Unit.VERSIONS, "Newest less oldest version of a response, at most."
    ),
    by_coordinator(GROUPS_WITHOUT_SIGNAL, Unit.COUNT, "Groups of the step whose rewards are all equal."),
    by_trainer(
        "global_seqlen/min",
        Unit.TOKENS,
        "Tokens of the data-parallel rank that would have fewest if the trajectories were dealt out in their order.",
    ),
    by_trainer("global_seqlen/max", Unit.TOKENS, "Tokens of the rank that would then have most."),
    by_trainer("global_seqlen/minmax_diff", Unit.TOKENS, "The difference of the two."),
    by_trainer("global_seqlen/balanced_min", Unit.TOKENS, "Tokens of the rank that has fewest."),
    by_trainer("global_seqlen/balanced_max", Unit.TOKENS, "Tokens of the rank that has most."),
    by_trainer("global_seqlen/mean", Unit.TOKENS, "Mean over the ranks."),
    by_trainer(
        "batch/token_budget",
        Unit.TOKENS,
        "Tokens that a micro-batch may have: `trainer.token_budget`, or less since a rank ran out of memory.",
    ),
    by_trainer(
        "batch/parts",
        Unit.COUNT,
        "Parts in which the trainer took the step's groups: more than 1 with `trainer.streaming`.",
    ),
    by_trainer("batch/microbatches", Unit.COUNT, "Micro-batches of a rank, over all updates of the step."),
    by_trainer("batch/waste", Unit.SHARE, "Part of the token budget of all micro-batches that holds no token."),
    by_trainer(
        "batch/imbalance",
        Unit.RATIO,
        "Cost of the costliest rank of each micro-batch over the mean cost of the ranks, less 1; 0 is even.",
    ),
)
