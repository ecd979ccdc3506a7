"""The failure report: why the gang failed, told so that the next step is clear.

Between outcome and text stands a value, `model.FailureReport`: `composing.compose_report` chooses
its words, `rendering.plain_text` and `boxed_text` lay it out. `words.one_line` tells a failure in a
notice.

Loaded on demand, since a run that succeeds needs none of it.
"""
