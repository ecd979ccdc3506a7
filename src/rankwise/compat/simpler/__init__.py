"""The names of hw-native-sys/simpler over `rankwise.workers`.

A program moves by changing its imports: `simpler.worker` becomes `rankwise.compat.simpler.worker`,
`_task_interface` and `simpler.task_interface` become `rankwise.compat.simpler.task_interface`.
Machine code stays behind: kernels are written in the `tl` language or as numpy functions.
"""
