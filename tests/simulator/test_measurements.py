"""What is measured: figures out of repeated runs, files that hold them, links and m that follow from them."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrations import measured, uniform
from hypothesis import given
from hypothesis import strategies as st
from makara.simulator import InvalidCalibration, Link
from makara.simulator.calibration.links import AllReduce, MeasuredWire, fitted_hop, fitted_links
from makara.simulator.calibration.measurements import Measurements, Row
from makara.simulator.calibration.microbatch_size import best_microbatch_size, least_bytes
from makara.simulator.calibration.statistics import Figure, summarise

WHOLE = measured(uniform(3, microbatch_size=1), "5ec7")
assert WHOLE.basis is not None
BASIS = WHOLE.basis
seconds = st.floats(1e-6, 1e3)


def figure(median: float, spread: float = 0.0) -> Figure:
    return Figure(median, spread, 9, 1)


def wire(
    *, same_vm: bool, latency_s: float = 1e-3, spread: float = 0.0, bytes_per_s: float = 1e9
) -> MeasuredWire:
    return MeasuredWire(
        same_vm=same_vm,
        latency_s=figure(latency_s, spread),
        bytes_per_s=figure(bytes_per_s),
        loaded=True,
        source="workers",
    )


def allreduce(ring: int, size_bytes: int, time_s: float, in_flight: int = 1) -> AllReduce:
    return AllReduce(
        same_vm=False, ring=ring, size_bytes=size_bytes, in_flight=in_flight, seconds=figure(time_s)
    )


def row(m: int, per_sample_s: float = 1.0, **change: Any) -> Row:
    calibration = uniform(3, microbatch_size=m, forward_s=(m * per_sample_s / 3,) * 3, **change)
    return replace(measured(calibration, f"hash{m}").rows[0], cuts=(4, 9))


def measurements(*rows: Row) -> Measurements:
    made = Measurements(basis=BASIS, rows=rows or (row(1), row(2, 0.8), row(4, 0.79)), seconds=12.5)
    return made.with_links([wire(same_vm=False), wire(same_vm=True, latency_s=1e-5)], [allreduce(2, 8, 0.5)])


# ---- figures -----------------------------------------------------------------------------------------------


def test_a_figure_is_a_median_without_outliers() -> None:
    found = summarise([1.0, 1.1, 0.9, 1.0, 50.0])
    assert found.spread == pytest.approx(0.07413)
    assert found == Figure(1.0, found.spread, 5, 1)


def test_equal_measurements_have_no_noise_and_one_apart_is_an_outlier() -> None:
    assert summarise([2.0, 2.0, 2.0, 2.0, 2.1]) == Figure(2.0, 0.0, 5, 1)
    assert summarise([2.0, 2.0, 2.0, 2.009]) == Figure(2.0, 0.0, 4, 0)


@given(st.lists(seconds, min_size=1, max_size=30))
def test_most_measurements_count_and_the_figure_lies_among_them(values: list[float]) -> None:
    found = summarise(values)
    assert found.dropped <= len(values) // 2
    assert found.repeats == len(values)
    assert min(values) * 0.999 <= found.median <= max(values) * 1.001


@given(st.lists(seconds, min_size=5, max_size=15), st.floats(1e4, 1e9))
def test_two_wild_measurements_do_not_matter(values: list[float], wild: float) -> None:
    wild_ones = [max(values) * wild] * 2
    low, high = min(values) * 0.999, max(values) * 1.001
    assert low <= summarise([*values, *wild_ones]).median <= high


# ---- files -------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was_written_and_is_made_to_be_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(measurements().to_text())
    assert Measurements.from_json(path.read_text()) == measurements()
    assert max(len(line) for line in path.read_text().splitlines()) < 200
    assert '{"median": 0.001, "spread": 0.0, "repeats": 9, "dropped": 1}' in path.read_text()


def test_a_bare_calibration_is_measurements_of_one_m(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(uniform(2, microbatch_size=8).to_json()))
    found = Measurements.from_json(path.read_text())
    assert (found.sizes, found.basis) == ((8,), None)
    assert found.at(8) == uniform(2, microbatch_size=8)
    assert Measurements.from_json(found.to_text()) == found


def test_an_m_that_was_not_measured_is_refused_by_name() -> None:
    assert measurements().at(2).microbatch_size == 2
    with pytest.raises(InvalidCalibration, match="3 was not measured; measured are 1, 2, 4"):
        measurements().at(3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"graph_hash": "hash2"',
            '"graph_hash": 2',
            r"rows\[1\]\.graph_hash: expected a valid string, got 2",
        ),
        (
            '"graph_hash": "hash2"',
            '"hash": "hash2"',
            r"rows\[1\]\.hash: unknown key \(accepted here: graph_hash, ",
        ),
        ('"microbatch_size": 2,', '"microbatch_size": 1,', "rows: expected ascending"),
        ('"microbatch_size": 4,', '"microbatch_size": "4",', r"rows\[2\]\.calibration\.microbatch_size"),
        ('"precision": "fp32"', '"precision": "bf16"', "fingerprint: it is not that of the basis"),
        ('"seconds": 12.5', '"seconds": -1', "seconds: expected greater than or equal to 0, got -1"),
        ('"ring": 2', '"ring": 1', r"allreduces\[0\]\.ring: expected greater than or equal to 2, got 1"),
        ('"same_vm": true', '"same_vm": 1', r"wires\[1\]\.same_vm: expected a valid boolean, got 1"),
        (
            '"loaded": true,\n   "source": "workers"\n  },',
            '"loaded": true\n  },',
            r"wires\[0\]\.source: is required",
        ),
        ('"format": 1,\n "f', '"format": 2,\n "f', "format: expected 1, got 2"),
    ],
)
def test_a_bad_file_is_refused_with_field_line_and_reason(old: str, new: str, message: str) -> None:
    text = measurements().to_text()
    assert text.count(old) == 1, text
    with pytest.raises(InvalidCalibration, match=message) as refused:
        Measurements.from_json(text.replace(old, new))
    assert refused.value.line is not None
    around = text.replace(old, new).splitlines()[refused.value.line - 1]
    assert refused.value.message.partition(":")[0].rpartition(".")[2].partition("[")[0] in around or (
        "required" in message
    )


def test_figures_without_a_measurement_are_refused() -> None:
    value = measurements().to_json()
    value["rows"][0]["figures"]["forward_s"][1]["dropped"] = 9
    with pytest.raises(InvalidCalibration, match=r"rows\[0\]\.figures\.forward_s\[1\]\.dropped: all 9"):
        Measurements.from_json(value)


@pytest.mark.parametrize(
    "field", [name for name in BASIS.to_json() if name not in ("threads", "num_sections")]
)
def test_the_fingerprint_changes_with_all_that_it_depends_on(field: str) -> None:
    value = BASIS.to_json()[field]
    other = replace(BASIS, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.fingerprint != BASIS.fingerprint
    assert replace(BASIS).fingerprint == BASIS.fingerprint


# ---- links -------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e10))
def test_a_hop_is_found_from_the_sums_that_it_explains(latency_s: float, bytes_per_s: float) -> None:
    link = Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
    sums = [
        allreduce(ring, size, link.allreduce_s(size, ring)) for ring in (2, 4) for size in (1 << 16, 1 << 23)
    ]
    found = fitted_hop(sums)
    assert found is not None
    fitted = Link(latency_s=1.0, bytes_per_s=1.0, hop_latency_s=found[0], hop_bytes_per_s=found[1])
    for entry in sums:
        assert fitted.allreduce_s(entry.size_bytes, entry.ring) == pytest.approx(
            entry.seconds.median, rel=1e-3
        )


def test_a_hop_never_takes_less_than_no_time() -> None:
    faster_when_larger = [allreduce(2, 1000, 1.0), allreduce(2, 2000, 0.5)]
    found = fitted_hop(faster_when_larger)
    assert found is not None
    assert found[0] >= 0
    assert found[1] > 0
    assert fitted_hop([allreduce(2, 1000, 1.0)]) is None


def test_the_median_message_takes_as_long_as_it_did() -> None:
    link = wire(same_vm=False, latency_s=1e-3, spread=2e-4).link
    assert link.jitter_s > 0
    draws = [link.latency_s + quantile for quantile in exponential_quantiles(link.jitter_s)]
    assert statistics.median(draws) == pytest.approx(1e-3, rel=0.01)


def exponential_quantiles(mean: float) -> list[float]:
    return [-mean * math.log(1 - (number + 0.5) / 999) for number in range(999)]


def test_a_kind_of_link_that_was_not_there_is_assumed_to_be_as_the_other() -> None:
    inter_vm, intra_vm = fitted_links([wire(same_vm=True, latency_s=1e-5)], [])
    assert inter_vm == intra_vm
    assert inter_vm.hop_latency_s is None


# ---- m -----------------------------------------------------------------------------------------------------


def test_m_is_the_smallest_after_which_the_time_per_sample_is_flat() -> None:
    assert best_microbatch_size([row(1, 1.0), row(2, 0.8), row(4, 0.79), row(8, 0.4)]) == 2
    assert best_microbatch_size([row(1, 1.0), row(2, 0.99)]) == 1
    assert best_microbatch_size([row(1, 1.0), row(2, 0.5), row(4, 0.25)]) == 4


def test_m_is_no_larger_than_memory_allows() -> None:
    rows = [row(1, 1.0), row(2, 0.5), row(4, 0.25, activation_bytes=(900, 9, 9))]
    assert least_bytes(rows[1].calibration) < 1000 <= least_bytes(rows[2].calibration)
    assert best_microbatch_size(rows, memory_bytes=1000) == 2
    assert best_microbatch_size(rows, memory_bytes=1) == 1
