"""`make bench`: what comparing the embedded model with its own attention takes whenever it is loaded."""

import time

import jaxtyping
import pytest

from kvpolicy.inference.fidelity import measure_fidelity, require_own_attention
from kvpolicy.inference.loading import load_language_model

NUM_ROUNDS = 5


@pytest.mark.benchmark
def test_comparing_the_embedded_model_with_its_own_attention(embedded_model_folder, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks are no part of what users run
    model = load_language_model(embedded_model_folder)
    seconds, busy = [], []
    for _ in range(NUM_ROUNDS):
        start, started = time.perf_counter(), time.process_time()
        require_own_attention(model)
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - started)
    fidelity = measure_fidelity(model)
    print(f"\n{min(seconds):.2f} s, {min(busy):.2f} s of processors; all {[round(own, 2) for own in seconds]}")
    print(f"one call of attention: {max(fidelity.calls.values()):.1e} standard deviations")
    for (path, name), difference in fidelity.passes.items():
        print(f"{name} {path}: {difference:.1e} standard deviations")
