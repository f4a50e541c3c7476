"""Every correction against its definition on plain lists, by hand, and exact over any split."""

import math
import statistics
from dataclasses import dataclass, field

import pytest
import torch

from millrace.errors import InvalidJob
from millrace.rl.aggregation import BatchTotals
from millrace.rl.corrections import correct
from millrace.rl.metrics.combining import combined, summarised
from millrace.rl.metrics.mismatch import mismatch_metrics
from millrace.rl.registry.catalogue import AlgorithmKind, find, names
from tests.rl.batches import Batch, make_batch


@dataclass(frozen=True)
class Case:
    """A correction with options under which some tokens are kept and some are not."""

    name: str
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}{self.options or ''}"


CASES = [
    Case("tis_token", {"cap": 1.2}),
    Case("tis_sequence", {"cap": 1.2}),
    Case("tis_geometric", {"cap": 1.05}),
    Case("icepop", {"bounds": (0.8, 1.3)}),
    Case("reject_token", {"bounds": (0.8, 1.3)}),
    Case("reject_token", {"estimator": "k2", "limit": 0.05}),
    Case("reject_token", {"estimator": "k3", "limit": 0.05}),
    Case("reject_sequence_sum", {"bounds": (0.5, 2.0)}),
    Case("reject_sequence_sum", {"estimator": "k2", "limit": 0.2}),
    Case("reject_sequence_sum", {"estimator": "k3", "limit": 0.2}),
    Case("reject_sequence_mean", {"estimator": "k1", "bounds": (0.9, 1.1)}),
    Case("reject_sequence_mean", {"estimator": "k2", "limit": 0.03}),
    Case("reject_sequence_mean", {"estimator": "k3", "limit": 0.03}),
    Case("reject_sequence_max", {"bounds": (0.6, 1.6)}),
    Case("reject_sequence_max", {"estimator": "k2", "limit": 0.1}),
    Case("reject_sequence_max", {"estimator": "k3", "limit": 0.1}),
    Case("reject_geometric", {"bounds": (0.9, 1.1)}),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def slowly(case: Case, ratios: list[float]) -> tuple[list[float], list[bool]]:
    """Weights and what is kept of one sequence of ratios π_train/π_rollout."""
    options = case.options
    cap, (low, high), limit = options.get("cap", 0), options.get("bounds", (0, 0)), options.get("limit", 0)
    product = math.prod(ratios)
    ones = [1.0] * len(ratios)
    match case.name:
        case "tis_token":
            return [min(w, cap) for w in ratios], [True] * len(ratios)
        case "tis_sequence":
            return [min(product, cap)] * len(ratios), [True] * len(ratios)
        case "tis_geometric":
            return [min(product ** (1 / len(ratios)), cap)] * len(ratios), [True] * len(ratios)
        case "icepop":
            return [w if low <= w <= high else 0.0 for w in ratios], [True] * len(ratios)
        case "reject_geometric":
            return ones, [low <= product ** (1 / len(ratios)) <= high] * len(ratios)
    estimator = options.get("estimator", "k1")
    far = {"k1": lambda w: w, "k2": lambda w: math.log(w) ** 2 / 2, "k3": lambda w: w - 1 - math.log(w)}[estimator]
    allowed = (lambda d: low <= d <= high) if estimator == "k1" else (lambda d: d <= limit)
    each = [far(w) for w in ratios]
    match case.name:
        case "reject_token":
            return ones, [allowed(d) for d in each]
        case "reject_sequence_sum":
            return ones, [allowed(math.prod(each) if estimator == "k1" else math.fsum(each))] * len(ratios)
        case "reject_sequence_mean":
            mean = product ** (1 / len(ratios)) if estimator == "k1" else statistics.fmean(each)
            return ones, [allowed(mean)] * len(ratios)
        case "reject_sequence_max":
            return ones, [all(map(allowed, each))] * len(ratios)
    raise AssertionError(case.name)


def computed(case: Case, batch: Batch, **arguments):
    return correct(
        case.name,
        train_logprobs_bt=batch.logprobs_bt,
        rollout_logprobs_bt=batch.old_logprobs_bt,
        mask_bt=batch.mask_bt,
        **arguments,
        **case.options,
    )


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(case, seed):
    batch = make_batch(seed, drift=0.3)
    weights_bt, keep_bt, _ = computed(case, batch)
    assert weights_bt.dtype == torch.float64
    assert not weights_bt[~batch.mask_bt].any() and not keep_bt[~batch.mask_bt].any()
    kept = []
    for row, mask in enumerate(batch.mask_bt):
        ratios = (batch.logprobs_bt - batch.old_logprobs_bt)[row, mask].exp().tolist()
        if ratios:
            weights, keep = slowly(case, ratios)
            assert weights_bt[row, mask].tolist() == pytest.approx(weights)
            assert keep_bt[row, mask].tolist() == keep
            kept += keep
    assert any(kept) and (case.name in ("tis_token", "tis_sequence", "tis_geometric", "icepop") or not all(kept))


@every_case
def test_order_and_padding_do_not_matter(case):
    batch = make_batch(3)
    order = [3, 9, 0, 1, 8, 7, 2, 5, 6, 4]
    weights_bt, keep_bt, metrics = computed(case, batch)
    other_weights_bt, other_keep_bt, other_metrics = computed(case, batch.rows(order).padded(2))
    torch.testing.assert_close(other_weights_bt[:, :-2], weights_bt[order])
    assert other_keep_bt[:, :-2].equal(keep_bt[order])
    assert summarised(other_metrics) == pytest.approx(summarised(metrics))


@every_case
def test_metrics_of_micro_batches_combine(case):
    batch = make_batch(4)
    totals = BatchTotals.of(batch.mask_bt)
    parts = [computed(case, batch.rows(rows), totals=totals)[2] for rows in ([0, 9], [1, 2, 3, 4], [5, 6, 7, 8], [9])]
    assert summarised(combined(parts)) == pytest.approx(summarised(computed(case, batch)[2]))


@every_case
def test_no_gradient_and_fp32_stays_fp32(case):
    batch = make_batch(5).to(torch.float32)
    batch.logprobs_bt.requires_grad_()
    weights_bt, _, metrics = computed(case, batch)
    assert weights_bt.dtype == torch.float32
    assert not weights_bt.requires_grad and not any(value.requires_grad for value in metrics.values())


@every_case
def test_equal_policies_need_no_correction(case):
    batch = make_batch(6, drift=0.0)
    weights_bt, keep_bt, metrics = computed(case, batch)
    assert keep_bt.equal(batch.mask_bt)
    assert weights_bt[batch.mask_bt].tolist() == pytest.approx([1.0] * int(batch.mask_bt.sum()))
    numbers = summarised(metrics)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_diff_max"):
        assert numbers[f"rollout_corr/{name}"] == pytest.approx(0.0, abs=1e-12)


def test_every_correction_is_tested():
    assert {case.name for case in CASES} == set(names(AlgorithmKind.CORRECTION))


def test_mismatch_metrics_by_hand():
    nan = math.nan
    train_bt = torch.tensor([[0.5, 0.25, 9.0], [0.1, 9.0, 9.0], [nan] * 3], dtype=torch.float64).log()
    rollout_bt = torch.tensor([[0.25, 0.25, nan], [0.4, nan, nan], [nan] * 3], dtype=torch.float64).log()
    mask_bt = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    numbers = summarised(mismatch_metrics(train_bt, rollout_bt, mask_bt))
    half = math.log(2)
    expected = {
        "kl": (-half + 0 + 2 * half) / 3,
        "k3_kl": (2 - 1 - half + 0 + 0.25 - 1 + 2 * half) / 3,
        "chi2_token": (4 + 1 + 1 / 16) / 3 - 1,
        "chi2_seq": (4 + 1 / 16) / 2 - 1,
        "training_ppl": (math.sqrt(8) + 10) / 2,
        "rollout_ppl": (4 + 2.5) / 2,
        "training_log_ppl": (math.log(8) / 2 + math.log(10)) / 2,
        "rollout_log_ppl": (math.log(4) + math.log(2.5)) / 2,
        "log_ppl_diff": (-half / 2 + 2 * half) / 2,
        "log_ppl_abs_diff": (half / 2 + 2 * half) / 2,
        "log_ppl_diff_max": 2 * half,
        "log_ppl_diff_min": -half / 2,
        "ppl_ratio": (2**-0.5 + 4) / 2,
    }
    assert numbers == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()})


