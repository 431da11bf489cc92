"""The emulated tests notice faults: a sample of tests/faults.py, which runs them all as a command."""

from __future__ import annotations

import pytest
from faults import FAULTS, PROBES, SURVIVORS, Fault, caught, mutated, run

emulated = pytest.mark.emulated

SAMPLE = [fault for fault in FAULTS if not fault.survives][::11]


@emulated
@pytest.mark.parametrize("name", PROBES)
def test_probes_pass_without_a_fault(name: str) -> None:
    run(PROBES[name])


@emulated
@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault) -> None:
    shown = caught(fault)
    assert shown, "the fault survives"
    assert not shown.startswith("error:"), shown


def test_faults_are_many_and_distinct() -> None:
    assert len(FAULTS) >= 25
    assert sum(bool(fault.survives) for fault in FAULTS) <= SURVIVORS * len(FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_applies(fault: Fault) -> None:
    """The template still has the text that it changes, once."""
    assert fault.new != fault.old
    mutated(fault)
