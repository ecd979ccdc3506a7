"""What holds facts about ranks back until the root cause is known: its vocabulary and its machine."""