def by_ratio(name: str, ratios: list[float], **options):
    train_bt = torch.tensor([ratios], dtype=torch.float64).log() - 3
    return correct(
        name,
        train_logprobs_bt=train_bt,
        rollout_logprobs_bt=torch.full_like(train_bt, -3.0),
        mask_bt=torch.ones_like(train_bt),
        **options,
    )


def test_weight_metrics_by_hand():
    weights_bt, _, metrics = by_ratio("tis_token", [0.25, 1.0, 4.0])
    assert weights_bt[0].tolist() == pytest.approx([0.25, 1.0, 2.0])
    numbers = summarised(metrics)
    mean, square = 3.25 / 3, (0.0625 + 1 + 4) / 3
    assert numbers["rollout_corr/rollout_is_mean"] == pytest.approx(mean)
    assert numbers["rollout_corr/rollout_is_std"] == pytest.approx(math.sqrt(square - mean**2))
    assert numbers["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(mean**2 / square)
    assert numbers["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert numbers["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    extremes = numbers["rollout_corr/rollout_is_min"], numbers["rollout_corr/rollout_is_max"]
    assert extremes == pytest.approx((0.25, 2.0))


def test_metrics_of_weights_by_sequence_are_over_sequences_before_truncation() -> None:
    """As in verl since 0.8: fractions are of sequences, not of tokens, and extremes are those of the ratio."""
    log_ratio_bt = torch.tensor([[2.0, 2.0, 1.855], [-1.0, 0.0, 0.0], [0.1, 0.0, 0.0]], dtype=torch.float64)
    mask_bt = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]])
    rollout_bt = torch.full_like(log_ratio_bt, -8.0)
    inputs = {"train_logprobs_bt": rollout_bt + log_ratio_bt, "rollout_logprobs_bt": rollout_bt, "mask_bt": mask_bt}
    weights_bt, _, metrics = correct("tis_sequence", **inputs)
    assert weights_bt[0].tolist() == pytest.approx([2.0] * 3)
    numbers = {name.removeprefix("rollout_corr/"): value for name, value in summarised(metrics).items()}
    assert numbers["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)  # 3/5 of the tokens
    assert numbers["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    assert numbers["rollout_is_max"] == pytest.approx(math.exp(5.855), rel=1e-6)  # 349; truncated it is 2
    assert numbers["rollout_is_min"] == pytest.approx(math.exp(-1))
    assert numbers["rollout_is_mean"] == pytest.approx((3 * 2 + math.exp(-1) + math.exp(0.1)) / 5)
    geometric = summarised(correct("tis_geometric", **inputs)[2])
    assert geometric["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(5.855 / 3), rel=1e-6)


def test_a_token_far_off_counts_whole_in_sums_and_means_of_its_sequence() -> None:
    """One token of 8 is 50 nats off, beyond the ±20 to which what is exponentiated is clamped."""
    log_ratio_bt = torch.tensor([[-50.0] + [8.0] * 7], dtype=torch.float64)
    rollout_bt = torch.full_like(log_ratio_bt, -60.0)
    inputs = {"train_logprobs_bt": rollout_bt + log_ratio_bt, "rollout_logprobs_bt": rollout_bt}
    inputs |= {"mask_bt": torch.ones_like(log_ratio_bt)}
    ratio = math.exp((7 * 8 - 50) / 8)
    weights_bt, _, metrics = correct("tis_geometric", cap=100.0, **inputs)
    assert weights_bt[0].tolist() == pytest.approx([ratio] * 8)
    assert correct("reject_geometric", bounds=(0.5, 1.01 * ratio), **inputs)[1].all()
    assert correct("reject_sequence_mean", estimator="k1", bounds=(0.5, 1.01 * ratio), **inputs)[1].all()
    numbers = summarised(metrics)
    assert numbers["rollout_corr/kl"] == pytest.approx(-(7 * 8 - 50) / 8)
    assert numbers["rollout_corr/chi2_seq"] == pytest.approx(math.exp(2 * 6) - 1)
    assert numbers["rollout_corr/k3_kl"] == pytest.approx((7 * (math.exp(8) - 1 - 8) + 49) / 8)


def test_rejection_bounds_are_on_the_ratio_itself():
    _, keep_bt, metrics = by_ratio("reject_token", [1.8, 0.6, 1.0], bounds=(0.5, 1.5))
    assert keep_bt[0].tolist() == [False, True, True]
    numbers = summarised(metrics)
    assert numbers["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert numbers["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0


def test_product_and_geometric_mean_are_different_things():
    assert by_ratio("tis_sequence", [0.5, 0.5, 0.5])[0][0, 0].item() == pytest.approx(0.125)
    assert by_ratio("tis_geometric", [0.5, 0.5, 0.5])[0][0, 0].item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("icepop", {"bounds": [2.0, 0.5]}, "lower bound has to be below"),
        ("icepop", {"bounds": [1.5, 2.0]}, "enclose 1"),
        ("icepop", {"bounds": [0.5]}, "bounds"),
        ("tis_token", {"cap": 0.0}, "is not more than 0"),
        ("reject_token", {"estimator": "k4"}, "'k1', 'k2' or 'k3'"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(name, options, complaint):
    with pytest.raises(InvalidJob, match=complaint):
        find(AlgorithmKind.CORRECTION, name).check(options, "algorithm.correction")
