"""How another terminal asks a running agent: what are you doing, where do your ranks stand?

The agent listens on an abstract unix socket (names: `addresses.py`). One question is one JSON
line, such as `{"ask": "status"}`; the answer is JSON lines until end of file. An answer may
take time (stacks are collected from the workers), so the server hands each question over with a
`Reply` that is written and finished whenever it is known.

A status is one line with the fields that `rankwise ps` shows: `nproc`, `state`, `age_s`,
`calling_s` (since the first collective), `program`, `attempt`, and the node's place in the job
while it has one: `node_rank`, `nodes`, `first_rank`, `world_size`, and `round` where nodes agree
upon them; `restarts`, `restarts_max`, `log_dir`, `failures` so far by cause and the
`latest_failure`, and the `workers`, each as `launch.rank_status` tells. A client that asks for the
end gets a line `going on` at once, and when the run is over another one with its outcome: `state`,
`starts`, and `why`. Stacks are one line per rank: `rank`, `pid`, `stacks`. Logs: see
`launch.log_readers`. To be stopped is answered by `stopping`, how many ranks live, and `grace_s`;
end of file then means that the run is over. The answer to why begins with a line `verdict`, which
may be empty, `ledger` (what it lacks, if anything), and of several nodes the `others`, and those
that are `silent`; then there is one per rank: `rank`, `pid`, `doing`, for how long where it makes
no progress (`still_s`), `waits_for`, for how long ranks of its node have waited for it
(`awaited_s`), whether it `is_stopped` by a signal, and `frames`, the innermost first.

A `rankwise.Pool` answers `status` in the same form, see `launch.pool_answers`.
"""
