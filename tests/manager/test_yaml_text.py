"""YAML in a job file: its values mean what a reader takes them for, and a huge one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from makara.manager.spec.job_file import read_spec
from makara.manager.spec.job_spec import JobSpecError, parse_yaml
from makara.manager.spec.yaml_text import read_yaml

JOB = """\
name: yaml
entrypoint: train:build
resources: {provider: local, max_nodes: 2}
training: {global_batch_size: 8, steps: 4}
checkpoint: {uri: ./ckpt}
"""


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("010", 'octal number in YAML, 8: write 8 or 10, or "010" if text is meant'),
        ("020", 'octal number in YAML, 16: write 16 or 20, or "020" if text is meant'),
        ("-010", "octal number in YAML, -8: write -8"),
        ("00", 'octal number in YAML, 0: write 0, or "00"'),
        ("01_0", "octal number in YAML, 8"),
        ("0x1F", "hexadecimal number in YAML, 31: write 31"),
        ("0b1", "binary number in YAML, 1: write 1"),
        ("1_000", "with underscores in YAML, 1000: write 1000"),
        ("1_0.5", "with underscores in YAML, 10.5: write 10.5"),
        ("10:30", "to base 60 in YAML, 630: write 630, a time with its unit (90s, 10m, 2h)"),
        ("1:30.5", "to base 60 in YAML, 90.5"),
        ("!!int '010'", "octal number in YAML, 8"),
        (".inf", '.inf is no number of anything here; text is written in quotes: ".inf"'),
        ("-.INF", "is no number of anything here"),
        (".nan", "is no number of anything here"),
    ],
)
def test_a_number_that_is_not_written_in_decimal_digits_is_refused(written: str, message: str) -> None:
    for text, field in (
        (f"a: 1\nb:\n  c: {written}\n", "b.c"),
        (f"a: 1\nb:\n- {written}\n", "b[0]"),
        (f"a:\n  <<: &d {{b: 1,\n   c: {written}}}\n", "a.c"),
    ):
        with pytest.raises(JobSpecError) as caught:
            read_yaml(text)
        ((name, told),) = caught.value.errors
        assert (name, caught.value.lines) == (field, (text.count("\n"),))
        assert message in told


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("10", 10), ("-3", -3), ("+5", 5), ("0", 0), ("1.50", 1.5), (".5", 0.5), ("1.0e+3", 1000.0),
        ('"010"', "010"), ("!!str 010", "010"), ("0o20", "0o20"), ("1e3", "1e3"), ("08", "08"),
        ("10m", "10m"), ("1.2.3", "1.2.3"), ("~", None),
    ],
)  # fmt: skip
def test_decimal_numbers_and_texts_are_read_as_written(written: str, value: object) -> None:
    assert read_yaml(f"a: {written}") == {"a": value}


@pytest.mark.parametrize("steps", ["0o20", "1e3", "08", '"64"', "yes", "2026-01-01", "~", "1.0", "[4]"])
def test_what_is_no_whole_number_is_no_number_of_steps(steps: str) -> None:
    with pytest.raises(JobSpecError, match=r"training\.steps: expected a valid integer"):
        parse_yaml(JOB.replace("steps: 4", f"steps: {steps}"))


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("8080", 'written in quotes: "8080"'),
        ("2.10", "written in quotes (line"),  # "2.1" would be another text
        ("yes", "written in quotes (line"),
        ("2026-01-01", 'written in quotes: "2026-01-01"'),
        ("~", "an empty value, and ~ alone, are none"),
        ("", "an empty value, and ~ alone, are none"),
    ],
)
def test_the_value_of_a_variable_is_text(value: str, hint: str) -> None:
    with pytest.raises(JobSpecError, match=r"envs\.A: expected a valid string") as caught:
        parse_yaml(f"{JOB}envs:\n  A: {value}\n")
    assert hint in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
def test_anchors_merges_line_ends_and_a_byte_order_mark_change_no_value(
    encoding: str, tmp_path: Path
) -> None:
    text = JOB.replace("{provider: local, max", "{<<: &d {provider: local, min_nodes: 1}, max")
    text = text.replace("{global_batch_size: 8, steps: 4}", "{global_batch_size: &n 8, steps: *n}")
    (tmp_path / "job.yaml").write_bytes(text.replace("\n", "\r\n").encode(encoding))
    spec = read_spec(tmp_path / "job.yaml")
    assert (spec.resources.max_nodes, spec.resources.min_nodes, spec.training.steps) == (2, 1, 8)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_another_encoding_is_named_with_its_remedy(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(JOB.encode(encoding))
    with pytest.raises(JobSpecError, match=r"save .* as UTF-8"):
        read_spec(tmp_path / "job.yaml")


def laughs(depth: int, width: int) -> str:
    """Nested lists of aliases, which stand for width ** depth values."""
    rows = [f"a0: &a0 [{', '.join('x' * width)}]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    return "\n".join(rows)


def test_aliases_that_stand_for_too_many_values_are_refused() -> None:
    with pytest.raises(JobSpecError, match=r"more than 20,000 values; use fewer aliases \(line 5\)"):
        read_yaml(laughs(10, 10))
    merged = "\n".join(
        ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40)]
    )
    with pytest.raises(JobSpecError, match="more than 20,000 values"):
        read_yaml(merged)
    assert len(read_yaml(laughs(3, 10))["a2"]) == 10
    with pytest.raises(JobSpecError, match="more than 20,000 values"):
        read_yaml(f"a: [{'1, ' * 20_001}]")


def test_a_text_nested_too_deeply_is_refused_in_every_form() -> None:
    deep = "".join(f"{' ' * i}a{i}:\n" for i in range(70))
    for text in ("[" * 5000, "[" * 70 + "]" * 70, "{a: " * 70, deep, "- " * 70 + "a"):
        with pytest.raises(JobSpecError, match="nested too deeply"):
            read_yaml(text)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "job.yaml").open("wb") as file:
        file.truncate(1 << 40)
    for path in (tmp_path / "job.yaml", Path("/dev/zero")):
        with pytest.raises(JobSpecError, match="is larger than 1024 KiB; is it a job file"):
            read_spec(path)


def test_variables_that_no_process_can_be_started_with_are_refused() -> None:
    fits, too_long = "x" * (131072 - 3), "x" * (131072 - 2)  # "A=", and a closing NUL
    assert parse_yaml(f"{JOB}envs: {{A: {fits}}}").envs["A"] == fits
    refused = {
        f"envs: {{A: {too_long}}}": ("envs.A", "has 131,073 bytes with its name"),
        f"envs: {{A: {'ü' * 65536}}}": ("envs.A", "has 131,075 bytes with its name"),
        "envs: {" + ", ".join(f"V{i}: {'x' * 50_000}" for i in range(6)) + "}": ("envs", "at most 262,144"),
        f"setup: {'x' * 131072}": ("setup", "put it into a script below workdir"),
    }
    for text, (field, message) in refused.items():
        with pytest.raises(JobSpecError) as caught:
            parse_yaml(f"{JOB}{text}\n")
        assert message in dict(caught.value.errors)[field]
