"""The choice between whole weights and changes, from the seconds of earlier transfers."""

from services.coordinator.publication.transfer_setup import TRY_AGAIN_AFTER, WORTH_S, PathChoice


def test_fast_links_never_try_deltas():
    choice = PathChoice()
    assert not choice.delta
    for _ in range(3 * TRY_AGAIN_AFTER):
        choice.learn(0.9 * WORTH_S, whole=True)
        assert not choice.delta


def test_slow_links_keep_deltas_as_long_as_they_are_faster():
    choice = PathChoice()
    choice.learn(4.3, whole=True)
    assert choice.delta
    choice.learn(4.5, whole=True)  # everything, which is kept from now on
    choice.learn(0.4, whole=False)
    assert choice.delta
    choice.learn(5.0, whole=False)  # at a larger learning rate more elements change
    assert not choice.delta


def test_deltas_that_were_slower_are_tried_again_after_a_while():
    choice = PathChoice()
    choice.learn(2.0, whole=True)
    choice.learn(3.0, whole=False)
    for _ in range(TRY_AGAIN_AFTER):
        assert not choice.delta
        choice.learn(2.0, whole=True)
    assert choice.delta
    choice.learn(2.1, whole=True)
    assert choice.delta, "the first one keeps what it sends, the next is measured"
    choice.learn(2.5, whole=False)
    assert not choice.delta
