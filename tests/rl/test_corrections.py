"""Every correction against its definition on plain lists, by hand, and exact over any split."""

import math
import statistics
from dataclasses import dataclass, field

import pytest
import torch

from millrace.errors import InvalidJob
from millrace.rl.registry.catalogue import AlgorithmKind, find, names
from services.trainer.algorithms import corrections
from services.trainer.algorithms.aggregation import BatchTotals, combined, summarised
from services.trainer.algorithms.corrections import mismatch_metrics
from tests.rl.batches import Batch, make_batch, ragged


@dataclass(frozen=True)
class Case:
    """A correction with options under which some tokens are kept and some are not."""

    name: str
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}{self.options or ''}"


CASES = [
    Case("tis_token", {"cap": 1.2}),
    Case("tis_token", {"cap": 1.2, "floor": 0.9}),
    Case("tis_sequence", {"cap": 1.2}),
    Case("tis_sequence", {"cap": 1.2, "floor": 0.8}),
    Case("tis_geometric", {"cap": 1.05}),
    Case("tis_geometric", {"cap": 1.05, "floor": 0.95}),
    Case("icepop", {"bounds": (0.8, 1.3)}),
    Case("icepop_sequence", {"bounds": (0.6, 1.5)}),
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
    floor = options.get("floor", 0)
    product = math.prod(ratios)
    ones = [1.0] * len(ratios)
    match case.name:
        case "tis_token":
            return [max(min(w, cap), floor) for w in ratios], [True] * len(ratios)
        case "tis_sequence":
            return [max(min(product, cap), floor)] * len(ratios), [True] * len(ratios)
        case "tis_geometric":
            return [max(min(product ** (1 / len(ratios)), cap), floor)] * len(ratios), [True] * len(ratios)
        case "icepop":
            return [w if low <= w <= high else 0.0 for w in ratios], [True] * len(ratios)
        case "icepop_sequence":
            return [product if low <= product <= high else 0.0] * len(ratios), [True] * len(ratios)
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


def correct(chosen, *, mask_bt, totals: BatchTotals | None = None, **arguments):
    """Weights, kept tokens and metrics; `totals` where the tensors are a part of a batch."""
    made = corrections.correct(chosen, mask_bt=mask_bt, **arguments)
    return made.weights_bt, made.keep_bt, made.metrics(totals or BatchTotals.of(mask_bt))


def computed(case: Case, batch: Batch, **arguments):
    return computed_all([case], batch, **arguments)


def computed_all(cases: list[Case], batch: Batch, **arguments):
    return correct(
        [(case.name, case.options) for case in cases],
        train_logprobs_bt=batch.logprobs_bt,
        rollout_logprobs_bt=batch.old_logprobs_bt,
        mask_bt=batch.mask_bt,
        **arguments,
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
    assert any(kept) and (not case.name.startswith("reject_") or not all(kept))


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
def test_sequences_alone_have_their_weights_as_the_file_says(case):
    """`SEPARABLE`: the trainer may then begin with a part of a step's groups."""
    assert find(AlgorithmKind.CORRECTION, case.name).is_separable(case.options)
    batch = make_batch(4, drift=0.3)
    weights_bt, keep_bt, _ = computed(case, batch)
    for row in range(len(weights_bt)):
        alone_bt, kept_bt, _ = computed(case, batch.rows([row]))
        torch.testing.assert_close(alone_bt[0], weights_bt[row])
        assert kept_bt[0].equal(keep_bt[row])


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


WEIGHING = [case for case in CASES if not case.name.startswith("reject_")]
REJECTING = [case for case in CASES if case.name.startswith("reject_")]


@pytest.mark.parametrize("weighing", [None, *WEIGHING], ids=str)
def test_several_corrections_give_the_weights_of_one_and_keep_what_all_keep(weighing):
    """Each reads the tokens of the whole mask, as in verl, so the order does not matter."""
    batch = make_batch(1, drift=0.3)
    for first, second in zip(REJECTING, REJECTING[3:] + REJECTING[:3], strict=True):
        cases = [first, *([weighing] if weighing else []), second]
        weights_bt, keep_bt, metrics = computed_all(cases, batch)
        alone = [computed(case, batch) for case in cases]
        assert keep_bt.equal(alone[0][1] & alone[-1][1])
        assert weights_bt.equal(alone[1][0] if weighing else batch.mask_bt.to(weights_bt.dtype))
        shuffled = computed_all(cases[::-1], batch)
        assert keep_bt.equal(shuffled[1]) and weights_bt.equal(shuffled[0])
        numbers = summarised(metrics)
        assert numbers == pytest.approx(summarised(shuffled[2]))
        is_cut_bt = batch.mask_bt & ~keep_bt
        assert numbers["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
            int(is_cut_bt.sum()) / int(batch.mask_bt.sum())
        )
        assert numbers["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(int(is_cut_bt.any(-1).sum()) / 9)
        if weighing:
            of_weights = {name: value for name, value in summarised(alone[1][2]).items() if "rollout_is_" in name}
            assert {name: numbers[name] for name in of_weights} == pytest.approx(of_weights)


def test_each_rejection_reports_its_own_share_under_verls_name():
    """Ratios 3, 1, 1 and 1, 1, 1: the first token is out of token_k1's bounds, its sequence of seq_sum_k2's limit."""
    train_bt = torch.tensor([[3.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log() - 3
    inputs = {"train_logprobs_bt": train_bt, "rollout_logprobs_bt": torch.full_like(train_bt, -3.0)}
    chosen = [("reject_token", {}), ("reject_sequence_sum", {"estimator": "k2", "limit": 0.5})]
    _, keep_bt, metrics = correct(chosen, **inputs, mask_bt=torch.ones(2, 3))
    assert keep_bt.tolist() == [[False] * 3, [True] * 3]
    shares = {name.removeprefix("rollout_corr/rollout_rs_"): float(value) for name, value in metrics.items()}
    assert {name: shares[name] for name in shares if name.endswith("masked_fraction")} == pytest.approx(
        {
            "token_k1_masked_fraction": 1 / 6,
            "token_k1_seq_masked_fraction": 1 / 2,
            "seq_sum_k2_masked_fraction": 1 / 2,
            "seq_sum_k2_seq_masked_fraction": 1 / 2,
            "masked_fraction": 1 / 2,
            "seq_masked_fraction": 1 / 2,
        }
    )
    bounds = [("reject_token", {"bounds": (0.5, 2.0)}), ("reject_token", {"bounds": (0.9, 4.0)})]
    _, _, metrics = correct(bounds, **inputs, mask_bt=torch.ones(2, 3))
    assert float(metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"]) == pytest.approx(1 / 6)


@pytest.mark.parametrize("case", WEIGHING, ids=str)
def test_normalised_weights_have_mean_1_over_the_tokens_or_the_sequences_of_the_mask(case):
    """As verl's rollout_is_batch_normalize: rejected tokens count in the mean, and metrics are those before it."""
    batch = make_batch(2, drift=0.3)
    plain_bt, _, metrics = computed(case, batch)
    weights_bt, _, normalised = computed_all([case, REJECTING[0]], batch, normalize=True)
    rows = [row for row in ragged(plain_bt, batch.mask_bt) if row]
    by_token = case.name in ("tis_token", "icepop")
    counted = [weight for row in rows for weight in row] if by_token else [row[0] for row in rows]
    factor = statistics.fmean(counted)
    assert abs(factor - 1) > 1e-3
    assert float(normalised["rollout_corr/rollout_is_batch_norm_factor"]) == pytest.approx(factor)
    torch.testing.assert_close(weights_bt * factor, plain_bt)
    kept = {name: value for name, value in summarised(normalised).items() if name in summarised(metrics)}
    assert kept == pytest.approx(summarised(metrics))


def test_weights_that_are_all_0_stay_0():
    inputs = {"train_logprobs_bt": torch.zeros(1, 2), "rollout_logprobs_bt": torch.full((1, 2), -9.0)}
    inputs["mask_bt"] = torch.ones(1, 2)
    weights_bt, _, metrics = correct([("icepop", {})], **inputs, normalize=True)
    assert not weights_bt.any() and float(metrics["rollout_corr/rollout_is_batch_norm_factor"]) == 1


def test_no_two_corrections_give_weights():
    with pytest.raises(InvalidJob, match="'tis_token' and 'icepop' both give weights"):
        computed_all([Case("tis_token"), Case("icepop")], make_batch())


def test_icepop_by_sequence_by_hand():
    """Products 0.125, 8 and 1: the first two are out of bounds, as a whole, though no token is."""
    train_bt = torch.tensor([[0.5, 0.5, 0.5], [2.0, 2.0, 2.0], [2.0, 0.5, 1.0]], dtype=torch.float64).log() - 3
    weights_bt, keep_bt, metrics = correct(
        [("icepop_sequence", {})],
        train_logprobs_bt=train_bt,
        rollout_logprobs_bt=torch.full_like(train_bt, -3.0),
        mask_bt=torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
    )
    assert weights_bt[:, 0].tolist() == pytest.approx([0.0, 0.0, 1.0]) and keep_bt.all()
    numbers = {name.removeprefix("rollout_corr/rollout_is_"): value for name, value in summarised(metrics).items()}
    assert (numbers["ratio_fraction_high"], numbers["ratio_fraction_low"]) == pytest.approx((1 / 3, 1 / 3))
    assert (numbers["oob_ratio"], numbers["max"], numbers["min"]) == pytest.approx((2 / 3, 8.0, 0.125))


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
        [(name, options)],
        train_logprobs_bt=train_bt,
        rollout_logprobs_bt=torch.full_like(train_bt, -3.0),
        mask_bt=torch.ones_like(train_bt),
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
    weights_bt, _, metrics = correct([("tis_sequence", {})], **inputs)
    assert weights_bt[0].tolist() == pytest.approx([2.0] * 3)
    numbers = {name.removeprefix("rollout_corr/"): value for name, value in summarised(metrics).items()}
    assert numbers["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)  # 3/5 of the tokens
    assert numbers["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    assert numbers["rollout_is_max"] == pytest.approx(math.exp(5.855), rel=1e-6)  # 349; truncated it is 2
    assert numbers["rollout_is_min"] == pytest.approx(math.exp(-1))
    assert numbers["rollout_is_mean"] == pytest.approx((3 * 2 + math.exp(-1) + math.exp(0.1)) / 5)
    geometric = summarised(correct([("tis_geometric", {})], **inputs)[2])
    assert geometric["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(5.855 / 3), rel=1e-6)


def test_a_token_far_off_counts_whole_in_sums_and_means_of_its_sequence() -> None:
    """One token of 8 is 50 nats off, beyond the ±20 to which what is exponentiated is clamped."""
    log_ratio_bt = torch.tensor([[-50.0] + [8.0] * 7], dtype=torch.float64)
    rollout_bt = torch.full_like(log_ratio_bt, -60.0)
    inputs = {"train_logprobs_bt": rollout_bt + log_ratio_bt, "rollout_logprobs_bt": rollout_bt}
    inputs |= {"mask_bt": torch.ones_like(log_ratio_bt)}
    ratio = math.exp((7 * 8 - 50) / 8)
    weights_bt, _, metrics = correct([("tis_geometric", {"cap": 100.0})], **inputs)
    assert weights_bt[0].tolist() == pytest.approx([ratio] * 8)
    assert correct([("reject_geometric", {"bounds": (0.5, 1.01 * ratio)})], **inputs)[1].all()
    assert correct([("reject_sequence_mean", {"estimator": "k1", "bounds": (0.5, 1.01 * ratio)})], **inputs)[1].all()
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
        ("tis_token", {"cap": 0.0}, "cap: 0.0: is less than"),
        ("tis_token", {"floor": 1.5}, "is more than 1"),
        ("reject_token", {"estimator": "k4"}, "'k1', 'k2' or 'k3'"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(name, options, complaint):
    with pytest.raises(InvalidJob, match=complaint):
        find(AlgorithmKind.CORRECTION, name).check(options, "algorithm.correction")
