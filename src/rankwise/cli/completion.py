"""`rankwise completion SHELL`: prints what a shell must read to complete our options and files."""

import click
from click.shell_completion import get_completion_class

from rankwise.cli.main import CONTEXT_SETTINGS, command_line

INSTALLATION = """\
bash:  rankwise completion bash > ~/.local/share/bash-completion/completions/rankwise
zsh:   rankwise completion zsh > "${fpath[1]}/_rankwise"
fish:  rankwise completion fish > ~/.config/fish/completions/rankwise.fish
"""


class _CompletionCommand(click.Command):
    def format_epilog(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("To install"):
            for line in INSTALLATION.splitlines():
                formatter.write(f"  {line}\n")


@click.command("completion", cls=_CompletionCommand, context_settings=CONTEXT_SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    shell_class = get_completion_class(shell)
    assert shell_class is not None, "click knows the three shells that the argument allows"
    click.echo(shell_class(command_line, {}, "rankwise", "_RANKWISE_COMPLETE").source())
