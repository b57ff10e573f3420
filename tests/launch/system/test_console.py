"""What one process says, and what the others do not."""

from cloze.launch.system.console import Console, clock, figure
from cloze.pipeline.stores.temporary_folders import show_as


def test_rank_0_alone_speaks(capsys):
    for is_main in (False, True):
        console = Console(is_main)
        console.say("a line")
        console.warn("beware")
        console.facts("facts", [("name", "value")])
        console.table("table", ("column",), [("[red]cell",)])
        out, err = capsys.readouterr()
        if is_main:
            assert out.startswith("a line\n") and err == "warning: beware\n"
            assert "value" in out and "[red]cell" in out, "what looks like markup is shown"
        else:
            assert not out + err


def test_a_copy_of_what_a_store_has_is_called_by_the_stores_name(capsys, tmp_path):
    show_as(tmp_path / "copy", "s3://bucket/run")
    Console().say(f"{tmp_path}/copy/a")
    Console().warn(f"{tmp_path}/copy/b")
    assert capsys.readouterr() == ("s3://bucket/run/a\n", "warning: s3://bucket/run/b\n")


def test_numbers_for_people():
    assert (figure(0.123456), clock(3661.4), clock(59.6)) == ("0.1235", "1:01:01", "0:01:00")
