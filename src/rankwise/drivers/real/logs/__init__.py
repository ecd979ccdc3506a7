"""Workers' output on its way: from pipes to log files and to the console."""
