"""Launching from Python: `elastic_launch(LaunchConfig(…), entrypoint)(*args)`."""

from rankwise.compat.torch.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
