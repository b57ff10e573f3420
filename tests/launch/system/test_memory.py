"""Limits of a process's memory."""

import pytest

from cloze.launch.system.memory import available_bytes


def write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("known", "files"),
    [
        ("0::/job/step/task\n", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpu:/\n4:memory:/job/step/task\n0::/\n",
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_every_control_group_around_the_process_limits_it(tmp_path, known, files):
    """Slurm limits the job and leaves its tasks unlimited; what has only been read from files can be had back."""
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n", "proc/self/cgroup": known})
    assert available_bytes(tmp_path) == 4000 * 1024
    limit, use, cached = files
    folder, _, limit = f"sys/fs/cgroup/{limit}".rpartition("/")
    use = use.rpartition("/")[2]
    none = "max" if limit == "memory.max" else "9223372036854771712"
    for group, most, used, reclaimable in (
        ("", none, 8000, 0),
        ("/job", str(3000 * 1024), 2500, 500),
        ("/job/step/task", none, 2400, 0),
    ):
        write(
            tmp_path,
            {
                f"{folder}{group}/{limit}": most,
                f"{folder}{group}/{use}": str(used * 1024),
                f"{folder}{group}/memory.stat": f"anon 1\n{cached} {reclaimable * 1024}\n",
            },
        )
    assert available_bytes(tmp_path) == 1000 * 1024
