"""Systems of the benchmarks in processes that start in a moment."""

import multiprocessing

import pytest


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need not import torch anew."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
