"""Heavy programs both ways, as a table in Markdown: `python heavy.py [PYTHON [TITLE…]]`.

PYTHON is an interpreter in which rankwise and the libraries are installed:

    pip install torch accelerate lightning transformers deepspeed jax pandas scipy scikit-learn \\
        tqdm safetensors coverage debugpy

Ends with exit code 1 if a program differs. The results are in
docs/development/automatic-start.md; they take ten minutes.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from agreement import HERE, differences, seen

CLIENTS = HERE.parents[1] / "clients" / "programs"
QUIET = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
DEBUGGER = ("-m", "debugpy", "--listen", "127.0.0.1:0", "covered.py")
PROGRAMS: list[tuple[str, tuple[str, ...]]] = [
    ("FSDP2, tensor parallelism, pipeline", ("sharded.py",)),
    ("DataLoader, spawn and forkserver", ("spawned_loaders.py",)),
    ("torch.compile", ("compiled.py",)),
    ("torch.profiler", ("profiled.py",)),
    ("torch.distributed.checkpoint, safetensors", ("checkpoint.py",)),
    ("accelerate, tqdm", ("accelerated.py",)),
    ("Hugging Face Trainer", ("transformers_trainer.py",)),
    ("Lightning Trainer", ("lightning_ddp.py",)),
    ("DeepSpeed", ("deep_speed.py",)),
    ("jax after numpy", ("jax_gradient.py",)),
    ("jax first", ("jax_first.py",)),
    ("pandas, scipy, scikit-learn with joblib", ("tables.py",)),
    ("coverage run", ("-m", "coverage", "run", "-p", "--data-file=../cover", "covered.py")),
    ("debugpy", DEBUGGER),
    ("torch after a module beside the script", ("clusters.py",)),
]


def main() -> int:
    python = sys.argv[1] if len(sys.argv) > 1 else sys.executable
    print("| program | ranks with auto | the same? |\n| --- | --- | --- |")
    is_equal = True
    asked = sys.argv[2:]
    for title, words in PROGRAMS:
        if asked and not any(part in title for part in asked):
            continue
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "folder"
            folder.mkdir()
            for source in (*(HERE / "heavy").glob("*.py"), *CLIENTS.glob("*.py")):
                shutil.copy(source, folder)
            shutil.copy(HERE / "programs" / "in_step.py", folder)
            runs = [
                seen(words, folder, method, environment=QUIET, python=python)
                for method in ("auto", "subprocess")
            ]
        told = differences(*runs) or ("" if runs[0].code == 0 else f"exit code {runs[0].code}")
        is_equal = is_equal and not told
        how = "forked" if runs[0].is_forked else runs[0].how.rpartition("of its own: ")[2]
        print(f"| {title} | {how} | {'no' if told else 'yes'} |", flush=True)
        if told:
            print(told, *runs[0].report, sep="\n", file=sys.stderr)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
