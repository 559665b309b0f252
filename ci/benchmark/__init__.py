"""What ``ci/bench`` is made of: checkpoints to build, a plain baseline, measured limits of the machine, scenarios."""
