"""The command line: reads flags and the environment, and turns them into values of `launch`."""
