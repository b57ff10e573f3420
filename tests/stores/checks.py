"""What must hold in every kind of store."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from cloze.launch.cli import main
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.stores import leases
from cloze.pipeline.stores.leases import leased
from cloze.pipeline.stores.places import to_place
from tests.pipeline import corpus


def prepared_as_on_disk(bucket: str, missing: str, tmp_path: Path, capsys) -> None:
    """The same bytes from a store into it; done again, it is done already; verified; a missing bucket is one line."""
    source = corpus.write_jsonl(tmp_path / "in/a.jsonl.gz", corpus.documents(60, seed=1))
    local = corpus.config(tmp_path, [source])
    prepare(local)
    (to_place(bucket) / "in/a.jsonl.gz").write(source)
    stored = replace(local, input=[f"{bucket}/in/*.gz"], output=f"{bucket}/data")
    for _ in range(2):
        prepare(stored)
    data = to_place(bucket) / "data"
    assert {each.key.removeprefix("data/"): data.at(each.key).read_bytes() for each in data.objects()} == (
        corpus.contents(tmp_path / "data")
    )
    assert {each.key: each.content for each in data.objects()} == {
        each.key: data.at(each.key).info().content for each in data.objects()
    }
    assert main(["verify", str(data)]) == 0 and "all as they were written" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"^{missing}: found no such bucket"):
        (to_place(missing) / "x").read_bytes()


def a_lease_is_kept(bucket: str, monkeypatch) -> None:
    """One holds it and renews it, another doesn't get it."""
    monkeypatch.setattr(leases, "SECONDS", 1)
    path, notes = to_place(bucket) / "lock", []
    with leased(path, notes.append) as lease:
        with leased(path, notes.append) as other:
            assert other is None
        time.sleep(1.2)
        lease.check()
    assert not path.is_file() and len(notes) == 1
