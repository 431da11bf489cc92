"""The emulated tests notice faults: a sample of tests/faults.py, which runs them all as a command."""

from __future__ import annotations

import pytest
from faults import FAULTS, PROBES, SURVIVORS, Fault, caught, run

from rtflash import cxx

pytestmark = pytest.mark.skipif(cxx.why_not() is not None, reason=str(cxx.why_not()))

SAMPLE = [fault for fault in FAULTS if not fault.survives][::5]


@pytest.mark.parametrize("name", PROBES)
def test_probes_pass_without_a_fault(name: str) -> None:
    run(PROBES[name])


@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault) -> None:
    shown = caught(fault)
    assert shown, "the fault survives"
    assert not shown.startswith("error:"), shown


def test_faults_are_many_and_distinct() -> None:
    assert len(FAULTS) >= 25
    assert sum(bool(fault.survives) for fault in FAULTS) <= SURVIVORS * len(FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
