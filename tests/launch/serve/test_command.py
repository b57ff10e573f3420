"""What `cloze serve` refuses."""

import socket

from cloze.launch.cli import main


def test_what_cannot_be_served_ends_in_one_line(folder, capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port]) == 2
    assert f"found 127.0.0.1:{port} not free" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
