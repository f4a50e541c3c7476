"""Joining a communicator: nobody is stuck in it, and whatever goes wrong there is told."""

import threading
import time
from typing import Any

import pytest
import torch

from millrace.errors import PublicationFailed
from millrace.weights.transfer.channels import rendezvous
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.channels.rendezvous import Rendezvous, join
from millrace.weights.transfer.store import serve_store


def at(port: int, timeout_s: float = 20.0) -> Rendezvous:
    return Rendezvous("127.0.0.1", port, "job/1/1/1", 1, 2, b"", torch.device("cpu"), timeout_s)


def test_a_defect_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(unused: Rendezvous) -> Any:
        raise KeyError("a defect")

    monkeypatch.setattr(rendezvous, "_channel", breaks)
    with pytest.raises(PublicationFailed, match=r"communicator job/1/1/1 could not be made: KeyError\('a defect'\)"):
        join(at(1), lambda: None)


def test_who_is_called_off_does_not_wait_and_leaves_no_channel_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store, port = serve_store("127.0.0.1", 2, 20.0)
    made: list[Any] = []
    really, came = rendezvous._channel, threading.Event()

    def late(asked: Rendezvous) -> Any:
        made.append(really(asked))
        came.set()
        return made[0]

    monkeypatch.setattr(rendezvous, "_channel", late)
    called_off = PublicationFailed("it was called off.")
    with pytest.raises(PublicationFailed, match="called off"):
        join(at(port), lambda: called_off)
    assert not made, "nobody else has come yet"
    other = GlooChannel.join("127.0.0.1", port, key="job/1/1/1", rank=0, world_size=2, timeout_s=20.0, store=store)
    assert came.wait(60)
    while made[0].failure is None:
        time.sleep(0.01)
    assert "came too late" in str(made[0].failure)
    other.close()
