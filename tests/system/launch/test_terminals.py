"""On a terminal: prompts without an end."""

from pathlib import Path

from running import RANKWISE, OnTerminal

ASKING = """
print("Loading model ... ", end="", flush=True)
breakpoint()
print("and on")
"""


def test_a_prompt_is_shown_on_a_terminal_and_can_be_answered(tmp_path: Path) -> None:
    program = tmp_path / "ask.py"
    program.write_text(ASKING)

    with OnTerminal(*RANKWISE, "run", "--standalone", str(program), cwd=tmp_path) as run:
        run.wait_for("]:Loading model ... ")
        run.wait_for("]:(Pdb) ")
        run.type("p 6 * 7\n")
        run.wait_for("42")
        run.wait_for("]:(Pdb) ")
        run.type("c\n")
        run.wait_for("and on")
        assert run.process.wait(60) == 0
