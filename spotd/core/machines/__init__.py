"""Machines from launch to end: what lists, answers and hosts show of them, as events of their attempts."""
