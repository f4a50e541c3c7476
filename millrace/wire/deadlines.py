"""Deadlines of all remote calls, in seconds. A job's `deadlines` override those marked with one of its fields:
`Deadlines.of_calls` in millrace/spec/schedule.py."""

FINISH_S = 60.0
"""After save_s the trainer has this long to say which rank was late."""
COMMIT_S = 10.0
"""Time for COMMIT if the other phases have used up deadlines.publication_s."""
DEADLINES_S: dict[str, float] = {
    "Fleet/Register": 10.0,
    "Fleet/Heartbeat": 5.0,
    "Fleet/Drain": 10.0,
    "Fleet/Leave": 5.0,
    "Fleet/FindPool": 40.0,  # waits for a replica for up to wait_s, at most 30
    "Work/Lease": 40.0,  # waits for work for up to wait_s, at most 30
    "Work/Extend": 10.0,
    "Work/Complete": 30.0,
    "Work/Release": 10.0,
    "Work/Fetch": 120.0,
    "Rollout/Configure": 1800.0,  # deadlines.configure_s
    "Rollout/DescribeWeights": 120.0,
    "Rollout/PreparePublication": 60.0,
    "Rollout/TransferPublication": 60.0,
    "Rollout/VerifyPublication": 310.0,  # deadlines.publication_s + COMMIT_S
    "Rollout/CommitPublication": 60.0,
    "Rollout/AbortPublication": 10.0,
    "Rollout/DescribeCopy": 120.0,
    "Rollout/PrepareCopy": 60.0,
    "Rollout/TransferCopy": 300.0,  # deadlines.publication_s
    "Rollout/FinishCopy": 10.0,
    "Rollout/Generate": 600.0,
    "Rollout/GetStatus": 5.0,
    "Rollout/Drain": 10.0,
    "Scoring/Configure": 1800.0,  # deadlines.configure_s
    "Scoring/ScoreTokens": 300.0,  # pools.timeout_s
    "Scoring/ScoreConversations": 300.0,  # pools.timeout_s
    "Scoring/GetStatus": 5.0,
    "Logs/Tail": 5.0,
    "Nodes/Join": 10.0,
    "Nodes/Beat": 5.0,  # waits for an order for up to a second
    "Trainer/Configure": 1800.0,  # deadlines.configure_s
    "Trainer/AddPart": 3600.0,  # deadlines.step_s
    "Trainer/Step": 3600.0,  # deadlines.step_s
    "Trainer/DescribeWeights": 120.0,
    "Trainer/PreparePublication": 60.0,
    "Trainer/TransferPublication": 300.0,  # deadlines.publication_s
    "Trainer/FinishPublication": 30.0,
    "Trainer/Save": 3600.0,  # deadlines.save_s
    "Trainer/FinishSave": 3660.0,  # deadlines.save_s + FINISH_S
    "Trainer/Load": 1800.0,  # deadlines.configure_s
    "Trainer/CopyState": 3600.0,  # deadlines.save_s
    "Trainer/ReceiveState": 3660.0,  # deadlines.save_s + FINISH_S
    "Trainer/GetStatus": 5.0,
    "Health/Check": 5.0,
}
