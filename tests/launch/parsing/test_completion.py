"""What a real shell completes: the script is read by it, and its answers are looked at."""

import shutil
import subprocess
import sys

import pytest

from cloze.launch.cli import main
from cloze.launch.commands import COMMANDS
from cloze.launch.finetune.tasks import TASKS
from cloze.launch.parsing import shipped


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script for bash, printed by a process that has not imported torch."""
    code = (
        "import sys; from cloze.launch.cli import main; main(['completion', 'bash'])\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    path = tmp_path_factory.mktemp("completion") / "cloze.bash"
    path.write_text(printed)
    return path


def test_no_files_stand_beside_what_can_be_listed(script):
    """Nor behind a number; the folder of the script has files whose names begin as the values do."""
    for name in ("fp-file", "true-file", "1-file", "optim-file", "sst2-file", "zsh-file"):
        (script.parent / name).touch()
    assert completed(script, "cloze", "pretrain", "--train.precision", "fp") == {"fp16", "fp32"}
    assert completed(script, "cloze", "pretrain", "--train.compile", "tr") == {"true"}
    assert completed(script, "cloze", "pretrain", "--train.max_steps", "1") == set()
    assert completed(script, "cloze", "pretrain", "--help", "opt") == {"optimizer"}
    assert completed(script, "cloze", "finetune", "sst") == {"sst2"}
    assert completed(script, "cloze", "completion", "zs") == {"zsh"}
    assert completed(script, "cloze", "pretrain", "--data", "1") == {"1-file"}
    # The shell itself: what it is told to do where nothing is found.
    code = (
        f"source '{script}'; compopt() {{ echo \"told $*\"; }}; "
        "COMP_WORDS=(cloze pretrain --train.max_steps 1) COMP_CWORD=3; _cloze"
    )
    told = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "told +o default +o bashdefault\n"
    fish = subprocess.run(
        [sys.executable, "-m", "cloze", "completion", "fish"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert any("-l train.precision -r -f -a" in line for line in fish)
    assert all(" -f" not in line for line in fish if "-l data " in line)


def completed(script, *words: str) -> set[str]:
    """What TAB offers behind the words, of which the last one is unfinished."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"source '{script}' && COMP_WORDS=({quoted}) && COMP_CWORD={len(words) - 1} && _cloze && "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    result = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, cwd=script.parent
    )
    assert result.stderr == ""
    return set(result.stdout.split())


def test_bash_reads_it_and_calls_it_for_cloze(script):
    said = subprocess.run(
        ["bash", "--norc", "-c", f"source '{script}' && complete -p cloze"], capture_output=True, text=True, check=True
    )
    assert said.stdout.split()[-3:] == ["-F", "_cloze", "cloze"] and said.stderr == ""


def test_commands_operations_fields_and_values(script):
    assert completed(script, "cloze", "") == {name.split()[0] for name in COMMANDS} | {"--help", "--version"}
    assert completed(script, "cloze", "pr") == {"prepare", "pretrain", "predict"}
    assert completed(script, "cloze", "predict", "fe") == {"features"}
    (script.parent / "runs").mkdir(exist_ok=True)
    assert completed(script, "cloze", "predict", "ru") == {"runs"}, "a model, for its own operation"
    assert completed(script, "cloze", "predict", "runs", "--form") == {"--format"}, "of all operations"
    assert completed(script, "cloze", "predict", "runs", "--format", "j") == {"json"}
    assert completed(script, "cloze", "predict", "runs", "the cat", "--to") == set(), "of some only"
    assert completed(script, "cloze", "pretrain", "--train.learning") == {"--train.learning_rate"}
    assert completed(script, "cloze", "predict", "score", "--form") == {"--format"}
    assert "--train" in completed(script, "cloze", "finetune", "sst2", "--tr")
    assert completed(script, "cloze", "pretrain", "--train.precision", "f") == {"fp16", "fp32"}
    assert completed(script, "cloze", "pretrain", "--train.precision", "=", "b") == {"bf16"}, "as bash parts words"
    assert completed(script, "cloze", "pretrain", "--train.precision", "=") >= {"bf16", "fp32"}
    assert completed(script, "cloze", "pretrain", "--help", "opt") == {"optimizer"}
    assert completed(script, "cloze", "completion", "") >= {"bash", "zsh", "fish"}


def test_tasks_and_shipped_configurations_stand_beside_files(script):
    assert completed(script, "cloze", "finetune", "") >= set(TASKS)
    assert completed(script, "cloze", "finetune", "sst2", "cl") == {script.name}, "one task is all it takes"
    assert completed(script, "cloze", "pretrain", "--config", "") >= {*shipped("pretrain"), script.name}
    assert completed(script, "cloze", "pretrain", "--model", "ba") == {"base"}
    assert completed(script, "cloze", "inspect", "cloze") == {script.name}


def test_each_shell_reads_its_own(tmp_path, capsys):
    """Those shells that this machine has; every script names all commands."""
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out)
        assert all(name.split()[-1] in (tmp_path / shell).read_text() for name in COMMANDS)
        if found := shutil.which(shell):
            subprocess.run([found, "-n", str(tmp_path / shell)], check=True, capture_output=True)
    assert main(["completion", "csh"]) == 2
    assert "found csh, expected one of: bash, zsh, fish" in capsys.readouterr().err
