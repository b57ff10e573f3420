"""Machines to plan with."""

import pytest

from cloze.launch.system.data_sheets import DATA_SHEETS
from cloze.launch.tools.planning.machines import find_machine
from cloze.pipeline.errors import UserError


def test_every_data_sheet_can_be_planned_with_and_says_its_source():
    assert len({sheet.key for sheet in DATA_SHEETS}) == len(DATA_SHEETS)
    for sheet in DATA_SHEETS:
        machine = find_machine(sheet.key)
        assert machine.flops == sheet.flops and 0 < machine.best_product < 1 and sheet.source
    with pytest.raises(UserError, match="plan.device: found 'h1000', expected this, cpu, .*h100-nvl"):
        find_machine("h1000")
