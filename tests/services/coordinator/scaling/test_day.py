"""A simulated day: long answers and dear replicas in the afternoon, spot notices, replicas that die."""

from benchmarks.autoscaling import DAY_S, HOUR_S, Day, Hall


def test_a_day_stays_within_its_limits() -> None:
    day = Day()
    hall = Hall(day, slower=6.0)
    result = hall.run(DAY_S)
    assert result.notices >= 5 and result.deaths >= 1, "something happened"
    assert result.prompts_lost == 0 and result.staleness <= 2
    assert day.lowest <= result.smallest and result.largest <= day.highest
    assert result.dearest_hour <= day.budget
    assert result.largest >= 4, "one replica does not feed the trainer"
    affordable = day.budget / day.price[1]
    noon = [d.wanted for at, d in hall.decisions if 14 * HOUR_S < at < 16 * HOUR_S]
    assert max(noon, default=0) <= affordable + 1
    assert result.reversals <= 16, "it follows the hours and does not flap"
    gaps = [later - one for (one, _), (later, _) in zip(hall.decisions, hall.decisions[1:], strict=False)]
    assert min(gaps) >= hall.pace.up_s
    assert result.trainer_waits < 0.15 and result.replicas_idle < 0.15


def test_fewer_replicas_make_the_trainer_wait() -> None:
    """What the day is compared with: one replica cannot feed the trainer."""
    assert Hall(Day(), fixed=1, slower=12.0).run(4 * HOUR_S).trainer_waits > 0.4
