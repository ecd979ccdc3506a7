"""What holds facts about ranks back until the root cause is known."""
