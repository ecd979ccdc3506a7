"""Membership of rounds: join, last call, keep-alive by lease, spares, leave, close."""
