"""Data sheets by the names of devices."""

import pytest

from cloze.launch.system.data_sheets import find_data_sheet

NAMES = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H800": 989,
    "NVIDIA H800 PCIe": 756,
    "NVIDIA H20": 148,
    "NVIDIA GB200": 2500,
    "NVIDIA B200": 2250,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A30": 165,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA A10G": 70,
    "Tesla V100-SXM2-32GB": 125,
    "NVIDIA RTX A1000": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 5090 D": None,
    "Quadro RTX 6000": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_devices_are_known_by_their_whole_names(name):
    sheet = find_data_sheet(name)
    assert (sheet and sheet.flops / 1e12) == NAMES[name]
