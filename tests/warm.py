"""`rankwise run` in this process, on a fork server that has imported torch already.

The words are read, and the end is told, as by the command. What is left out is its own process, and
the imports of a fork server for each run. Tests of how a run starts take `running.run`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
from running import Finished

import rankwise
from rankwise.cli.run import config_from_cli, exit_code
from rankwise.launch.run.supervision import Supervision, tell


def run_on(
    server: rankwise.ForkServer,
    captured: pytest.CaptureFixture[str],
    *words: str | Path,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run `rankwise run` with these words to its end."""
    with patch.dict(os.environ, environment or {}):
        argv = ["--start-method=forkserver", *map(str, words)]
        supervision = Supervision(config_from_cli(argv, os.environ), hosting=server.hosting)
        captured.readouterr()  # what was told before
        outcome = supervision.run()
        tell(outcome, supervision)
        return Finished(exit_code(outcome), *captured.readouterr())
