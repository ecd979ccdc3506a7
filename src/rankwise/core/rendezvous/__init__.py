"""Who is in which round: join, last call, keep-alive by lease, spares, leave, close."""
