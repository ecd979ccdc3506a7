"""What a chip is made of: `host` runs numpy functions, `sim` a simulated accelerator's kernels."""
