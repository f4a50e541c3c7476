from millrace.drops import DropReason
from millrace.rest import LedgerView
from services.coordinator.state.faults import Failures


def ledger(trained: int, reasons: dict[DropReason, int]) -> LedgerView:
    dropped = sum(reasons.values())
    counts = {"queued": 0, "leased": 0, "generated": 0, "trained": trained, "dropped": dropped}
    return LedgerView(issued=trained + dropped, reasons=reasons, **counts)


def test_the_share_counts_prompts_that_were_scored_or_were_to_be() -> None:
    reasons = {DropReason.REWARD_FAILED: 10, DropReason.NO_SIGNAL: 10, DropReason.PROMPT_TOO_LONG: 99}
    found = Failures.of(ledger(20, reasons))
    assert (found.failed, found.scored, str(found)) == (10, 40, "10 of 40 prompts (25%)")
    assert found.exceed(0.2, 4) and not found.exceed(0.25, 4)
    assert not found.exceed(0.2, 21), "two steps' worth first"
    assert not Failures(9, 9).exceed(0.5, 4), "too few to judge"
