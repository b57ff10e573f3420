"""What `cloze serve` refuses."""

import socket

import pytest

from cloze.launch.cli import main


@pytest.mark.parametrize("host, family", [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_an_address_that_is_taken_is_a_line(folder, capsys, host, family):
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} on this machine")
    with taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--host", host, "--port", port]) == 2
    said = capsys.readouterr().err
    assert f"found {host}:{port} not free" in said and "in use" in said


def test_what_cannot_be_served_ends_in_one_line(folder, capsys, tmp_path):
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
