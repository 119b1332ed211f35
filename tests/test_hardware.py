"""Device records: what ships, how names are found, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from samples import MINIMAL_DEVICE

import specmodel as sm
from specmodel.hardware import device_yaml, read_device

RHO = {
    # Dense 16-bit matrix FLOP/s over memory bandwidth. Each range is narrower than a factor of
    # two, so that a peak "with sparsity" falls outside; families are split by their memory.
    ("volta", "HBM"): (130, 150),
    ("turing", "GDDR"): (190, 220),
    ("ampere", "HBM"): (150, 210),
    ("ampere", "GDDR"): (190, 220),
    ("ampere", "GDDR, consumer"): (70, 85),
    ("ada", "GDDR"): (370, 430),
    ("ada", "GDDR, half rate"): (190, 220),
    ("ada", "GDDR, consumer"): (150, 175),
    ("hopper", "HBM"): (200, 390),
    ("hopper", "export, few units on much memory"): (35, 40),
    ("blackwell", "HBM"): (210, 320),
    ("blackwell", "GDDR"): (260, 300),
    ("blackwell", "GDDR, consumer"): (105, 130),
    ("blackwell", "LPDDR"): (400, 500),
    ("rubin", "HBM"): (170, 200),
    ("cdna2", "HBM"): (110, 130),
    ("cdna3", "HBM"): (210, 260),
    ("cdna4", "HBM"): (280, 320),
    ("rdna", "LPDDR"): (210, 250),
    ("gaudi", "HBM"): (150, 200),
    ("gaudi", "HBM, third"): (450, 520),
    ("tpu", "HBM"): (160, 250),
    ("tpu", "HBM, sixth"): (500, 600),
    ("trainium", "HBM"): (210, 250),
    ("apple", "LPDDR"): (28, 40),
    ("groq", "SRAM"): (2, 3),
    ("cpu", "DDR"): (300, 400),
}
PART = {
    "t4": "GDDR",
    "a10": "GDDR", "a40": "GDDR", "rtx-a6000": "GDDR", "rtx-3090": "GDDR, consumer",
    "l4": "GDDR", "l40": "GDDR, half rate", "l40s": "GDDR", "rtx-6000-ada": "GDDR",
    "rtx-4090": "GDDR, consumer",
    "h20": "export, few units on much memory",
    "rtx-pro-6000-blackwell": "GDDR", "rtx-5090": "GDDR, consumer", "gb10": "LPDDR",
    "strix-halo": "LPDDR", "m2-ultra": "LPDDR", "m3-ultra": "LPDDR", "m4-max": "LPDDR",
    "gaudi-3": "HBM, third", "tpu-v6e": "HBM, sixth", "groq-lpu": "SRAM", "cpu-generic": "DDR",
}  # fmt: skip
# Half the bits run twice as fast but where the maker states otherwise: GeForce halves its 16-bit
# (and fp8) rates only; Blackwell Ultra and Rubin give int8 up for fp4; CDNA 2, RDNA and TPU v4 have
# no faster 8-bit rate.
RATIO = {
    ("int8", "16"): {
        "groq-lpu": 4, "rtx-3090": 4, "rtx-4090": 4, "rtx-5090": 4, "b300": 0.067, "gb300": 0.066,
        "rubin-vr200": 0.625, "mi250x": 1, "strix-halo": 1, "tpu-v4": 1,
    },
    ("fp8", "16"): {"gaudi-3": 1, "rubin-vr200": 4.375},
    ("fp4", "fp8"): {"rtx-5090": 4, "b300": 2.92, "gb300": 3},
}  # fmt: skip
TEN = {
    "a100-sxm-80gb", "l4", "l40s", "rtx-4090", "h20", "h100-sxm", "h100-pcie", "h200-sxm", "b200",
    "mi300x",
}  # fmt: skip


def test_the_ten_devices_and_a_cpu_ship() -> None:
    assert set(sm.device_names()) >= TEN | {"cpu-generic"}


@pytest.mark.parametrize("name", sm.device_names())
def test_peaks_are_dense(name: str) -> None:
    device = sm.load_device(name)
    low, high = RHO[device.family, PART.get(name, "HBM")]
    assert high < 2 * low
    flops = device.peak_flops
    sixteen = "bfloat16" if "bfloat16" in flops else "float16"
    assert low <= device.rho(sixteen) <= high
    for (narrow, wide), exceptions in RATIO.items():
        base = sixteen if wide == "16" else wide
        if narrow in flops and base in flops:
            ratio = exceptions.get(name, 2)
            assert flops[narrow] / flops[base] == pytest.approx(ratio, rel=0.03), (narrow, base)


# What the vendors state, to catch a slip in a file: bf16 TFLOP/s, TB/s, GB.
@pytest.mark.parametrize(
    ("name", "tera", "bandwidth", "capacity"),
    [
        ("a100", 312, 2.039, 80),
        ("l4", 121, 0.300, 24),
        ("l40s", 362.05, 0.864, 48),
        ("4090", 165.2, 1.008, 24),
        ("h20", 148, 4.0, 96),
        ("h100", 989.4, 3.35, 80),
        ("h100-pcie", 756.5, 2.0, 80),
        ("h200", 989.4, 4.8, 141),
        ("b200", 2250, 8.0, 180),
        ("mi300x", 1307.4, 5.3, 192),
        ("a800", 312, 2.039, 80),
        ("h800", 989.5, 3.35, 80),
        ("l40", 181.05, 0.864, 48),
    ],
)
def test_headline_figures(name: str, tera: float, bandwidth: float, capacity: float) -> None:
    device = sm.load_device(name)
    assert device.flops("bfloat16") == tera * 1e12
    assert device.memory_bandwidth == pytest.approx(bandwidth * 1e12)
    assert device.memory_capacity == capacity * 1e9


@pytest.mark.parametrize(("name", "total"), [("a800", 400), ("h800", 400), ("a100", 600)])
def test_nvlink_is_one_direction(name: str, total: float) -> None:
    assert sm.load_device(name).interconnect_bandwidth == total * 1e9 / 2


@pytest.mark.parametrize("name", sm.device_names())
def test_every_value_is_sourced(name: str) -> None:
    device = sm.load_device(name)
    values = {f"peak_flops.{dtype}" for dtype in device.peak_flops}
    values |= {"memory_bandwidth", "memory_capacity"}
    assert values <= set(device.sources)
    assert all("read 20" in source for source in device.sources.values())


@pytest.mark.parametrize(
    "spelling",
    ["h100", "H100 SXM", "nvidia-h100-80gb", "NVIDIA H100_SXM5", "h100-sxm", "H100-80GB"],
)
def test_spellings_find_one_file(spelling: str) -> None:
    assert sm.load_device(spelling).name == "h100-sxm"


# As the tables of papers and engines write them.
@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100 80GB", "h100-sxm"), ("H200", "h200-sxm"), ("H20", "h20"), ("H800", "h800-sxm"),
        ("NVIDIA H800 SXM5 80GB", "h800-sxm"),
        ("A100 80GB", "a100-sxm-80gb"), ("A100-80GB", "a100-sxm-80gb"),
        ("A100-PCIE 80GB", "a100-pcie-80gb"), ("NVIDIA A800-SXM4-80GB", "a800-sxm-80gb"),
        ("A100 40GB", "a100-sxm-40gb"), ("A100-40GB", "a100-sxm-40gb"),
        ("A800", "a800-sxm-80gb"), ("V100-32GB", "v100-sxm2-32gb"), ("NVIDIA L40", "l40"),
        ("B200", "b200"), ("B300", "b300"), ("GB200", "gb200"), ("GB300", "gb300"),
        ("GB300 NVL72", "gb300"), ("GB10", "gb10"), ("RTX A6000", "rtx-a6000"),
        ("RTX 3090", "rtx-3090"), ("RTX 3090 24GB", "rtx-3090"), ("RTX 4090", "rtx-4090"),
        ("RTX 5090", "rtx-5090"), ("MI300X", "mi300x"), ("MI355X", "mi355x"),
        ("TPU-v4", "tpu-v4"), ("Trainium2", "trainium-2"),
    ],
)  # fmt: skip
def test_spellings_of_published_tables(spelling: str, name: str) -> None:
    assert sm.load_device(spelling).name == name


@pytest.mark.parametrize(
    ("typo", "meant"), [("h1000", "h100"), ("mi300", None), ("rtx4091", "rtx4090")]
)
def test_unknown_names(typo: str, meant: str | None) -> None:
    if meant is None:
        assert sm.load_device(typo).name == "mi300x"
        return
    with pytest.raises(sm.ProfileError, match=f"unknown GPU '{typo}'; did you mean '{meant}"):
        sm.load_device(typo)


def test_a_dtype_the_device_lacks() -> None:
    with pytest.raises(sm.DomainError, match="a100-sxm-80gb has no fp8 arithmetic"):
        sm.load_device("a100").flops("fp8")


def test_a_minimal_file(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(MINIMAL_DEVICE)
    device = sm.load_device(file)
    assert device.rho("bfloat16") == 100
    assert device.link is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.0e+12", "!!python/name:os.system", "not valid YAML"),
        ("1.0e+12", "!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("value: 1.0e+12", "value: 3.35e12", "memory_bandwidth: value: must be a number"),
        ("value: 1.0e+12", "value: '1'", "must be a number"),
        ("value: 1.0e+12", "value: true", "must be a number"),
        ("value: 1.0e+12", "value: .nan", "must be a number; got nan"),
        ("value: 1.0e+12", "value: -1.0", "-1 B/s is outside what any device has"),
        ("value: 1.0e+12", "value: .inf", "must be a number; got inf"),
        ("schema: 1", "schema: 2", "schema: must be 1; got 2"),
        ("name: x\n", "", "name: missing"),
        ("name: x\n", "name: [x]\n", "name: must be a string"),
        ("vendor: V", "vendr: V", "vendr: unknown key; did you mean 'vendor'"),
        ("bfloat16:", "bflot16:", "unknown dtype 'bflot16'; did you mean 'bfloat16'"),
        ("  memory_bandwidth", "  memory_bandwith", "memory_bandwith: unknown key"),
        ("source: s}\n  memory_capacity", "source: z}\n  memory_capacity", "source: 'z' is not"),
        ("family: f", "family: f\nfamily: g", "duplicate key 'family'"),
        ("datasheet:", "datasheet: [1]\nx:", "unknown key"),
        ("schema: 1", "schema: [", "not valid YAML"),
        ("title: X", "1: X", "keys must be text"),
    ],
)
def test_bad_files(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MINIMAL_DEVICE
    file = tmp_path / "x.yaml"
    file.write_text(MINIMAL_DEVICE.replace(old, new, 1))
    with pytest.raises(sm.ProfileError, match=message) as caught:
        read_device(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["", "just text", "[1, 2]", "\x00"])
def test_files_that_are_no_record(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(sm.ProfileError):
        read_device(file)


def test_plain_yaml_reads_the_shipped_files_alike() -> None:
    folder = Path(__file__).parents[1] / "hardware_profiles"
    for file in folder.glob("*.yaml"):
        raw = yaml.safe_load(file.read_text())
        device = read_device(file)
        assert device.name == file.stem == raw["name"]
        assert device.memory_bandwidth == raw["datasheet"]["memory_bandwidth"]["value"]


@pytest.mark.parametrize("name", sm.device_names())
def test_a_record_is_read_back_from_its_text(name: str, tmp_path: Path) -> None:
    device = sm.load_device(name)
    file = tmp_path / "device.yaml"
    file.write_text(device_yaml(device), encoding="utf-8")
    assert sm.load_device(file) == device


def test_a_value_without_a_source_is_not_written() -> None:
    device = sm.load_device("h100")
    with pytest.raises(sm.ProfileError, match=r"h100-sxm: l2_cache: its source is not known"):
        device_yaml(replace(device, sources={**device.sources, "l2_cache": "measured"}))
